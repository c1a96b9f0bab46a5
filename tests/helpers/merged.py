"""A rewritten graph in which all ops that TensorFlow may merge are merged: an oracle, written apart
from the rewriter.

OneDNN's layout pass and grappler's remapper may make one kernel of two ops: of an op and the only
reader of its output, and of the gradients of a filter and of the bias that is added after it.
Grappler removes identities that it may touch, and merges equal ops. It replaces an op that needs
only shapes by a constant, which waits for the op's inputs by control edges.

The layout pass merges two ops even if other ops wait for the first one. The remapper merges only if
none waits. A circle in the graph of merged ops makes a step fail with "nodes in a cycle".
"""

from __future__ import annotations

from collections.abc import Collection

import networkx as nx
import tensorflow as tf

__all__ = ["circle", "pairs"]

_SEEN_THROUGH = frozenset(
    "Identity StopGradient PreventGradient Reshape Squeeze ExpandDims".split()
)
_SHAPES = frozenset("Shape ShapeN Size Rank ZerosLike OnesLike".split())
_PROTECTED = "_grappler_do_not_remove"
#: Pairs of op types that oneDNN's layout pass merges.
_LAYOUT = {("Conv2D", "BiasAdd"), ("Pad", "Conv2D")}
_PRODUCTS = frozenset("Conv2D Conv3D DepthwiseConv2dNative MatMul BatchMatMulV2".split())
_NORMS = frozenset("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3".split())
_ADDS = frozenset("BiasAdd Add AddV2".split())
_ENDS = frozenset("Relu Relu6 Elu LeakyRelu Tanh Sigmoid Mul Add AddV2 AddN".split())


def circle(graph: tf.Graph, ends: Collection[tf.Operation]) -> list[tuple[str, str]]:
    """Return the edges of a circle among the ops that ``ends`` need, after all possible merges, or
    an empty list."""
    live = _needed(ends)
    union = nx.utils.UnionFind(live)
    for first, second in pairs(graph, ends):
        union.union(first, second)
    merged = nx.DiGraph()
    for op in live:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            one, other = union[before], union[op]
            if one is not other:
                merged.add_edge(one, other, names=(before.name, op.name))
    try:
        found = nx.find_cycle(merged)
    except nx.NetworkXNoCycle:
        return []
    return [merged.edges[edge]["names"] for edge in found]


def pairs(
    graph: tf.Graph, ends: Collection[tf.Operation]
) -> list[tuple[tf.Operation, tf.Operation]]:
    """Return the pairs of ops that ``ends`` need and that may be merged."""
    live = _needed(ends)
    # An op that waits for an identity that grappler removes waits for the identity's input.
    waited_for = {before for op in live for before in op.control_inputs}
    waited_for |= {_seen(op.outputs[0]).op for op in waited_for if op.outputs}
    readers: dict[object, list[tf.Operation]] = {}
    for op in live:
        for tensor in op.inputs:
            if not _is_seen_through(op) and op.type not in _SHAPES:
                readers.setdefault(_seen(tensor).ref(), []).append(op)
    found = []
    for reads in readers.values():
        filters = [op for op in reads if op.type == "Conv2DBackpropFilter"]
        biases = [op for op in reads if op.type == "BiasAddGrad"]
        found += [(one, other) for one in filters for other in biases]
    for op in live:
        for tensor in op.outputs[:1]:
            reads = readers.get(tensor.ref(), [])
            if len(set(reads)) == 1 and _merge(op, reads[0], waited_for):
                found.append((op, reads[0]))
    return found


def _merge(first: tf.Operation, second: tf.Operation, waited_for: Collection[tf.Operation]) -> bool:
    if second.control_inputs or first.control_inputs:
        return False
    one, other = first.type, second.type
    if (one, other) in _LAYOUT:
        return True
    if first in waited_for:
        return False
    return (
        (one in _PRODUCTS and other in _ADDS | _NORMS)
        or (one == "BatchMatMulV2" and other == "Mul")
        or (one in _ADDS | _NORMS and other in _ENDS)
        or (one in ("Sigmoid", "Softplus", "Tanh") and other in ("Mul", "Tanh"))
        or (one == "Pad" and other in ("Conv2D", "Conv3D"))
    )


def _is_seen_through(op: tf.Operation) -> bool:
    return op.type in _SEEN_THROUGH and _PROTECTED not in op.node_def.attr


def _seen(tensor: tf.Tensor) -> tf.Tensor:
    while _is_seen_through(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def _needed(ends: Collection[tf.Operation]) -> dict[tf.Operation, None]:
    found = dict.fromkeys(ends)
    stack = list(found)
    while stack:
        op = stack.pop()
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            if before not in found:
                found[before] = None
                stack.append(before)
    return found
