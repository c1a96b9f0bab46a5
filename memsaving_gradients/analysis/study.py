"""A training step that is traced to be looked at: its gradients stay as TensorFlow built them, and
nothing runs.

Nothing runs but what tracing runs: variables that are created on the first trace, such as an
optimizer's slots, are created.
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
from memsaving_gradients.engine.driver.following import Following
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.planning.within_limits import first_share, seek
from memsaving_gradients.engine.rewire import observing
from memsaving_gradients.engine.site import Site
from memsaving_gradients.engine.step_budget import see_whole
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Limits, Proposal, budget_curve
from memsaving_gradients.planners.budget_search import FLOORS, Search
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.meter import Found

__all__ = ["Study", "asked", "function_of", "largest", "specs_of", "traced"]

#: The options of `memsaving_gradients.gradients` that matter to somebody who only looks.
OPTIONS = (
    "batch_size",
    "loop_steps",
    "hold_gradients",
    "xla",
    "accumulate",
    "profile",
    "progress",
)
#: Fact: any budget: it makes the search for plans that of budgets, and its size decides nothing.
SOME = 1e-9
#: Steps that are run, or rehearsed, to prove an answer, and numbers of microbatches that are tried
#: for one, at most. Chosen by judgement.
MOST_PROOFS = 8
#: Shares of the bytes that a budget has room for, if chunks are filled as in the plan of least
#: memory: they may have more holes.
ASKED = (1.0, 0.8, 0.6)


def asked(options: dict[str, Any]) -> Options:
    """Options for looking at a step; any others are errors."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise ArgumentError(
                name,
                value,
                f"no such option; options are {', '.join(OPTIONS)}. Arguments of the step are given"
                " by position",
            )
    return Options(**options, budget=SOME)


class Study:
    """A gradient computation that is looked at: of those of a step, the one with most ops.

    Attributes
    ----------
    site
        The computation.
    computations
        How many there are in the step.
    step, graph
        It as captured.
    before
        Plain training as it runs.
    plain
        What fractions are of, bytes.
    loops_alone
        After `least`: for each way to replay loops, the budget it needs if nothing else is done
        (bytes), and its extra time.
    """

    def __init__(self, fn: Any, args: Sequence[Any], options: Options) -> None:
        sites, self._whole = traced(fn, args, options)
        self.site = largest(sites)
        # Those of other replicas are not this one's.
        self.computations = sum(self.site.is_here(site.first_operation) for site in sites)
        if graphs.is_function(self.site.graph):
            see_whole(self.site)
        self.step, self.before = self.site.original()
        self.graph = self.step.graph
        self.plain = plain_bytes(self.before, self.site.gating)
        self.loops_alone: list[tuple[int, float]] = []
        self._holes: float | None = None

    @property
    def plain_budget(self) -> int:
        """The budget from which on plain training fits, bytes."""
        return safe_bytes(self.before, self.site.gating)

    @property
    def assumes_batch(self) -> bool:
        """Whether bytes depend on a dimension that is unknown, and was told by nobody."""
        unknown = self.step.source.bytes_per_example[self.graph.size > 0] > 0
        return bool(unknown.any()) and self.site.options.batch_size is None

    def budget_for(self, need: int) -> int:
        """The budget to ask for, for a plan that needs so many bytes: something is left to
        chance."""
        return need if self.site.data_gates else int(need * (1 + CHANCE))

    def least(self) -> Found | None:
        """A plan of least memory, the first that an error about a budget would look at, and the
        budget to give for it. For once.

        ``None``: none saves anything. In deep networks the first of `chain`, which is not
        rewritten: it gets the room that a plan leaves there for what the executor adds.
        """
        self.site.floors = FLOORS[:1]
        if self.site.is_large:
            return self._least_of_chains()
        self.site.call = replace(self.site.call, mode="budget")
        following = Following(self.site)
        outcome = following.least()
        self.loops_alone = [
            (need, self.of_step(seconds - self.graph.total_seconds))
            for need, seconds in following.loops_alone
        ]
        if outcome is None or self.search is None:
            return None
        return Found(outcome.proposal, outcome.need, None)

    def extra_within(self, budget: int, least: Found) -> float:
        """Extra time of a plan for ``budget`` bytes, after `least`, whose plan is what there is if
        no faster one is found."""
        assert self.search is not None
        plan = least.proposal
        # What the executor adds is known of this one, and taken for that of others.
        adds = max(1.0, least.need / max(self.budget_for(self.need(plan)), 1))
        most = plan.peak * budget / max(self.need(plan) * adds, 1)
        asked = [int(most * share) for share in ASKED]
        limits = Limits(keep=self.search.keep, accumulate=self.search.accumulate)
        found = [plan for _, plan in budget_curve.plans(self.search.meter.graph, limits, asked)]
        fits = [one for one in found if self.budget_for(self.need(one)) * adds <= budget]
        return min(self.extra_time(one) for one in [plan, *fits])

    def _least_of_chains(self) -> Found | None:
        try:
            self.site.sought = seek(self.site)
        finally:
            self.site.abandon()
        if self.search is None:
            return None
        found = replace(self.search, planner=chain.plan).least()
        plain = chunk_bytes(self.before, self.site.gating) / max(self.before.peak, 1)
        self._holes = max(plain, found.need / max(found.proposal.peak, 1))
        return replace(found, need=int(found.need / first_share(self.site)))

    @property
    def search(self) -> Search | None:
        """What `least` looked for plans with, on the step with masks packed."""
        return None if self.site.sought is None else self.site.sought.search

    def need(self, proposal: Proposal) -> int:
        """What a plan needs in chunks; in deep networks as many times what it asks for as plain
        training, or that of least memory, does."""
        if self._holes is not None:
            return int(proposal.peak * self._holes)
        assert self.search is not None
        return self.search.meter.need(proposal)

    def extra_time(self, proposal: Proposal) -> float:
        """What a plan takes, and the masks that are packed for it, as a fraction of the plain
        step's time."""
        assert self.search is not None
        packing = self.search.meter.graph.total_seconds - self.graph.total_seconds
        return self.of_step(proposal.extra_seconds + packing)

    def of_step(self, seconds: float) -> float:
        """A time as a fraction of the plain step's."""
        return float(seconds / max(self.graph.total_seconds, 1e-12))

    @cached_property
    def variables(self) -> tuple[int, int]:
        """Bytes of the variables that the forward pass uses, and of all others."""
        first = graphs.creation_index(self.site.first_operation)
        parameters = sum(
            graphs.variable_bytes(handle)
            for handle in _handles(self.site.graph)
            if any(graphs.creation_index(user) < first for user in handle.consumers())
        )
        return parameters, sum(map(graphs.variable_bytes, _handles(self._whole))) - parameters

    @property
    def sums(self) -> int:
        """Bytes of gradients that a loop over microbatches adds up, one of which is looked at; 0:
        there is no such loop."""
        batch = self.site.options.batch
        return sum(tensor_bytes(tensor).at(batch) for tensor in whole_step.added_up(self._whole))


def function_of(fn: Any, args: Sequence[Any], *, compiled: bool = False) -> Any:
    """A training step as a ``tf.function`` that was never traced: of a function, or of a compiled
    Keras model. ``compiled``: XLA compiles it in any case."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(fn, keras.Model):
        fn = _train_step(fn, args)
    if not callable(fn):
        raise ArgumentError(
            "fn", fn, "is no function; give a training step, a tf.function or a Keras model"
        )
    return autodiff.traced_anew(fn, compiled=compiled)


def _handles(graph: tf.Graph) -> list[tf.Tensor]:
    """Of the variables that a function's graph uses."""
    ends = (op for op in graph.get_operations() if not op.inputs)
    return [handle for op in ends for handle in op.outputs if handle.dtype == tf.resource]


def traced(fn: Any, args: Sequence[Any], options: Options) -> tuple[list[Site], tf.Graph]:
    """The gradient computations of a step, as TensorFlow built them, and its graph."""
    sites: list[Site] = []
    function = function_of(fn, args, compiled=bool(options.xla))
    specs = specs_of(args)
    with observing(sites.append), patching.scoped(options, eager_is_error=False):
        graph = function.get_concrete_function(*specs).graph
    if not sites:
        raise ArgumentError(
            "fn",
            fn,
            "asks for no gradients that could be rewired; compute them in it, with tf.GradientTape"
            " or tf.gradients, of what it computes itself",
        )
    return sites, graph


def largest(sites: Sequence[Site]) -> Site:
    """The gradient computation of a step with most ops."""
    return max(sites, key=lambda site: len(site.call.own))


def _train_step(model: Any, args: Sequence[Any]) -> Callable[..., Any]:
    if getattr(model, "optimizer", None) is None:
        raise ArgumentError("fn", model, "is a model without an optimizer; call compile first")
    if not args:
        raise ArgumentError("fn", model, "is a model; give what its train_step gets, such as x, y")
    if isinstance(args[0], tf.data.Dataset):
        raise ArgumentError("args", args[0], "is a dataset; give a batch of it, or tensor specs")
    if not model.built:
        # Building by shape would make no variables where a model is a class of its own.
        specs = tf.nest.map_structure(_spec, args[0])
        tf.function(lambda x: model(x)).get_concrete_function(specs)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)

    def train_step(*batch: Any) -> Any:
        return model.train_step(batch)

    return tf.function(train_step, jit_compile=bool(model.jit_compile) or None)


def specs_of(args: Sequence[Any]) -> list[Any]:
    """Arguments of a step, with shapes and dtypes in the place of tensors and arrays."""
    return list(tf.nest.map_structure(_spec, list(args)))


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, (tf.Tensor, np.ndarray)):
        return tf.TensorSpec(leaf.shape, leaf.dtype)
    return leaf
