"""A training step traced as the callback will trace it, with its optimizer, its microbatches and
the plan it gets; it is not run.

What a search finds is what gradients need. What a step needs that is done with them is known when
it has been traced to its end, and whether a plan leaves room for that, too. So whatever is chosen
is traced once more, and taken only if it keeps its memory in this way.

**What a stalled thread adds.** The executor is simulated with threads that may be slow, but not
with one that stands still while the other goes on: when kernels take microseconds, that is common,
and what its op reads and writes stays alive meanwhile (a step of 0.7 MB took four tensors, or 0.13
MB, more; one of 4.2 MB took 1.1 MB more; measured, with the processor shared). So as much is left
free as one op holds, up to what the other thread can fill until the first is woken.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.tf_private import autodiff
from memsaving_gradients import patching
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.training.microbatches.pieces import Cut

__all__ = ["Rehearsal", "held_by_stalled", "rehearse"]

#: Bytes that one thread fills while another stands still, at the most: a few GB a second, for less
#: than a millisecond.
MEANWHILE = 2_000_000


@dataclass(frozen=True)
class Rehearsal:
    """How a step did.

    Attributes
    ----------
    need
        Bytes that it may take; of microbatches, beside the buffer of gradients.
    keeps
        Whether it keeps its budget, without a word by the callback.
    """

    need: int
    keeps: bool


def rehearse(
    model: Any, specs: Sequence[Any], options: Options, cut: Cut | None, buffers: int
) -> Rehearsal:
    """Trace a step of ``model``.

    Parameters
    ----------
    specs
        What its ``train_step`` gets, of a whole batch.
    options
        As the callback has them, with a budget in bytes.
    cut
        How it is cut into microbatches; ``None``: not at all.
    buffers
        Bytes of the gradients that these are added up in.
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
    """What a step takes that was traced to its end, if it can be told; what a loop takes inside is
    not in it."""
    try:
        ops = capture(autodiff.ends_of(graph))
        held = [ops.value(tensor) for tensor in autodiff.outputs_of(graph)]
        return safe_bytes(simulate_execution(ops, batch=batch, held=held)[0], "control")
    except GraphError:
        return 0


def held_by_stalled(ops: OpGraph, batch: int) -> int:
    """The most bytes that an op reads and writes, up to `MEANWHILE`."""
    size, storage = ops.value_bytes(batch).tolist(), ops.storage.tolist()
    source = ops.source.tolist()
    bounds = [*ops.first_value.tolist(), len(size)]
    most = 0
    for i, values in enumerate(ops.inputs):
        touched = {storage[v] for v in (*values, *range(bounds[i], bounds[i + 1]))}
        most = max(most, sum(size[v] for v in touched if not source[v]))
    return min(most, MEANWHILE)
