"""From a captured graph to a training graph: which ops are forward, which are backward, and the
cost of each.

Ops created before the gradients were asked for are forward ops; the others are backward ops. Only
backward ops that lead to a returned gradient are captured: a fifth to a third of the ops that
`tf.gradients` creates are dead and would show false residuals. Readers that need only a shape do
not count as readers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.costs import profiles
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.grappler.constant_folding import takes_constant
from graph_tools.ops import op_types
from graph_tools.ops.devices import Home
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.early_reductions import early_reductions
from memsaving_gradients.capture.sums import chainable, may_become_variables
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["CapturedStep", "capture_step"]


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A training graph and the TensorFlow graph that it was read from, with the same numbers for
    ops and values.

    ``takes``: for each op, whether folding gives it a constant to combine
    (`graph_tools.grappler.constant_folding.takes_constant`).
    """

    graph: TrainingGraph
    source: OpGraph
    takes: npt.NDArray[np.bool_]


def capture_step(
    first_backward: int,
    ys: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    *,
    batch: int,
    hold_gradients: bool,
    may_chain: bool,
    short_sums: bool = True,
    idle: Collection[int] = (),
    early: Collection[tf.Operation] = (),
    without: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    home: Home | None = None,
    profile: bool = False,
) -> CapturedStep:
    """Capture the ops that ``ys`` and ``grads`` need; those created at or after number
    ``first_backward`` are backward ops.

    ``may_chain``: whether sums may be added up as their addends come, and with ``short_sums`` sums
    of few but large addends, too. ``idle``: creation indices of forward ops that will be pruned
    when the graph runs. ``early``: forward ops that were created late, and run right after the ops
    that they read. ``without``: control edges to ignore. ``home``: the device to capture for, if
    several compute. ``profile``: whether costs are measured on this device instead of estimated.
    """

    def seen(early: Collection[tf.Operation]) -> OpGraph:
        return capture(
            grads, unfetched=ys, late=first_backward, early=early, without=without, home=home
        )

    ops = seen(early)
    border = _border(ops, first_backward, early)
    if found := early_reductions(ops, border, ops.value_bytes(batch), early):
        early = {*early, *(ops.ops[i] for i in found)}
        ops = seen(early)
    reads = [() if op_types.reads_shapes(op) else ops.inputs[i] for i, op in enumerate(ops.ops)]
    bounds = [*ops.first_value.tolist(), len(ops.producer)]
    results = [ops.value(t) for t in grads]
    takes, sizes = takes_constant(ops), ops.value_bytes(batch)
    fuses = _fuses(ops, takes)
    sums: dict[int, tuple[int, ...]] = {}
    all_sums = may_chain and short_sums and may_become_variables(ops, border, batch, results)
    if may_chain:
        sums = chainable(ops, border, sizes, set(results), short=short_sums, small=all_sums)
    costs = (profiles.measured if profile else profiles.estimated)(ops, batch)
    graph = TrainingGraph(
        first_backward=border,
        reads=reads,
        writes=[tuple(range(a, b)) for a, b in itertools.pairwise(bounds)],
        producer=ops.producer,
        storage=ops.storage,
        size=sizes,
        source=ops.source,
        clonable=ops.clonable & ~_undecided(ops, fuses, border, first_backward, idle),
        joins=np.array([op.type in op_types.CONCATENATIONS for op in ops.ops], np.bool_),
        forwards=np.array([op.type in op_types.FORWARDING for op in ops.ops], np.bool_),
        fuses=fuses,
        seconds=np.where(ops.here, costs.seconds, 0.0),
        expensive=np.array([op.type in op_types.EXPENSIVE for op in ops.ops], np.bool_),
        ends=tuple(sorted({int(ops.producer[ops.value(t)]) for t in ys})),
        targets=tuple(results) if hold_gradients else (),
        sums=sums,
        all_sums=all_sums,
        waits={i: waits for i, waits in enumerate(ops.controls) if waits},
        workspace=np.where(ops.here, costs.workspace, 0),
    )
    return CapturedStep(graph, ops, takes)


def _border(ops: OpGraph, first_backward: int, early: Collection[tf.Operation]) -> int:
    """Return the number of forward ops."""
    forward = (
        i
        for i, op in enumerate(ops.ops)
        if graphs.creation_index(op) < first_backward or op in early
    )
    return max(forward, default=-1) + 1


def _fuses(ops: OpGraph, takes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which ops the runtime may merge with an op that reads them: by kernel fusion, or by
    folding a constant."""
    fuses = np.array([op.type in op_types.FUSED_WITH_READER for op in ops.ops], np.bool_)
    for i in np.flatnonzero(takes).tolist():
        for value in ops.inputs[i]:
            maker, root = int(ops.producer[value]), int(ops.producer[ops.storage[value]])
            if op_types.fold_together(ops.ops[i].type, ops.ops[root].type):
                fuses[maker] = fuses[root] = True
    return fuses


def _undecided(
    ops: OpGraph, fuses: npt.NDArray[np.bool_], border: int, created: int, idle: Collection[int]
) -> npt.NDArray[np.bool_]:
    """Return which forward ops must run once, because a clone could be merged where the original is
    not, or the reverse.

    Forward ops may read a value and lead to no gradient, such as the last ops before a loss that is
    not fetched. It is not known yet whether they will be pruned. So nor is it known whether the op
    that makes the value will be merged with its one reader here: both run once.
    """

    def may_be_pruned(op: tf.Operation) -> bool:
        index = graphs.creation_index(op)
        if index >= created or index in idle:
            return False
        return op.name not in ops.position or bool(ops.optional[ops.position[op.name]])

    found = np.zeros(len(ops.ops), np.bool_)
    for i in np.flatnonzero(fuses[:border]).tolist():
        if len(ops.readers[i]) != 1:
            continue
        consumers = (op for out in ops.ops[i].outputs for op in out.consumers())
        if found[i] or any(map(may_be_pruned, consumers)):
            (reader,) = ops.readers[i]
            found[i] = True
            found[reader] |= reader < border
    return found
