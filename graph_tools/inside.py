"""What a loop takes inside: its time, the bytes alive while a step runs, and the bytes of the tensor lists that it gives.

To the graph around it a loop is one op, whose lists are variants of no size that is known. But its body is a graph, too: a step takes
the time of its ops and the bytes that are alive between them, and what a step appends to a list, or writes to one, the loop does as
often as it runs. Loops in bodies are looked into in the same way, and so are called functions. How often a loop runs is known from its condition
(`graph_tools.loops.trip_count`), was noted on it (`note_steps`), or is taken to be `UNKNOWN_STEPS`.

Functions that XLA compiles, as Keras has it for grouped convolutions on a CPU, are taken to hold what their ops do, one by one, but for the
gradients of depthwise filters: on a CPU, XLA makes each as that of a filter between all channels, and holds that twice (measured with
TensorFlow 2.21; 231 MB for 768 channels and 7 × 7 pixels).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from graph_tools import _tf, _tf_loops, optypes
from graph_tools.sizes import Bytes, tensor_bytes

if TYPE_CHECKING:
    from graph_tools.capture import OpGraph

__all__ = [
    "HAS_INSIDE",
    "UNKNOWN_STEPS",
    "Inside",
    "inside",
    "list_bytes",
    "note_steps",
    "noted_steps",
    "steps_of",
]

#: Stands in for the number of steps of a loop where nothing is known of it.
UNKNOWN_STEPS = 256
_STEPS = "_graph_tools_steps"
#: Ops that add an element to a list, and which of their inputs that is.
_ITEMS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
#: What these give is the buffer of a variable, or a constant, however often it is in a list.
_SHARED = optypes.READS | optypes.SHAPE_READERS | {"Const", "Fill"}

# Ops that call a function, their attribute ``f``.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
#: Ops that `inside` looks into.
HAS_INSIDE = _CALLS | frozenset(_tf_loops.LOOPS)

_known: weakref.WeakKeyDictionary[tf.Graph, dict[tuple[int, int, bool], tuple[float, int]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class Inside:
    """Time of all steps of a loop (seconds), and bytes that are alive in a step, beside what goes in and out of the loop; of a call likewise."""

    seconds: float
    workspace: int


def note_steps(op: tf.Operation, steps: int | None) -> None:
    """Note how often a loop runs, ``None``: not known."""
    _tf.set_attribute(op, *noted_steps(steps))


def noted_steps(steps: int | None) -> tuple[str, Any]:
    """The attribute by which `note_steps` notes that, and its value."""
    return _STEPS, tf.compat.v1.AttrValue(i=UNKNOWN_STEPS if steps is None else steps)


def steps_of(op: tf.Operation) -> int:
    """How often a loop runs, about."""
    from graph_tools.loops import trip_count

    if _STEPS in op.node_def.attr:
        return int(op.node_def.attr[_STEPS].i)
    steps = trip_count(op)
    return UNKNOWN_STEPS if steps is None else steps


def inside(op: tf.Operation, batch: int) -> Inside | None:
    """What the loop, or the call, ``op`` takes inside at a batch of ``batch`` examples; ``None`` if its body is not known."""
    called = op.type in _CALLS
    body = _tf_loops.function_graph(op, "f" if called else "body")
    if body is None:
        return None
    found = _known.setdefault(body, {})
    # The attribute is how TensorFlow asks for a function to be compiled (2.16 to 2.21).
    compiled = called and op.node_def.attr["_XlaMustCompile"].b
    expands = compiled and not tf.config.list_logical_devices("GPU")
    key = batch, len(body.get_operations()), expands
    if key not in found:
        found[key] = _step(body, batch, called=called, expands=expands)
    seconds, workspace = found[key]
    steps = 1 if called else steps_of(op)
    return Inside(seconds * steps, workspace if steps else 0)


def _step(body: Any, batch: int, *, called: bool, expands: bool = False) -> tuple[float, int]:
    """Seconds of a step, and the most bytes alive in it beside the op's outputs, which the graph around it counts all the while.

    What a step of a loop begins with is in these outputs' place, until it is read for the last time. What a function is ``called`` with
    is counted around it. ``expands``: depthwise filters have their gradients made as those of whole ones.
    """
    from graph_tools.capture import capture
    from graph_tools.costs import op_seconds

    graph = capture(body.outputs, besides=body.inputs)
    sizes, storage = graph.value_bytes(batch).tolist(), graph.storage.tolist()
    ends = [storage[graph.value(t)] for t in body.outputs]
    begins = [] if called else [graph.value(t) for t in body.inputs]
    changing = [i for i, v in enumerate(begins) if v != ends[i]]
    for i in changing:
        sizes[begins[i]] = tensor_bytes(body.inputs[i]).at(batch)
    outside = sum(tensor_bytes(body.inputs[i]).at(batch) for i in changing)
    if called:
        outside = sum(sizes[root] for root in set(ends))
    last = _last_readers(graph)
    for root in ends:
        last[root] = len(graph.ops)
    alive = sum(sizes[begins[i]] for i in changing)
    most = 0
    bounds = [*graph.first_value.tolist(), len(storage)]
    for i, op in enumerate(graph.ops):
        if op.type == "Placeholder":
            continue
        dying = {root for v in graph.inputs[i] if last[root := storage[v]] == i}
        made = [v for v in range(bounds[i], bounds[i + 1]) if storage[v] == v]
        taken = _taken_over(op, made, dying, sizes)
        alive += sum(sizes[v] for v in made) - taken
        within = inside(op, batch) if op.type in HAS_INSIDE else None
        workspace = 0 if within is None else within.workspace
        if expands and op.type == "Conv2DBackpropFilter":
            workspace = _expanded(op)
        most = max(most, alive + workspace)
        alive -= sum(sizes[root] for root in dying) - taken
        alive -= sum(sizes[v] for v in made if v not in last)
    return float(op_seconds(graph, batch).sum()), max(0, most - outside)


def _expanded(op: tf.Operation) -> int:
    """Bytes of twice the filter between all channels, if that of ``op`` is depthwise, with one output for each channel."""
    filters, images = op.outputs[0], op.inputs[0]
    if not filters.shape.is_fully_defined() or images.shape.rank is None:
        return 0
    *pixels, inputs, outputs = filters.shape.as_list()
    channels = images.shape[-1 if op.get_attr("data_format") == b"NHWC" else 1]
    if inputs != 1 or outputs != channels:
        return 0
    return 2 * math.prod(pixels) * outputs**2 * int(filters.dtype.size)


def _last_readers(graph: OpGraph) -> dict[int, int]:
    """By storage that is read, the op that reads it last."""
    last: dict[int, int] = {}
    for i, values in enumerate(graph.inputs):
        for value in values:
            last[int(graph.storage[value])] = i
    return last


def _taken_over(
    op: tf.Operation,
    made: Sequence[int],
    dying: Collection[int],
    sizes: Sequence[int],
) -> int:
    """Bytes of inputs that nobody reads after an op, and that it writes its outputs to."""
    free = [sizes[root] for root in dying]
    taken = 0
    if op.type in optypes.FORWARDING or op.type in _tf_loops.LOOPS:
        for value in made:
            if sizes[value] and sizes[value] in free:
                free.remove(sizes[value])
                taken += sizes[value]
    return taken


def list_bytes(tensor: tf.Tensor) -> Bytes:
    """Bytes of the elements of a tensor list that its op adds to it; nothing for what is no list.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [12, 4])
    ...     y = tf.scan(lambda s, e: s + e, x)
    >>> [list_bytes(t).fixed for op in y.graph.get_operations() for t in op.outputs if list_bytes(t).fixed]
    [192, 192]
    """
    op = tensor.op
    if op.type == "TensorListFromTensor":
        return tensor_bytes(op.inputs[0])
    if op.type in _CALLS:
        # The lists of loops that are called are results of the call, where the gradient's call reads them.
        called = _tf_loops.function_graph(op, "f")
        if called is None:
            return Bytes(0, 0)
        inner = called.outputs[tensor.value_index]
        while inner.op.type == "Identity":
            inner = inner.op.inputs[0]
        return list_bytes(inner)
    if op.type not in _tf_loops.LOOPS:
        return Bytes(0, 0)
    body = _tf_loops.function_graph(op, "body")
    if body is None:
        return Bytes(0, 0)
    number = tensor.value_index
    size = _growth(body.outputs[number], body.inputs[number])
    return Bytes(*(steps_of(op) * part for part in size))


def _growth(tensor: tf.Tensor, argument: tf.Tensor) -> Bytes:
    """Bytes that a step adds to the list that comes in as ``argument`` and goes out as ``tensor``."""
    sizes: list[Bytes] = []
    while tensor is not argument:
        op = tensor.op
        if op.type in _ITEMS:
            item = op.inputs[_ITEMS[op.type]]
            sizes.append(Bytes(0, 0) if item.op.type in _SHARED else tensor_bytes(item))
        elif op.type in _tf_loops.LOOPS:
            sizes.append(list_bytes(tensor))
            tensor = op.inputs[tensor.value_index]
            continue
        elif op.type not in ("Identity", "TensorListPopBack"):
            break
        tensor = op.inputs[0]
    return _sum(sizes)


def _sum(sizes: Iterable[Bytes]) -> Bytes:
    fixed = rate = 0
    for size in sizes:
        fixed, rate = fixed + size.fixed, rate + size.per_example
    return Bytes(fixed, rate)
