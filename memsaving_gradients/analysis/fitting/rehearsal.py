"""A rehearsal traces a training step as the callback will trace it, with its optimizer, its
microbatches and its plan. It runs no step.

The search only finds the bytes that gradients need. Only a trace of the whole step shows the bytes
that the optimizer and the rest need, and whether a plan leaves room for them. So a chosen candidate
is traced once more, and taken only if it keeps its memory.

**Stalled threads.** The simulated executor has slow threads, but none that stalls while another
goes on. With kernels of microseconds, stalls are common, and the tensors that the stalled op reads
and writes stay alive meanwhile. Measured with the processor shared, a step of 0.7 MB took four
tensors, or 0.13 MB, more; one of 4.2 MB took 1.1 MB more. So the search leaves the bytes of one op
free, up to the bytes that the other thread can fill until the stalled one is woken.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.graph.capture import OpGraph
from graph_tools.memory.whole_function import simulate_function
from memsaving_gradients import patching
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.training.microbatches.pieces import Cut

__all__ = ["Rehearsal", "held_by_stalled", "rehearse"]

#: The most bytes that one thread fills while another is stalled: a few GB a second, for less than
#: a millisecond.
MEANWHILE = 2_000_000


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes
    ----------
    need
        The bytes that the step may take; with microbatches, without the buffer of gradients.
    keeps
        Whether the step keeps its budget, and its plans do not raise `BudgetError`.
    """

    need: int
    keeps: bool


def rehearse(
    model: Any, specs: Sequence[Any], options: Options, cut: Cut | None, buffers: int
) -> Rehearsal:
    """Trace a step of ``model``, and return the bytes that it needs.

    Parameters
    ----------
    specs
        The parts of a whole batch, as ``train_step`` gets them.
    options
        The options of the callback, with a budget in bytes.
    cut
        How to cut the batch into microbatches; ``None``: not at all.
    buffers
        Bytes of the buffer in which microbatches add up gradients.
    """
    # Keras takes seconds to import.
    from memsaving_gradients.training.microbatches.train_step import train_step_of

    step = model.train_step if cut is None else train_step_of(model, cut)
    function = tf.function(
        lambda *batch: step(batch), autograph=False, jit_compile=bool(model.jit_compile) or None
    )
    watch = graph_state.Watch()
    try:
        with (
            warnings.catch_warnings(),
            graph_state.watching(watch),
            patching.scoped(options, eager_is_error=False),
        ):
            warnings.simplefilter("ignore")
            graph = function.get_concrete_function(*specs).graph
    except BudgetError as error:
        return Rehearsal(error.least, keeps=False)
    gradients = max((_need_of(plan) for plan in watch.plans), default=0)
    whole = 0 if model.jit_compile else _whole(graph, options.batch)
    need = max(gradients, whole - buffers)
    return Rehearsal(need, keeps=need <= options.budget)


def _need_of(plan: Any) -> int:
    alone = safe_bytes(plan.simulation, plan.gating) if plan.simulation is not None else 0
    return max(alone, plan.whole_step or 0)


def _whole(graph: tf.Graph, batch: int) -> int:
    """Return the bytes that a whole traced step may need, without those inside loops; 0 if its
    graph cannot be captured."""
    try:
        return safe_bytes(simulate_function(graph, batch)[1], "control")
    except GraphError:
        return 0


def held_by_stalled(ops: OpGraph, batch: int) -> int:
    """Return the most bytes that one op reads and writes, up to `MEANWHILE`."""
    size, storage = ops.value_bytes(batch).tolist(), ops.storage.tolist()
    source = ops.source.tolist()
    bounds = [*ops.first_value.tolist(), len(size)]
    most = 0
    for i, values in enumerate(ops.inputs):
        touched = {storage[v] for v in (*values, *range(bounds[i], bounds[i + 1]))}
        most = max(most, sum(size[v] for v in touched if not source[v]))
    return min(most, MEANWHILE)
