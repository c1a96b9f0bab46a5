"""Estimated time of an op: a roofline (Williams et al. 2009) of its floating point operations and
the bytes it moves.

An op takes as long as its arithmetic or its memory traffic, whichever is longer, plus a constant to
start it. The operations of convolutions and matrix products follow from shapes: twice the output
elements times the elements of one filter, or the contracted length. An Einsum takes one
multiply-add for each combination of its labels. Most other ops only move bytes; reductions,
transcendental functions, transpositions and normalizations count theirs twice or more. A loop takes
the time of its body times its steps, a conditional the time of its dearest branch. A function call
is opaque: it takes 20 passes over its inputs and outputs.

Static estimates are good enough to compare plans for one graph. Their absolute seconds are not
reliable: :mod:`graph_tools.costs.profiles` measures them. Cost: 5 µs an op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.costs.function_bodies import inside, last_readers
from graph_tools.costs.scratch import scratch_bytes
from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types
from graph_tools.ops.elements import rows
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import loops

__all__ = [
    "BYTES_PER_SECOND",
    "FLOPS_PER_SECOND",
    "START_SECONDS",
    "op_flops",
    "op_seconds",
    "op_workspace",
]

#: Fact: measured on two cores of a server, with data in memory rather than in caches. The ratio of
#: the two figures matters: 10 floating point operations in the time of a byte here, 5 while tensors
#: fit into caches, 10 to 80 on GPUs.
FLOPS_PER_SECOND = 2e11
BYTES_PER_SECOND = 2e10
#: Fact: the executor's time to start an op. Measured: 1.4 µs an op of an unrolled LSTM and of a
#: small Transformer with one thread, more with several.
START_SECONDS = 2e-6


_PRODUCTS = {
    "MatMul": "transpose_a",
    "BatchMatMul": "adj_x",
    "BatchMatMulV2": "adj_x",
    "BatchMatMulV3": "adj_x",
}
#: Fact: for each convolution kind, two inputs (None: the output). Every element of the first takes
#: a multiply-add with each element of one filter; the second holds the filters.
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
#: Fact: for each recurrent kernel: the input with the sequence, the inputs with weights, and the
#: products per weight and row.
_RECURRENT: dict[str, tuple[int, tuple[int, ...], int]] = {
    "BlockLSTM": (1, (4,), 1),
    "BlockLSTMV2": (1, (4,), 1),
    "BlockLSTMGrad": (1, (4,), 2),
    "BlockLSTMGradV2": (1, (4,), 2),
    "LSTMBlockCell": (0, (3,), 1),
    "LSTMBlockCellGrad": (0, (3,), 2),
    "GRUBlockCell": (0, (2, 3), 1),
    "GRUBlockCellGrad": (0, (2, 3), 2),
    "CudnnRNN": (0, (3,), 1),
    "CudnnRNNV2": (0, (3,), 1),
    "CudnnRNNV3": (0, (3,), 1),
    "CudnnRNNBackprop": (0, (3,), 2),
    "CudnnRNNBackpropV2": (0, (3,), 2),
    "CudnnRNNBackpropV3": (0, (3,), 2),
}
#: Fact: for each op type on square matrices, the operations per element and row.
_MATRICES = {
    "Cholesky": 1 / 3,
    "CholeskyGrad": 2.0,
    "LogMatrixDeterminant": 2 / 3,
    "MatrixDeterminant": 2 / 3,
    "MatrixInverse": 2.0,
    "MatrixSolve": 8 / 3,
    "MatrixTriangularSolve": 1.0,
    "Qr": 4.0,
    "SelfAdjointEigV2": 9.0,
    "Svd": 20.0,
    "Eig": 25.0,
}
_FOURIER = frozenset(
    "FFT FFT2D FFT3D IFFT IFFT2D IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D".split()
)
_POOLING = frozenset(
    """MaxPool MaxPool3D AvgPool AvgPool3D MaxPoolGrad MaxPool3DGrad AvgPoolGrad AvgPool3DGrad
    MaxPoolWithArgmax""".split()
)

_COUNTED = (
    _PRODUCTS.keys()
    | _CONVOLUTIONS.keys()
    | _RECURRENT.keys()
    | _MATRICES.keys()
    | _FOURIER
    | {"Einsum"}
)

# The share of full speed that slower op types reach.
_EFFICIENCY = {
    **dict.fromkeys((k for k in _CONVOLUTIONS if "Depthwise" in k), 1 / 8),
    **dict.fromkeys(_MATRICES, 1 / 10),
    **dict.fromkeys(_FOURIER, 1 / 10),
}

# How often the bytes that an op type reads and writes count; by default once.
_PASSES: dict[str, float] = {
    **dict.fromkeys(
        "Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm Tile BroadcastTo".split(), 2
    ),
    **dict.fromkeys(
        """Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1
        Lgamma Log Log1p LogSoftmax Mish Pow Selu Sigmoid Sin Sinh Softmax
        SoftmaxCrossEntropyWithLogits Softplus Softsign SparseSoftmaxCrossEntropyWithLogits Swish
        Tan Tanh Xlogy Zeta""".split(),
        2,
    ),
    **dict.fromkeys(
        "Transpose ConjugateTranspose Gather GatherV2 GatherNd ScatterNd ReverseV2".split(), 2
    ),
    **dict.fromkeys(
        """UnsortedSegmentSum SegmentSum TensorScatterAdd TensorScatterUpdate Cumsum Cumprod LRN
        StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal
        StatelessRandomNormalV2 RandomUniform RandomStandardNormal""".split(),
        4,
    ),
    **dict.fromkeys("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3".split(), 2),
    **dict.fromkeys("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3".split(), 2),
    **dict.fromkeys("MaxPool MaxPool3D AvgPool AvgPool3D MaxPoolGrad MaxPool3DGrad".split(), 1.5),
    **dict.fromkeys("TopKV2 Unique UniqueV2 CTCLoss CTCLossV2 Dilation2D".split(), 20),
    **dict.fromkeys((*op_types.FUNCTIONAL, "XlaCallModule"), 20),
}

# Op types that take the time of the ops in their bodies.
_LOOKED_INTO = frozenset(loops.LOOPS + loops.BRANCHES)

# Op types that only write or read shapes, and read no buffer.
_READ_NOTHING = op_types.SHAPE_READERS | {"Fill", "BroadcastGradientArgs"}


def _elements(tensor: tf.Tensor, batch: int) -> float:
    shape = _shape(tensor, batch)
    return float(batch if shape is None else math.prod(shape))


def _shape(tensor: tf.Tensor, batch: int) -> list[int] | None:
    """Return a tensor's dimensions at a batch of ``batch`` examples; ``None``: rank unknown."""
    if tensor.shape.rank is None:
        return None
    dimensions = tensor.shape.as_list()
    unknown = rows(tensor).at(batch) if dimensions.count(None) == 1 else batch
    return [unknown if dim is None else dim for dim in dimensions]


def op_flops(op: tf.Operation, batch: int) -> float:
    """Return the floating point operations of ``op`` at a batch of ``batch`` examples; one per
    output element if nothing better is known.

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
    if kind in _PRODUCTS and (first := _shape(op.inputs[0], batch)) is not None:
        return 2.0 * out * first[-2 if op.get_attr(_PRODUCTS[kind]) else -1]
    if kind == "Einsum":
        return _einsum(op, batch)
    if kind in _CONVOLUTIONS:
        met, held = _CONVOLUTIONS[kind]
        window = (op.outputs[0] if held is None else op.inputs[held]).shape
        if window.is_fully_defined() and window.rank:
            # The filter of a depthwise convolution is applied to one channel, others to all.
            per = math.prod(window.as_list()[: 2 if "Depthwise" in kind else -1])
            return 2.0 * (out if met is None else _elements(op.inputs[met], batch)) * per
    if kind in _RECURRENT:
        sequence, weights, products = _RECURRENT[kind]
        x = op.inputs[sequence]
        width = x.shape.as_list()[-1] if x.shape.rank else None
        vectors = _elements(x, batch) / (width or 1)
        return 2.0 * products * vectors * sum(_elements(op.inputs[w], batch) for w in weights)
    if kind in _MATRICES and (first := op.inputs[0].shape).rank is not None:
        side = first.as_list()[-1] if first.rank else 1
        return _MATRICES[kind] * _elements(op.inputs[0], batch) * (batch if side is None else side)
    if kind in _FOURIER:
        points = max(out, _elements(op.inputs[0], batch))
        return 5.0 * points * math.log2(points + 1.0)
    if kind in _POOLING:
        largest = max(out, *(_elements(t, batch) for t in op.inputs)) if "Grad" in kind else out
        strides = math.prod(op.get_attr("strides")) if "Grad" in kind else 1
        return largest * math.prod(op.get_attr("ksize")) / strides
    return out


def _einsum(op: tf.Operation, batch: int) -> float:
    """Count one multiply-add for each combination of labels; an ellipsis counts as one label."""
    terms = op.get_attr("equation").decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, float] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        if tensor.shape.rank is None:
            return _elements(op.outputs[0], batch)
        dims = [float(batch if dim is None else dim) for dim in tensor.shape.as_list()]
        before, dots, after = term.partition("...")
        end = len(dims) - len(after)
        named = [*zip(before, dims, strict=False), *zip(after, dims[end:], strict=True)]
        if dots:
            named.append(("...", math.prod(dims[len(before) : end])))
        for label, size in named:
            sizes[label] = max(size, sizes.get(label, 1.0))
    return (2.0 if len(terms) > 1 else 1.0) * math.prod(sizes.values())


def op_workspace(
    graph: OpGraph, batch: int, held: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """Return the bytes that every op of ``graph`` takes in addition to its outputs while it runs:
    scratch space of its kernel, or buffers alive inside of a loop, branch or call.

    ``held``: values that live to the end. If given, the graph is taken to run as it is, and its
    branches free the inputs that no later op reads.
    """
    found = np.zeros(len(graph.ops), np.int64)
    has_bodies = any(op.type in op_types.FUNCTIONAL for op in graph.ops)
    last = _last_uses(graph, batch, held) if held is not None and has_bodies else {}
    for i, op in enumerate(graph.ops):
        if op.type in op_types.FUNCTIONAL:
            reads = [int(graph.storage[value]) for value in graph.inputs[i]]
            given = [k for k, root in enumerate(reads) if last.get(root) == i]
            within = inside(op, batch, op_seconds, given)
            found[i] = 0 if within is None else within.workspace
        else:
            found[i] = scratch_bytes(op, batch)
    return found


def _last_uses(graph: OpGraph, batch: int, held: Sequence[int]) -> dict[int, int]:
    """Return the last reader of each storage that takes bytes and is not ``held``."""
    sizes, kept = graph.value_bytes(batch), {int(graph.storage[value]) for value in held}
    uses = last_readers(graph).items()
    return {root: op for root, op in uses if sizes[root] and root not in kept}


def op_seconds(graph: OpGraph, batch: int) -> npt.NDArray[np.float64]:
    """Return the estimated seconds of every op of ``graph``; views, sources and folded constants
    take none."""
    sizes = graph.value_bytes(batch)
    for value in np.flatnonzero(graph.source).tolist():
        if graph.storage[value] == value:  # has no bytes in the step, but is read
            sizes[value] = tensor_bytes(graph.tensor(value)).at(batch)
    read = sizes[graph.storage]
    for value in np.flatnonzero(graph.storage != np.arange(len(read))).tolist():
        # The reader of a window reads no more bytes than the window has.
        read[value] = min(read[value], tensor_bytes(graph.tensor(value)).at(batch))
    read = read.tolist()
    source, storage = graph.source.tolist(), graph.storage.tolist()
    bounds = [*graph.first_value.tolist(), len(read)]
    seconds = np.zeros(len(graph.ops))
    for i, op in enumerate(graph.ops):
        kind = op.type
        outputs = range(bounds[i], bounds[i + 1])
        no_work = all(source[v] or storage[v] != v for v in outputs)
        if no_work or kind in op_types.VIEWS or kind in op_types.SOURCES:
            continue
        if kind in _LOOKED_INTO and (within := inside(op, batch, op_seconds)) is not None:
            seconds[i] = START_SECONDS + within.seconds
            continue
        moved = sum(read[v] for v in outputs)
        if kind not in _READ_NOTHING:
            moved += sum(read[v] for v in graph.inputs[i])
        traffic = moved * _PASSES.get(kind, 1.0) / BYTES_PER_SECOND
        if kind in _COUNTED:
            speed = FLOPS_PER_SECOND * _EFFICIENCY.get(kind, 1.0)
            traffic = max(traffic, op_flops(op, batch) / speed)
        seconds[i] = START_SECONDS + traffic
    return seconds
