"""Let a step add up gradients as they come, such as the gradients of microbatches.

``a + b + c + d`` needs two tensors at a time if one addend is made after the other. But grappler
merges the additions into one ``AddN`` (:mod:`graph_tools.grappler.merged_sums`), and users write
``tf.add_n`` themselves: then all addends are alive together. So additions of gradients are
protected from grappler, and ``AddN`` becomes additions in the order of its kernel
(:mod:`memsaving_gradients.capture.sums`), which give the same bits. Where that order is not
certain, because other ops may hold the addends, ``AddN`` stays. Linear in the ops of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.grappler.merged_sums import ADDITIONS
from graph_tools.ops import op_types
from graph_tools.ops.views import viewed_input
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.sums import Chain

__all__ = ["add_one_by_one"]

#: Ops that add all of their inputs at once.
_AT_ONCE = frozenset("AddN AccumulateNV2".split())


def add_one_by_one(
    graph: tf.Graph,
    grads: Collection[tf.Operation],
    own: Collection[tf.Operation],
    ends: Iterable[tf.Tensor | tf.Operation],
    rewiring: Rewiring,
) -> bool:
    """Let each addition of gradients begin when its own addends are there.

    Parameters
    ----------
    graph
        The graph of the step, traced to its end.
    grads
        The ops that make the gradients.
    own
        All ops of the backward passes, whose sums are planned with them.
    ends
        The tensors and ops that the graph runs for; an addition that none of them needs stays.
    rewiring
        Records the edits.

    Returns
    -------
    bool
        Whether any addition was protected, or built.
    """
    first = min(map(graphs.creation_index, grads), default=0)
    later = [op for op in graph.get_operations() if graphs.creation_index(op) > first]
    live = {getattr(end, "op", end) for end in ends}
    waited_for: set[tf.Operation] = set()
    for op in reversed(later):
        if op in live:
            live.update(tensor.op for tensor in op.inputs)
            waits = op.control_inputs
            live.update(waits)
            waited_for.update(waits)
    ops, made = [op for op in later if op not in own], set(grads)
    # An op that is made of gradients comes after them.
    for op in ops:
        if op in live and not made.isdisjoint(tensor.op for tensor in op.inputs):
            made.add(op)
    found = False
    # Additions, and ops whose results reach one.
    added: set[tf.Operation] = set()
    for op in reversed(ops):
        if op not in made or op in grads:
            continue
        readers = {reader for out in op.outputs for reader in out.consumers()}
        if not _is_sum(op):
            if not readers.isdisjoint(added):
                added.add(op)
            continue
        several = len(made.intersection(tensor.op for tensor in op.inputs)) > 2
        free = not op.control_inputs and op not in waited_for
        if op.type in _AT_ONCE and several and free and readers and _is_in_order(op, made):
            _chain(op, rewiring)
            found = True
        elif not readers.isdisjoint(added):
            # Grappler sees through ops between two additions that do nothing.
            graphs.protect(op)
            found = True
        added.add(op)
    return found


def _is_in_order(op: tf.Operation, made: Collection[tf.Operation]) -> bool:
    """Return whether the kernel surely adds in order. It begins with the first input whose buffer
    it can take over; which of the first two it is makes no difference. ``made``: ops that are made
    of gradients; others may be constants."""
    makers = [_only_for(tensor) if tensor.op in made else None for tensor in op.inputs]
    known = [maker for maker in makers if maker is not None]
    # Grappler makes one op of equal ones, whose buffer then has several readers.
    alike = {(maker.type, *(tensor.ref() for tensor in maker.inputs)) for maker in known}
    return len(alike) == len(known) and any(maker is not None for maker in makers[:2])


def _only_for(tensor: tf.Tensor) -> tf.Operation | None:
    """Return the op that makes the buffer of a tensor with one reader; ``None`` if other ops may
    hold the buffer then."""
    while len(tensor.consumers()) == 1:
        op = tensor.op
        viewed = viewed_input(op, tensor.value_index)
        if viewed is None:
            held = op_types.SOURCES | op_types.FUNCTIONAL
            return None if op.type in held else op
        tensor = op.inputs[viewed]
    return None


def _is_sum(op: tf.Operation) -> bool:
    """Return whether an op adds tensors; numbers take no memory."""
    if op.type not in ADDITIONS | _AT_ONCE:
        return False
    (result,) = op.outputs
    return bool(result.dtype != tf.variant and result.shape.rank != 0)


def _chain(op: tf.Operation, rewiring: Rewiring) -> None:
    """Build a chain of additions for the readers of a sum."""
    with op.graph.as_default():
        total = Chain(op, range(len(op.inputs))).finished()
    rewiring.point_readers(op.outputs[0], total)
