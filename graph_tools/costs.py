"""Estimated time of an op: a roofline of its floating point operations and of the bytes that it moves.

A static estimate is enough to compare plans for one graph; absolute seconds are not to be believed. Multiply-adds of
convolutions and matrix products come from shapes alone: twice the output elements times the elements of one filter
(or the contracted length).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools import optypes
from graph_tools.capture import OpGraph

__all__ = ["BYTES_PER_SECOND", "FLOPS_PER_SECOND", "op_flops", "op_seconds"]

#: A modest CPU core pair: the ratio of the two matters, not the figures.
FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10

_FILTERED = {
    "Conv2D": 1,
    "Conv3D": 1,
    "DepthwiseConv2dNative": 1,
    "Conv2DBackpropInput": 1,
    "Conv3DBackpropInputV2": 1,
    "DepthwiseConv2dNativeBackpropInput": 1,
}


def _elements(tensor: tf.Tensor, batch: int) -> float:
    if tensor.shape.rank is None:
        return float(batch)
    return float(math.prod(batch if dim is None else dim for dim in tensor.shape))


def op_flops(op: tf.Operation, batch: int) -> float:
    """Floating point operations of ``op`` at a batch of ``batch`` examples.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     product = tf.matmul(tf.ones([8, 16]), tf.ones([16, 4]))
    >>> op_flops(product.op, batch=1)
    1024.0
    """
    if not op.outputs:
        return 0.0
    out = _elements(op.outputs[0], batch)
    kind = op.type
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"):
        first, second = _elements(op.inputs[0], batch), _elements(op.inputs[-1], batch)
        # rows*inner × inner*columns → rows*columns, whichever way round and batched alike
        return 2.0 * math.sqrt(first * second * out) if out else 0.0
    if kind in _FILTERED:
        window = op.inputs[_FILTERED[kind]]
        if window.shape.is_fully_defined():
            shape = window.shape.as_list()
            read = out if not kind.startswith("Conv2DB") else _elements(op.inputs[2], batch)
            per = math.prod(shape[:-1]) if "Depthwise" not in kind else math.prod(shape[:2])
            return 2.0 * read * per
    if kind.endswith("BackpropFilter") or kind == "Conv3DBackpropFilterV2":
        gradient = _elements(op.inputs[2], batch)
        shape = op.outputs[0].shape
        if shape.is_fully_defined() and shape.rank:
            return 2.0 * gradient * math.prod(shape.as_list()[:-1])
    return out * (10.0 if kind in optypes.EXPENSIVE else 1.0)


def op_seconds(graph: OpGraph, batch: int) -> npt.NDArray[np.float64]:
    """Estimated seconds of every op of ``graph``; views and sources take none."""
    sizes = graph.value_bytes(batch)[graph.storage]
    bounds = [*graph.first_value.tolist(), len(sizes)]
    seconds = np.zeros(len(graph.ops))
    for i, op in enumerate(graph.ops):
        if op.type in optypes.VIEWS or op.type in optypes.SOURCES or not op.outputs:
            continue
        moved = sizes[bounds[i] : bounds[i + 1]].sum() + sum(sizes[v] for v in graph.inputs[i])
        flops = op_flops(op, batch) if op.type in optypes.EXPENSIVE else 0.0
        seconds[i] = flops / FLOPS_PER_SECOND + float(moved) / BYTES_PER_SECOND
    return seconds
