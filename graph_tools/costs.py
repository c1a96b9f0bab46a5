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

_PRODUCTS = {
    "MatMul": "transpose_a",
    "BatchMatMul": "adj_x",
    "BatchMatMulV2": "adj_x",
    "BatchMatMulV3": "adj_x",
}
# For each convolution kind: the input whose elements are each met by every element of one filter (None: the output),
# and the input that holds the filter (None: the output).
_CONVOLUTIONS: dict[str, tuple[int | None, int | None]] = {
    "Conv2D": (None, 1),
    "Conv3D": (None, 1),
    "DepthwiseConv2dNative": (None, 1),
    "Conv2DBackpropInput": (2, 1),
    "Conv3DBackpropInputV2": (2, 1),
    "DepthwiseConv2dNativeBackpropInput": (2, 1),
    "Conv2DBackpropFilter": (2, None),
    "Conv3DBackpropFilterV2": (2, None),
    "DepthwiseConv2dNativeBackpropFilter": (2, None),
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
    if kind in _PRODUCTS and (first := op.inputs[0].shape).rank is not None:
        inner = first[-2 if op.get_attr(_PRODUCTS[kind]) else -1]
        return 2.0 * out * (batch if inner is None else inner)
    if kind == "Einsum":
        # rows × inner and inner × columns make rows × columns: the geometric mean of all three.
        first_size, last_size = _elements(op.inputs[0], batch), _elements(op.inputs[-1], batch)
        return 2.0 * math.sqrt(first_size * last_size * out)
    if kind in _CONVOLUTIONS:
        met, held = _CONVOLUTIONS[kind]
        window = (op.outputs[0] if held is None else op.inputs[held]).shape
        if window.is_fully_defined() and window.rank:
            # The filter of a depthwise convolution is applied to one channel, others to all.
            per = math.prod(window.as_list()[: 2 if "Depthwise" in kind else -1])
            return 2.0 * (out if met is None else _elements(op.inputs[met], batch)) * per
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
