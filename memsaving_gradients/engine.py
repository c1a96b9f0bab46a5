"""Capture, plan, rewrite, remember: what happens between TensorFlow's gradients and the user's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from graph_tools import _tf, _tf_autodiff
from graph_tools.errors import GraphError
from memsaving_gradients import guard, registry
from memsaving_gradients.errors import NothingSavedWarning
from memsaving_gradients.executor import as_executed, forward_order
from memsaving_gradients.options import Options
from memsaving_gradients.packing import Masks, pack_masks
from memsaving_gradients.plan import Decision, Plan
from memsaving_gradients.planners import Limits, Proposal, cheap_ops, least_memory, named
from memsaving_gradients.rewrite import rewrite
from memsaving_gradients.roles import CapturedStep, capture_step
from memsaving_gradients.schedule import plain, simulate

__all__ = ["save_memory"]

guard.install()

_PLANNERS = {"memory": least_memory.plan, "speed": cheap_ops.plan}


def save_memory(
    graph: tf.Graph,
    first_backward: int,
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    mode: str,
    options: Options,
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Rewire the backward ops of ``graph`` so that they hold less memory.

    Parameters
    ----------
    graph
        The graph that ``grads`` were just built in.
    first_backward
        How many ops the graph had before.
    ys, xs, grads
        What was differentiated, with respect to what, and the result.
    mode
        ``"memory"``, ``"speed"``, ``"collection"`` or ``"named"``.
    options
        Which tensors to keep. ``checkpoints`` is a planner's name or a tuple of tensors here.

    Returns
    -------
    list
        The gradients, in which tensors that became chains of additions are replaced.
    """
    operations = graph.get_operations()
    flat = [t for t in _components(grads) if t.graph is graph]
    if not flat or len(operations) <= first_backward:
        return list(grads)
    data_gates = _tf_autodiff.compiled_by_xla() if options.xla is None else options.xla
    if data_gates and _tf_autodiff.vectorized():
        _warn(graph, "XLA cannot compile the vectorized form of what holds recomputation back")
        return list(grads)
    border = _tf.creation_index(operations[first_backward])
    masks = pack_masks(operations, first_backward) if mode == "memory" else Masks()
    found = _planned(graph, border, ys, flat, mode, options, masks)
    if found is None:
        masks.rewiring.undo()
        return list(grads)
    step, proposal = found
    guard.remember(graph, masks.rewiring)
    unread = (op for op in operations[first_backward:] if op.name not in step.source.position)
    registry.idle(graph).update(map(_tf.creation_index, unread))
    result = rewrite(step, proposal.schedule, proposal.simulation, data_gates=data_gates)
    guard.remember(graph, result.rewiring)
    registry.record(graph, _describe(step, mode, proposal, data_gates))
    grads = [_replace(grad, result.replaced) for grad in grads]
    if result.readers_of:
        grads = [
            _after(grad, result.readers_of, _tf_autodiff.tensors_in(graph, [x]))
            for grad, x in zip(grads, xs, strict=True)
        ]
    return grads


def _planned(
    graph: tf.Graph,
    border: int,
    ys: Sequence[tf.Tensor],
    grads: Sequence[tf.Tensor],
    mode: str,
    options: Options,
    masks: Masks,
) -> tuple[CapturedStep, Proposal] | None:
    """The step and what to make of it; ``None``, after a warning, if that saves nothing."""
    ends = [y for y in ys if isinstance(y, tf.Tensor) and y.graph is graph]
    try:
        step = capture_step(
            border,
            ends,
            grads,
            batch=options.batch_size,
            hold_gradients=options.hold_gradients,
            may_chain=not _tf.tape_is_recording(),
            idle=registry.idle(graph),
        )
    except GraphError as error:
        _warn(graph, f"the graph cannot be rewritten: {error}")
        return None
    most = simulate(step.graph, plain(step.graph)).peak
    proposal = _plan(step, mode, options, masks)
    works = proposal.schedule.clones or proposal.schedule.chained
    if not works or (proposal.peak >= most and mode in _PLANNERS):
        _warn(graph, _why_nothing(step, mode, most))
        return None
    if proposal.peak >= most:
        _warn(
            graph,
            f"the checkpoints named do not lower the simulated peak ({proposal.peak:,} bytes, plain "
            f"{most:,}); checkpoints='memory' finds better ones",
        )
    return step, proposal


def _plan(step: CapturedStep, mode: str, options: Options, masks: Masks) -> Proposal:
    if mode in _PLANNERS:
        return _PLANNERS[mode](step.graph, _keeping(step, masks.packed, "mask, in bits"))
    return named.plan(step.graph, _keeping(step, options.checkpoints, "named"))


def _keeping(step: CapturedStep, tensors: Iterable[tf.Tensor], why: str) -> Limits:
    inside = [t for t in tensors if t.op.name in step.source.position]
    storages = (int(step.graph.storage[step.source.value(t)]) for t in inside)
    return Limits(dict.fromkeys(storages, why))


def _components(grads: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor]:
    flat: list[tf.Tensor] = []
    for grad in grads:
        if isinstance(grad, tf.IndexedSlices):
            flat += [t for t in (grad.values, grad.indices, grad.dense_shape) if t is not None]
        elif grad is not None:
            flat.append(grad)
    return flat


def _replace(grad: Any, replaced: dict[object, tf.Tensor]) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values = replaced.get(grad.values.ref(), grad.values)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad if grad is None else replaced.get(grad.ref(), grad)


def _after(
    grad: Any, readers_of: dict[tf.Operation, list[tf.Operation]], x: list[tf.Tensor]
) -> Any:
    """``grad``, available only when the clones that read the reference variable ``x`` have run."""
    clones = readers_of.get(x[0].op) if x else None
    if not clones or grad is None:
        return grad
    with tf.control_dependencies(clones):
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)
        return tf.identity(grad)


def _describe(step: CapturedStep, mode: str, proposal: Proposal, data_gates: bool) -> Plan:
    graph, source = step.graph, step.source
    order = forward_order(graph)
    before, after = (
        simulate(graph, as_executed(schedule, order))
        for schedule in (plain(graph), proposal.schedule)
    )
    clones = [entry for entry in proposal.schedule.steps if entry.copy]
    again = {entry.op for entry in clones}
    read = {int(graph.storage[v]) for entry in clones for v in graph.reads[entry.op]}
    kept = {s for s in read & proposal.reasons.keys() if graph.producer[s] not in again}
    largest = float(graph.size.max(initial=0))
    decisions = []
    for storage in sorted(kept | graph.residuals):
        maker = int(graph.producer[storage])
        size = int(graph.size[storage])
        if size * 1024 < largest:
            continue
        lost = maker in again
        tensor = source.tensor(storage)
        decisions.append(
            Decision(
                tensor=tensor.name,
                bytes=size,
                fate="recompute" if lost else "keep",
                reason="recomputed from checkpoints" if lost else _reason(step, proposal, storage),
                op_type=tensor.op.type,
                source=_source(tensor.op),
            )
        )
    checkpoints = [
        s for s, why in proposal.reasons.items() if why.startswith(("checkpoint", "named"))
    ]
    return Plan(
        mode=mode,
        decisions=tuple(decisions),
        peak_plain=before.peak,
        peak=after.peak,
        extra_time=proposal.extra_seconds / max(graph.total_seconds, 1e-12),
        clones=proposal.schedule.clones,
        checkpoints=tuple(source.tensor(s).name for s in sorted(checkpoints)),
        gating="data" if data_gates else "control",
        simulation_plain=before,
        simulation=after,
    )


def _reason(step: CapturedStep, proposal: Proposal, storage: int) -> str:
    if not step.graph.clonable[step.graph.producer[storage]]:
        return "cannot be recomputed"
    return proposal.reasons.get(storage, "read before it would be lost")


_OWN = tuple(__file__.rsplit("/", 1)[:1])


def _source(op: tf.Operation) -> str:
    """The innermost frame of the user's program that made ``op``."""
    for file, line, _ in reversed(_tf.user_frames(op)):
        if "/site-packages/" not in file and not file.startswith(_OWN) and not file.startswith("<"):
            return f"{file}:{line}"
    return ""


def _why_nothing(step: CapturedStep, mode: str, peak: int) -> str:
    graph = step.graph
    residual = [s for s in graph.residuals if graph.size[s]]
    total = sum(int(graph.size[s]) for s in residual)
    if not residual:
        return "the backward pass reads no forward tensor that takes memory"
    fixed = [s for s in residual if not graph.clonable[graph.producer[s]]]
    held = sum(int(graph.size[s]) for s in fixed)
    if 2 * held > total:
        kinds = sorted({step.source.ops[int(graph.producer[s])].type for s in fixed})
        return (
            f"{held:,} of {total:,} bytes that backward reads are made by ops that must not run twice "
            f"({', '.join(kinds)}); call such functions and loops in smaller pieces, or inline them"
        )
    return (
        f"no choice of checkpoints (mode {mode!r}) lowers the simulated peak of {peak:,} "
        "bytes: the graph is too short or one op alone makes the peak"
    )


def _warn(graph: tf.Graph, why: str) -> None:
    if registry.warned(graph, why):
        return
    warnings.warn(
        f"gradients are plain TensorFlow gradients and save no memory: {why}.",
        NothingSavedWarning,
        stacklevel=4,
    )
