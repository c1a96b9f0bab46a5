"""Simulations of a gradient computation as its graph is now.

The executor is simulated on the gradients and their forward pass, or on all that the traced
function does. Each simulation names the tensors in memory, and tells forward, recomputed and
backward ones apart. XLA has a scheduler of its own: for it, plain training follows a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from graph_tools.editing.rewiring import CLONE_SUFFIX
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.memory.peak_tensors import with_names
from graph_tools.memory.timeline import Part
from graph_tools.memory.whole_function import simulate_function
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.call import Call
from memsaving_gradients.rewriting.clones import Rewrite
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import Simulation, simulate

__all__ = [
    "Computation",
    "as_it_is",
    "simulate_all",
    "simulate_plain",
    "simulate_rewritten",
    "simulate_together",
    "simulate_traced",
]


class Computation(Protocol):
    """The attributes of a gradient computation that simulations read; `Site` has all of them."""

    call: Call

    @property
    def covers_step(self) -> bool:
        """Whether simulations cover the whole step."""

    @property
    def ignored_edges(self) -> Mapping[tf.Operation, Collection[tf.Operation]]:
        """The control edges that capture ignores."""

    @property
    def late_forward_ops(self) -> Collection[tf.Operation]:
        """Forward ops that were created after the first gradient."""


def simulate_plain(site: Computation, step: CapturedStep) -> Simulation:
    """Return the simulation of plain training: by the executor, or of the schedule for XLA."""
    if site.call.xla:
        # XLA runs no executor: its own scheduler orders one program.
        return _named(site, simulate(step.graph, plain(step.graph)), step.source)
    return _simulated(site, step.source, step.graph.targets)


def as_it_is(site: Computation, step: CapturedStep) -> Simulation:
    """Return the simulation of gradients that no plan rewrites; loops, blocks, masks stay."""
    return simulate_traced(site) if site.covers_step else simulate_plain(site, step)


def simulate_rewritten(site: Computation, result: Rewrite, extra_seconds: float) -> Simulation:
    """Return the simulation of the step that was just rewritten."""
    if site.covers_step:
        return simulate_traced(site, extra_seconds)
    grads = [result.replaced.get(t.ref(), t) for t in site.call.flat]
    return _simulate_built(site, grads, (), extra_seconds)


def simulate_together(site: Computation, grads: Sequence[tf.Tensor]) -> Simulation | None:
    """Return the simulation of the step with ``grads`` and the gradients of earlier calls on the
    same device; ``None``: there are no earlier calls, or XLA orders the step."""
    call = site.call
    others = [(t, held) for t, held in graph_state.earlier(call.graph) if call.is_here(t.op)]
    if not others or call.xla:
        return None
    return _simulate_built(site, grads, others)


def simulate_traced(site: Computation, extra_seconds: float = 0.0) -> Simulation:
    """Return the simulation of all that the traced function does, with its results held to the end.

    Raises
    ------
    GraphError
        If an op outside of the gradients cannot be captured, such as a loop of TF1.
    """
    return simulate_all(site, extra_seconds)[1]


def simulate_all(site: Computation, extra_seconds: float = 0.0) -> tuple[OpGraph, Simulation]:
    """Return the step captured for `simulate_traced`, and the simulation."""
    call = site.call
    ops, simulated = simulate_function(call.graph, call.options.batch, call.home)
    return ops, _named(site, Simulation.of(simulated, extra_seconds), ops)


def _simulate_built(
    site: Computation,
    grads: Sequence[tf.Tensor],
    others: Sequence[tuple[tf.Tensor, bool]],
    extra_seconds: float = 0.0,
) -> Simulation:
    call = site.call
    ops = capture(
        grads,
        unfetched=[*call.ys, *(t for t, _ in others)],
        late=graphs.creation_index(call.first_operation),
        without=site.ignored_edges,
        home=call.home,
    )
    held = [*(grads if call.holds_gradients else ()), *(t for t, held in others if held)]
    return _simulated(site, ops, [ops.value(t) for t in held], extra_seconds)


def _simulated(
    site: Computation, ops: OpGraph, held: Sequence[int], extra_seconds: float = 0.0
) -> Simulation:
    simulated, _ = simulate_execution(ops, batch=site.call.options.batch, held=held)
    return _named(site, Simulation.of(simulated, extra_seconds), ops)


def _named(site: Computation, simulation: Simulation, ops: OpGraph) -> Simulation:
    border = graphs.creation_index(site.call.first_operation)
    early = {op.name for op in site.late_forward_ops}

    def name(value: int, _: int) -> tuple[str, Part]:
        tensor = ops.tensor(value)
        op = tensor.op
        if CLONE_SUFFIX in op.name.rpartition("/")[2]:
            return tensor.name, "recomputed"
        forward = graphs.creation_index(op) < border or op.name in early
        return tensor.name, "forward" if forward else "backward"

    return with_names(simulation, name)
