"""Bytes alive at the measured peak of a step, split into gradients, activations and the rest.

The profiler tells which op asked for each buffer; the traced graph tells what that op is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.allocation_trace import AllocationEvent, alive_at_peak
from graph_tools.editing.rewiring import CLONE_SUFFIX
from graph_tools.graph.capture import capture
from graph_tools.ops import op_types
from graph_tools.tf_private import autodiff, graphs

PARTS = ("gradients", "activations", "temporaries")
#: The prefix that the runtime gives to names of ops in a called function.
CALL = "StatefulPartitionedCall/"
#: The text that grappler inserts between a scope and a name when it merges two ops, such as a
#: product and the transposition of its input.
REWRITTEN = re.compile(r"ArithmeticOptimizer/[A-Za-z0-9]+_")


def kinds_of(
    first_backward: tf.Operation,
    grads: Sequence[tf.Tensor],
    events: Sequence[AllocationEvent],
    batch: int = 1,
) -> dict[str, str]:
    """Return which of `PARTS` the results of an op are, by its name; others are ``"temporaries"``.

    Activations are values that an op before ``first_backward``, or a clone of one, computes and
    another op reads. ``events``: of one step. An op without an allocation overwrites an input.
    """
    first = graphs.creation_index(first_backward)
    ops = capture(autodiff.ends_of(first_backward.graph))
    early = [graphs.creation_index(op) < first or CLONE_SUFFIX in op.name for op in ops.ops]
    storage, producer = ops.storage.tolist(), ops.producer.tolist()
    kept = {
        storage[value]
        for op, values in enumerate(ops.inputs)
        for value in (() if early[op] else values)
        if early[producer[storage[value]]]
    }
    # A buffer belongs to the op that asked for it, and to the ops that write results into it.
    asked = {_name(event) for event in events if event.requested > 0}
    sizes = ops.value_bytes(batch)
    for op in reversed(range(len(ops.ops))):
        results = range(
            int(ops.first_value[op]), int(ops.first_value[op]) + len(ops.ops[op].outputs)
        )
        forwards = ops.ops[op].type in op_types.FORWARDING and ops.ops[op].name not in asked
        if forwards and not kept.isdisjoint(results):
            alike = (storage[v] for v in ops.inputs[op] if sizes[storage[v]] == sizes[results[0]])
            kept.update(root for root in alike if early[producer[root]])
    kinds = {ops.ops[producer[root]].name: "activations" for root in kept}
    roots = [storage[ops.value(tensor)] for tensor in grads if tensor.op.name in ops.position]
    return kinds | {ops.ops[producer[root]].name: "gradients" for root in roots}


def parts_at_peak(
    events: Sequence[AllocationEvent],
    kinds: Mapping[str, str],
    near: float = 0.0,
    *,
    chunks: bool = False,
) -> dict[str, Any]:
    """Return the bytes of each part at the peak; ``chunks``: the peak of chunks, with rounding."""
    found = dict.fromkeys(PARTS, 0)
    alive = alive_at_peak(events, chunks=chunks, near=near)
    for event in alive:
        kind = kinds.get(_name(event), "temporaries")
        found[kind if event.kind != "temp" else "temporaries"] += event.requested
    if chunks:
        found["rounding"] = sum(event.chunk - event.requested for event in alive)
    return found


def _name(event: AllocationEvent) -> str:
    """Return the name of the op in the traced graph."""
    return REWRITTEN.sub("", event.op.rpartition(CALL)[2])
