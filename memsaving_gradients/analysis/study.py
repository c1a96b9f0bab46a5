"""A training step that is traced for analysis: its gradients stay as TensorFlow built them, and no
step runs.

Tracing has its usual effects: variables that the first trace creates, such as an optimizer's slots,
are created.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.memory.timeline import CHANCE
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients import patching
from memsaving_gradients.budget import chunk_bytes, plain_bytes, safe_bytes
from memsaving_gradients.engine import whole_step
from memsaving_gradients.engine.driver.driver import Driver
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.planning.within_limits import first_share, seek
from memsaving_gradients.engine.rewire import observing
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.engine.step_budget import cover_whole_step
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Limits, Proposal, budget_curve
from memsaving_gradients.planners.budget_search import FLOORS, Search
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.meter import Found

__all__ = ["MOST_PROOFS", "SOME", "Study", "asked", "function_of", "largest", "specs_of", "traced"]

#: The options of `memsaving_gradients.gradients` that matter to an analysis.
OPTIONS = (
    "batch_size",
    "loop_steps",
    "hold_gradients",
    "xla",
    "accumulate",
    "profile",
    "progress",
)
#: Fact: any budget makes planning search as for budgets; the size of this one decides nothing.
SOME = 1e-9
#: The most steps that are run, or rehearsed, to prove an answer, and the most numbers of
#: microbatches that are tried for one. Chosen by judgement.
MOST_PROOFS = 8
#: Shares to ask for, of the bytes that a budget has room for if chunks are filled as in the plan of
#: least memory. Other plans may leave more holes.
ASKED = (1.0, 0.8, 0.6)


def asked(options: dict[str, Any]) -> Options:
    """Return options for the analysis of a step; raise for any others."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise ArgumentError(
                name,
                value,
                f"no such option; options are {', '.join(OPTIONS)}. Pass the arguments of the step"
                " by position",
            )
    return Options(**options, budget=SOME)


class Study:
    """The analysis of a step's gradient computation; of several, of the one with the most ops.

    Attributes
    ----------
    site
        The computation.
    computations
        The number of computations in the step, in one replica.
    step, graph
        The computation as captured.
    before
        The simulation of plain training, as it runs.
    plain
        The bytes that fractions refer to.
    loops_alone
        After `least`: for each way to replay loops, the budget (bytes) that it needs if nothing
        else is done, and its extra time.
    search
        After `least`: the search in which its plan was found, on the step with masks packed.
    """

    def __init__(self, fn: Any, args: Sequence[Any], options: Options) -> None:
        sites, self._whole = traced(fn, args, options)
        self.site = largest(sites)
        call = self.site.call
        # Computations of other replicas do not count.
        self.computations = sum(call.is_here(site.call.first_operation) for site in sites)
        if graphs.is_function(self.site.graph):
            cover_whole_step(self.site)
        self.step, self.before = self.site.original()
        self.graph = self.step.graph
        self.plain = plain_bytes(self.before, self.site.gating)
        self.loops_alone: list[tuple[int, float]] = []
        self.search: Search | None = None
        self._holes: float | None = None

    @property
    def plain_budget(self) -> int:
        """The least budget that plain training fits, bytes."""
        return safe_bytes(self.before, self.site.gating)

    @property
    def assumes_batch(self) -> bool:
        """Whether bytes depend on an unknown dimension, and no batch size was given."""
        unknown = self.step.source.bytes_per_example[self.graph.size > 0] > 0
        return bool(unknown.any()) and self.site.options.batch_size is None

    def budget_for(self, need: int) -> int:
        """Return the budget to give for a plan that needs ``need`` bytes, with an allowance for
        chance."""
        return need if self.site.xla else int(need * (1 + CHANCE))

    def least(self) -> Found | None:
        """Return a plan of least memory, the first that an error about a budget would look at, and
        the budget to give for it. To be called once.

        ``None``: no plan saves anything. In deep networks, the plan is the first of `chain`. It is
        not rewritten; its budget has room for the bytes that the executor usually adds.
        """
        self.site.floors = FLOORS[:1]
        if self.site.is_large:
            return self._least_of_chains()
        self.site.call = replace(self.site.call, mode="budget")
        driver = Driver(self.site)
        outcome = driver.least()
        self.search = driver.search
        self.loops_alone = [
            (need, self.of_step(seconds - self.graph.total_seconds))
            for need, seconds in driver.loops_alone
        ]
        if outcome is None or self.search is None:
            return None
        return Found(outcome.proposal, outcome.need, None)

    def executor_adds(self, least: Found) -> float:
        """Return the factor by which the executor exceeds the bytes of a plan. It is known of
        ``least``, and assumed for other plans."""
        return max(1.0, least.need / max(self.budget_for(self.need(least.proposal)), 1))

    def extra_within(self, budget: int, least: Found) -> float:
        """Return the extra time of a plan for ``budget`` bytes: the fastest that is found, or the
        plan ``least``. To be called after `least`."""
        assert self.search is not None
        plan, adds = least.proposal, self.executor_adds(least)
        most = plan.peak * budget / max(self.need(plan) * adds, 1)
        asked = [int(most * share) for share in ASKED]
        limits = Limits(keep=self.search.keep, accumulate=self.search.accumulate)
        found = [plan for _, plan in budget_curve.plans(self.search.meter.graph, limits, asked)]
        fits = [one for one in found if self.budget_for(self.need(one)) * adds <= budget]
        return min(self.extra_time(one) for one in [plan, *fits])

    def _least_of_chains(self) -> Found | None:
        try:
            state = seek(self.site)
        finally:
            self.site.abandon()
        if state is None or state.search is None:
            return None
        self.search = state.search
        found = replace(self.search, planner=chain.plan).least()
        plain = chunk_bytes(self.before, self.site.gating) / max(self.before.peak, 1)
        self._holes = max(plain, found.need / max(found.proposal.peak, 1))
        return replace(found, need=int(found.need / first_share(self.site)))

    def need(self, proposal: Proposal) -> int:
        """Return the bytes that a plan needs in chunks. In deep networks, estimate them by the
        larger ratio to bytes asked for, of plain training and the plan of least memory."""
        if self._holes is not None:
            return int(proposal.peak * self._holes)
        assert self.search is not None
        return self.search.meter.need(proposal)

    def extra_time(self, proposal: Proposal) -> float:
        """Return the extra time of a plan, and of the masks packed for it, as a fraction of the
        plain step's time."""
        assert self.search is not None
        packing = self.search.meter.graph.total_seconds - self.graph.total_seconds
        return self.of_step(proposal.extra_seconds + packing)

    def of_step(self, seconds: float) -> float:
        """Return a time as a fraction of the plain step's time."""
        return float(seconds / max(self.graph.total_seconds, 1e-12))

    @cached_property
    def variables(self) -> tuple[int, int]:
        """Bytes of the variables that the forward pass uses, and of all others."""
        first = graphs.creation_index(self.site.call.first_operation)
        parameters = sum(
            graphs.variable_bytes(handle)
            for handle in _handles(self.site.graph)
            if any(graphs.creation_index(user) < first for user in handle.consumers())
        )
        return parameters, sum(map(graphs.variable_bytes, _handles(self._whole))) - parameters

    @property
    def sums(self) -> int:
        """Bytes of the gradients that a loop over microbatches adds up, if the site is one of these
        microbatches; 0: there is no such loop."""
        batch = self.site.options.batch
        return sum(tensor_bytes(tensor).at(batch) for tensor in whole_step.added_up(self._whole))


def function_of(fn: Any, args: Sequence[Any], *, compiled: bool = False) -> Any:
    """Return a training step as a ``tf.function`` that was never traced, from a function or a
    compiled Keras model. ``compiled``: XLA compiles it in any case."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(fn, keras.Model):
        fn = _train_step(fn, args)
    if not callable(fn):
        raise ArgumentError(
            "fn", fn, "is not a function; give a training step, a tf.function or a Keras model"
        )
    return autodiff.traced_anew(fn, compiled=compiled)


def _handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Return the handles of the variables that a function's graph uses."""
    ends = (op for op in graph.get_operations() if not op.inputs)
    return [handle for op in ends for handle in op.outputs if handle.dtype == tf.resource]


def traced(fn: Any, args: Sequence[Any], options: Options) -> tuple[list[Site], tf.Graph]:
    """Return the gradient computations of a step, as TensorFlow built them, and its graph."""
    sites: list[Site] = []
    function = function_of(fn, args, compiled=bool(options.xla))
    specs = specs_of(args)
    with observing(sites.append), patching.scoped(options, eager_is_error=False):
        graph = function.get_concrete_function(*specs).graph
    if not sites:
        raise ArgumentError(
            "fn",
            fn,
            "asks for no gradients that could be rewired; compute the loss and its gradients in"
            " it, with tf.GradientTape or tf.gradients",
        )
    return sites, graph


def largest(sites: Sequence[Site]) -> Site:
    """Return the gradient computation with the most ops."""
    return max(sites, key=lambda site: len(site.call.own))


def _train_step(model: Any, args: Sequence[Any]) -> Callable[..., Any]:
    if getattr(model, "optimizer", None) is None:
        raise ArgumentError("fn", model, "is a model without an optimizer; call compile first")
    if not args:
        raise ArgumentError(
            "fn", model, "is a model; also give the batch that its train_step takes, such as x, y"
        )
    if isinstance(args[0], tf.data.Dataset):
        raise ArgumentError("args", args[0], "is a dataset; give a batch of it, or tensor specs")
    if not model.built:
        # Building by shape would create no variables of a subclassed model.
        specs = tf.nest.map_structure(_spec, args[0])
        tf.function(lambda x: model(x)).get_concrete_function(specs)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)

    def train_step(*batch: Any) -> Any:
        return model.train_step(batch)

    return tf.function(train_step, jit_compile=bool(model.jit_compile) or None)


def specs_of(args: Sequence[Any]) -> list[Any]:
    """Return arguments of a step, with shapes and dtypes in the place of tensors and arrays."""
    return list(tf.nest.map_structure(_spec, list(args)))


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, (tf.Tensor, np.ndarray)):
        return tf.TensorSpec(leaf.shape, leaf.dtype)
    return leaf
