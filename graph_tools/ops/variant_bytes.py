"""Bytes behind a variant: the elements of a tensor list, or the value that a branch keeps for its
gradient.

A variant's shape says nothing of its bytes. An element that a loop's body appends or writes to a
list counts once for each step. A branch wraps the value that it keeps for its gradient in an
optional; the optionals of all other branches are empty, so the largest branch counts. ``ZerosLike``
of a list makes as many elements, each in a buffer of its own, and ``AddN`` of lists adds their
elements. Both are counted in nested loops as well.

An op counts only the buffers that it makes. The bytes of an element are elsewhere if it is a
variable's buffer, a constant, an argument of a branch, or in another list. O(ops between a body's
outputs and its arguments) for a variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from graph_tools.notes import nearest_notes, notes
from graph_tools.ops import op_types
from graph_tools.ops.sizes import Bytes, tensor_bytes
from graph_tools.ops.trip_counts import known_steps, steps_of
from graph_tools.tf_private import loops

__all__ = ["buffer_bytes", "guessed_loops", "note_copies", "variant_bytes"]

#: Fact: ops that add an element to a list, and the position of the element among their inputs.
_ITEMS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
#: Ops whose output is a variable's buffer or a constant: one buffer, however often a list holds it.
_SHARED = op_types.READS | op_types.SHAPE_READERS | {"Const", "Fill"}
#: Ops that make a list of new elements, as many and as large as the elements of their first input.
_LIKE_FIRST = frozenset("ZerosLike AddN".split())
#: Fact: the bytes of a value that takes no memory.
_NONE = Bytes(0, 0)


def variant_bytes(tensor: tf.Tensor) -> Bytes:
    """Return the bytes of the tensors that its op adds to a variant; 0 for all other tensors.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [12, 4])
    ...     y = tf.scan(lambda s, e: s + e, x)
    >>> found = [variant_bytes(t).fixed for op in y.graph.get_operations() for t in op.outputs]
    >>> [size for size in found if size]
    [192, 176]
    """
    return _sum(_parts(tensor))


def buffer_bytes(tensor: tf.Tensor) -> Bytes:
    """Return the bytes of the buffer of ``tensor``, or the bytes behind it if it is a variant."""
    return variant_bytes(tensor) if tensor.dtype == tf.variant else tensor_bytes(tensor)


def guessed_loops(ops: Iterable[tf.Operation]) -> dict[tf.Operation, Bytes]:
    """Return the loops with an unknown number of steps, among ``ops`` and in functions that these
    run. For each, return the bytes of its lists, which are therefore a guess.

    Loops without lists are left out: they take equal bytes for any number of steps. O(all ops).
    """
    found: dict[tf.Operation, Bytes] = {}
    seen: set[int] = set()
    stack = [op for op in ops if op.type in op_types.FUNCTIONAL]
    while stack:
        op = stack.pop()
        for body in loops.bodies(op):
            if body is not None and id(body) not in seen:
                seen.add(id(body))
                inner = body.get_operations()
                stack += [one for one in inner if one.type in op_types.FUNCTIONAL]
        if op.type in loops.LOOPS and known_steps(op) is None:
            size = _sum(map(variant_bytes, op.outputs))
            if any(size):
                found[op] = size
    return found


def _parts(tensor: tf.Tensor) -> Iterator[Bytes]:
    """Yield the parts of the bytes that its op adds behind ``tensor``: all elements of a list, if
    the op makes all of them anew."""
    every = False
    while tensor.dtype == tf.variant:
        op, number = tensor.op, 0
        if op.type == "TensorListFromTensor":
            yield tensor_bytes(op.inputs[0])
            return
        if op.type == "OptionalFromValue":
            yield from map(_held, op.inputs)
            return
        if op.type in loops.LOOPS:
            if None in loops.bodies(op):
                return
            number = tensor.value_index
            size, replaced = _growth_in_loop(tensor)
            yield size
            every |= replaced
        elif op.type in op_types.FUNCTIONAL:
            # A called function returns the lists of its loops, because the gradient's call reads
            # them.
            results = [body.outputs[tensor.value_index] for body in loops.bodies(op) if body]
            yield max(map(variant_bytes, map(_viewed, results)), default=_NONE)
            return
        elif op.type in _LIKE_FIRST:
            every = True
        elif every and op.type in _ITEMS:
            # Without `every`, the list holds the given tensor itself, which is counted already.
            yield tensor_bytes(op.inputs[_ITEMS[op.type]])
        elif op.type not in op_types.VIEWS:
            return
        if not every:
            return
        tensor = op.inputs[number]


def _growth(tensor: tf.Tensor, argument: tf.Tensor) -> tuple[Bytes, bool]:
    """Return the bytes that a step adds to the list that enters as ``argument`` and leaves as
    ``tensor``; and whether the step replaces all elements by new ones."""
    sizes: list[Bytes] = []
    while tensor is not argument:
        op = tensor.op
        if op.type in _ITEMS:
            item = op.inputs[_ITEMS[op.type]]
            sizes.append(_NONE if _is_shared(item, argument) else tensor_bytes(item))
        elif op.type in loops.LOOPS:
            size, replaced = _growth_in_loop(tensor)
            if replaced:
                return _NONE, True
            sizes.append(size)
            tensor = op.inputs[tensor.value_index]
            continue
        elif op.type in _LIKE_FIRST:
            return _NONE, True
        elif op.type not in ("Identity", "TensorListPopBack"):
            break
        tensor = op.inputs[0]
    return _sum(sizes), False


def _is_shared(item: tf.Tensor, argument: tf.Tensor) -> bool:
    """Return whether the item that a step adds to the list ``argument`` has its bytes elsewhere: in
    a variable, in a constant, or in another list to which this step or the step before adds it."""
    if item.op.type in _SHARED:
        return True
    body = argument.graph
    if nearest_notes(body, _Copied) is not None:
        return False
    wanted = _made_as(item)
    for arg, out in zip(body.inputs, body.outputs, strict=False):
        number = _ITEMS.get(out.op.type)
        if number is not None and _made_as(out.op.inputs[number]) is wanted:
            return arg is not argument
    return False


def _made_as(item: tf.Tensor) -> tf.Tensor:
    """Return the tensor of a loop's body, in this step or the one before, whose buffer an item
    uses."""
    item = _viewed(item)
    body = item.graph
    if item.op.type == "Placeholder":
        for arg, out in zip(body.inputs, body.outputs, strict=False):
            if arg is item:
                return _viewed(out)
    return item


class _Copied:
    """A mark on a graph: the lists of its loops copy their elements."""


def note_copies(graph: Any) -> None:
    """Note that the lists of loops in ``graph`` copy their elements, as under XLA."""
    notes(graph, _Copied)


def _growth_in_loop(tensor: tf.Tensor) -> tuple[Bytes, bool]:
    """Return the result of `_growth` for all steps of the loop that gives ``tensor``."""
    op, number = tensor.op, tensor.value_index
    (body,) = loops.bodies(op)
    if body is None:
        return _NONE, False
    size, replaced = _growth(body.outputs[number], body.inputs[number])
    steps = steps_of(op)
    return Bytes(*(steps * part for part in size)), replaced


def _held(component: tf.Tensor) -> Bytes:
    """Return the bytes of a tensor that a branch puts into an optional, if the branch made it."""
    component = _viewed(component)
    return _NONE if component.op.type in op_types.SOURCES else buffer_bytes(component)


def _viewed(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that ``tensor`` is a view of, or ``tensor`` itself."""
    while tensor.op.type in op_types.VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _sum(sizes: Iterable[Bytes]) -> Bytes:
    fixed = rate = 0
    for size in sizes:
        fixed, rate = fixed + size.fixed, rate + size.per_example
    return Bytes(fixed, rate)
