"""Time of the body of a loop, branch or call, and bytes alive while it runs.

To the graph around it a loop is one op. But its body is a graph, too: a step takes the time of its
ops and the bytes that are alive between them. The same holds for called functions, loops in bodies,
and branches, of which the dearest counts. `graph_tools.ops.trip_counts.steps_of` returns the number
of steps of a loop.

Keras lets XLA compile grouped convolutions on a CPU. The ops of a function that XLA compiles are
estimated one by one, without scratch space, except gradients of depthwise filters. On a CPU, XLA
computes each as the gradient of a filter between all channels, and holds that twice (measured with
TensorFlow 2.21; 231 MB for 768 channels and 7 × 7 pixels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.costs.scratch import scratch_bytes
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.ops.in_place import taken_over
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.ops.trip_counts import steps_of, unknown_steps
from graph_tools.tf_private import autodiff, loops

__all__ = ["Inside", "inside", "last_readers"]

#: A function that returns the seconds of each op of a graph at a batch.
OpSeconds: TypeAlias = Callable[[OpGraph, int], npt.NDArray[np.float64]]


class _Known(dict[tuple[object, ...], tuple[float, int]]):
    """Seconds and bytes of a step of a body. The key: batch, number of ops, whether XLA compiles
    it, the number of steps told for its loops, and the inputs given to it."""


@dataclass(frozen=True)
class Inside:
    """The seconds of all steps of a loop, and the bytes alive in a step in addition to the loop's
    inputs and outputs; for branches and calls likewise."""

    seconds: float
    workspace: int


def inside(
    op: tf.Operation, batch: int, op_seconds: OpSeconds, given: Collection[int] = ()
) -> Inside | None:
    """Return the time and bytes of the body of ``op``, of `op_types.FUNCTIONAL`, at a batch of
    ``batch`` examples; ``None`` if its body is not known.

    ``given``: the inputs that nothing else holds. TensorFlow builds the ops of branches into the
    graph around them, so such a tensor is freed after a branch has read it.
    """
    is_loop = op.type in loops.LOOPS
    bodies = loops.bodies(op)
    if None in bodies:
        return None
    # TensorFlow requests the compilation of a function with this attribute (2.16 to 2.21).
    compiled = not is_loop and op.node_def.attr["_XlaMustCompile"].b
    # The first input of a conditional selects the branch.
    args = frozenset(k - 1 for k in given if k) if op.type in loops.BRANCHES else frozenset()
    takes = []
    for body in bodies:
        found = notes(body, _Known)
        key = batch, len(body.get_operations()), compiled, unknown_steps(body), args
        if key not in found:
            found[key] = _step(
                body, batch, op_seconds, called=not is_loop, compiled=compiled, given=args
            )
        takes.append(found[key])
    seconds, workspace = map(max, zip(*takes, strict=True))
    steps = steps_of(op) if is_loop else 1
    return Inside(seconds * steps, workspace if steps else 0)


def _step(
    body: Any,
    batch: int,
    op_seconds: OpSeconds,
    *,
    called: bool,
    compiled: bool,
    given: Collection[int] = (),
) -> tuple[float, int]:
    """Return the seconds of a step, and the most bytes alive in it in addition to the op's outputs,
    which the graph around it counts all the while.

    The loop variables that a step changes take the place of these outputs until their last read.
    The inputs of a ``called`` function count outside of it, to its end, except the ``given`` ones.
    ``compiled``: whether XLA compiles it, with kernels of its own.
    """
    graph = capture(autodiff.ends_of(body), unfetched=body.inputs)
    sizes, storage = graph.value_bytes(batch).tolist(), graph.storage.tolist()
    ends = [storage[graph.value(t)] for t in body.outputs]
    begins = [] if called else [graph.value(t) for t in body.inputs]
    changing = [i for i, v in enumerate(begins) if v != ends[i]]
    for i in changing:
        sizes[begins[i]] = tensor_bytes(body.inputs[i]).at(batch)
    outside = sum(tensor_bytes(body.inputs[i]).at(batch) for i in changing)
    if called:
        outside = sum(sizes[root] for root in set(ends))
    for k in given:
        sizes[graph.value(body.inputs[k])] = tensor_bytes(body.inputs[k]).at(batch)
    last = last_readers(graph)
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
        hands_over = op.type in op_types.FORWARDING or op.type in loops.LOOPS
        free = [sizes[root] for root in dying] if hands_over else ()
        taken = taken_over((sizes[v] for v in made), free)
        alive += sum(sizes[v] for v in made) - taken
        if op.type in op_types.FUNCTIONAL:
            reads = [storage[v] for v in graph.inputs[i]]
            lent = [k for k, root in enumerate(reads) if sizes[root] and root in dying]
            within = inside(op, batch, op_seconds, lent)
            workspace = 0 if within is None else within.workspace
        elif compiled:
            workspace = _expanded(op)
        else:
            workspace = scratch_bytes(op, batch)
        most = max(most, alive + workspace)
        alive -= sum(sizes[root] for root in dying) - taken
        alive -= sum(sizes[v] for v in made if v not in last)
    return float(op_seconds(graph, batch).sum()), max(0, most - outside)


def _expanded(op: tf.Operation) -> int:
    """Return the bytes that XLA on a CPU adds to the gradient of a depthwise filter with one output
    per channel: two filters between all channels; 0 otherwise."""
    if op.type != "Conv2DBackpropFilter" or tf.config.list_logical_devices("GPU"):
        return 0
    filters, images = op.outputs[0], op.inputs[0]
    if not filters.shape.is_fully_defined() or images.shape.rank is None:
        return 0
    *pixels, inputs, outputs = filters.shape.as_list()
    channels = images.shape.as_list()[-1 if op.get_attr("data_format") == b"NHWC" else 1]
    if inputs != 1 or outputs != channels:
        return 0
    return 2 * math.prod(pixels) * outputs**2 * int(filters.dtype.size)


def last_readers(graph: OpGraph) -> dict[int, int]:
    """Return the last reader of each storage that an op reads."""
    last: dict[int, int] = {}
    for i, values in enumerate(graph.inputs):
        for value in values:
            last[int(graph.storage[value])] = i
    return last
