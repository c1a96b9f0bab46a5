"""The kinds of ops, decided by an op's type and its op definition, never by its name.

Names are the user's and may say anything; types are TensorFlow's. Unknown types are treated with
caution: they are no views, they are not forwarding, and they are copied only if the op definition
says that they are stateless.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = [
    "ASSIGNS",
    "AXES",
    "CHOOSERS",
    "CONCATENATIONS",
    "ELEMENTS",
    "EXPENSIVE",
    "FOLDED_TOGETHER",
    "FORWARDING",
    "FUNCTIONAL",
    "FUSED",
    "FUSED_WITH_READER",
    "FUSED_WITH_SIBLING",
    "FUSES_WITH",
    "MAY_VIEW",
    "MERGED_AT_RUN_TIME",
    "MERGED_WITH_READER",
    "MERGES",
    "MERGES_AT_RUN_TIME",
    "PYTHON",
    "READS",
    "READS_PARTS",
    "REDUCTIONS",
    "REFERENCE_VARIABLES",
    "RESERVES",
    "SHAPES",
    "SHAPE_READERS",
    "SIZED_BY_INPUTS",
    "SOURCES",
    "SWITCHES",
    "UPDATES_IN_PLACE",
    "VIEWS",
    "adds_as_buffers_come",
    "assigned_references",
    "fold_together",
    "is_clonable",
    "is_collective",
    "is_commutative",
    "is_random",
    "is_split",
    "is_stateful",
    "reads_known_shapes",
    "reads_shapes",
]

#: Output i is the buffer of input i (or of input 0): no bytes, no time.
VIEWS = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape
    CheckNumerics Bitcast""".split()
)

#: Ops whose outputs may be views as well, depending on shapes and constants
#: (:mod:`graph_tools.ops.views`).
MAY_VIEW = frozenset(
    "Unpack Split SplitV Slice StridedSlice Transpose Mul Add AddV2 Sub Div RealDiv".split()
)

#: Ops whose outputs live outside the step: variables, fed inputs, constants.
SOURCES = frozenset(
    """Const Placeholder PlaceholderWithDefault VarHandleOp VariableV2 Variable ReadVariableOp
    TemporaryVariable _Arg""".split()
)

#: Ops that read a variable (their first input), at whatever time they run.
READS = frozenset({"ReadVariableOp"})

#: Ops that call Python, which may change any variable.
PYTHON = frozenset("PyFunc EagerPyFunc".split())

#: Ops that run functions of the graph.
FUNCTIONAL = frozenset(
    """While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall
    StatefulPartitionedCall""".split()
)

#: Ops that begin branches of control flow v1: each output is alive or dead, depending on the second
#: input; …
SWITCHES = frozenset("Switch RefSwitch".split())
#: … and ops that end such branches: they pass on the input that is alive.
MERGES = frozenset("Merge RefMerge".split())

#: Variables that updates change in place even while ops read them (TF1 without ``use_resource``).
REFERENCE_VARIABLES = frozenset({"VariableV2", "Variable", "TemporaryVariable"})

#: Ops that give a variable (their first input) a new buffer, the buffer of their last input, and
#: release the old one; …
ASSIGNS = frozenset({"AssignVariableOp"})
#: … and ops that change the variable's buffer in place, or change a copy if another op still reads
#: the old values.
UPDATES_IN_PLACE = frozenset(
    """AssignAddVariableOp AssignSubVariableOp ResourceApplyAdaMax ResourceApplyAdadelta
    ResourceApplyAdagrad ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyAdamWithAmsgrad
    ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2 ResourceApplyGradientDescent
    ResourceApplyKerasMomentum ResourceApplyMomentum ResourceApplyProximalGradientDescent
    ResourceApplyRMSProp ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate""".split()
)
#: Ops that read or change a part of a variable. From then on, TensorFlow copies the variable for
#: each read of the whole, and each change of the whole makes a new buffer.
READS_PARTS = frozenset(
    """ResourceGather ResourceGatherNd ResourceScatterAdd ResourceScatterDiv ResourceScatterMax
    ResourceScatterMin ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdMax
    ResourceScatterNdMin ResourceScatterNdSub ResourceScatterNdUpdate ResourceScatterSub
    ResourceScatterUpdate ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad
    ResourceSparseApplyAdagradDA ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp
    ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum
    ResourceSparseApplyMomentum ResourceSparseApplyProximalAdagrad
    ResourceSparseApplyProximalGradientDescent ResourceSparseApplyRMSProp
    ResourceStridedSliceAssign""".split()
)

#: Ops that give an input's shape, or a part of it.
SHAPES = frozenset("Shape ShapeN Size Rank".split())
#: Ops that read an input's shape and not its buffer (see `reads_shapes`).
SHAPE_READERS = SHAPES | {"ZerosLike", "OnesLike"}

#: Ops that give an element of a tensor list; the element is one of the list's buffers.
ELEMENTS = frozenset("TensorListGetItem TensorListPopBack".split())

#: Ops that give axes: at most one axis for each element of their inputs, which are shapes.
AXES = frozenset({"BroadcastGradientArgs"})

#: Ops that choose rows of their first input at run time: they give no more elements than it has.
CHOOSERS = frozenset(
    """Where Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 DynamicPartition ListDiff Slice
    StridedSlice""".split()
)

#: Ops that only place their inputs side by side: as many bytes out as in, almost no time.
CONCATENATIONS = frozenset("ConcatV2 Concat Pack".split())

#: Ops whose time is worth more than their output's bytes: linear algebra, convolutions of every
#: kind, recurrent kernels, pooling, and whole functions and loops.
EXPENSIVE = frozenset(
    """Conv2D Conv3D Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DBackpropFilter
    Conv3DBackpropFilterV2 Conv DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput
    DepthwiseConv2dNativeBackpropFilter Dilation2D MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3
    Einsum SparseMatMul SparseTensorDenseMatMul SparseMatrixMatMul QuantizedMatMul QuantizedConv2D
    CudnnRNN CudnnRNNV2 CudnnRNNV3 LSTMBlockCell BlockLSTM BlockLSTMV2 GRUBlockCell Cholesky
    MatrixInverse MatrixSolve MatrixTriangularSolve MatrixDeterminant LogMatrixDeterminant
    SelfAdjointEigV2 Svd Qr Eig FFT FFT2D FFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D MaxPool
    MaxPoolV2 MaxPool3D AvgPool AvgPool3D FractionalMaxPool FractionalAvgPool MaxPoolWithArgmax
    XlaCallModule TopKV2 Unique UniqueV2 CTCLoss CTCLossV2""".split()
).union(FUNCTIONAL)

#: oneDNN's layout pass merges a filter gradient and the BiasAddGrad that reads the same gradient
#: into one kernel, and ignores control edges (TensorFlow 2.21). If an op waits for the BiasAddGrad
#: and feeds the filter gradient, the merge closes a cycle, so no op may wait for a BiasAddGrad; …
MERGED_AT_RUN_TIME = frozenset({"BiasAddGrad"})
#: … and a control input on the filter gradient prevents the merge, which changes the last bits of
#: the bias gradient. An identity between the filter gradient and the gradient that both read does
#: the same; an identity before its other input does not (``mkl_layout_pass.cc``).
MERGES_AT_RUN_TIME = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "BiasAddGrad"})

#: The readers with which the same pass merges an op into one kernel. It ignores control edges from
#: the op to others: if the reader needs one of these, the merge closes a cycle.
#: (``mkl_layout_pass.cc``; no other pass ignores control edges.)
MERGED_WITH_READER = {
    "Conv2D": frozenset({"BiasAdd"}),
    "Pad": frozenset({"Conv2D"}),
}

_ACTIVATIONS = frozenset("Relu Relu6 Elu LeakyRelu Gelu Mish Swish Tanh Sigmoid".split())
_ADDITIONS = frozenset("BiasAdd Add AddV2".split())
_NORMALIZATIONS = frozenset("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3".split())

#: The readers with which grappler's remapper may fuse an op whose result no other op reads. It does
#: not if an op waits for the op by a control edge (``remapper.cc`` and ``pattern_utils.cc``).
FUSES_WITH = {
    "Conv2D": _ADDITIONS | _NORMALIZATIONS,
    "Conv3D": _ADDITIONS,
    "DepthwiseConv2dNative": _ADDITIONS,
    "MatMul": _ADDITIONS,
    "BatchMatMul": _ADDITIONS | {"Mul"},
    "BatchMatMulV2": _ADDITIONS | {"Mul"},
    "BiasAdd": _ACTIVATIONS | _ADDITIONS | {"AddN", "Mul"},
    "Add": _ACTIVATIONS | _ADDITIONS | {"AddN", "Mul"},
    "AddV2": _ACTIVATIONS | _ADDITIONS | {"AddN", "Mul"},
    "Pad": frozenset("Conv2D Conv3D".split()),
    "FusedBatchNorm": _ACTIVATIONS | _ADDITIONS | {"Mul"},
    "FusedBatchNormV2": _ACTIVATIONS | _ADDITIONS | {"Mul"},
    "FusedBatchNormV3": _ACTIVATIONS | _ADDITIONS | {"Mul"},
    "Sigmoid": frozenset({"Mul"}),
    "Softplus": frozenset("Tanh Mul".split()),
    "Tanh": frozenset({"Mul"}),
}

#: Ops that grappler's remapper may fuse with the only op that reads their result, …
FUSED_WITH_READER = frozenset(FUSES_WITH)
#: … and all ops of a fused group, its end included. Grappler does not fuse a group if one of its
#: ops has a control edge.
FUSED = FUSED_WITH_READER | frozenset("Relu Relu6 Elu LeakyRelu Gelu Mish Swish Mul".split())

#: Ops that the remapper fuses with another reader of their input: ``x * sigmoid(x)``. Up to at
#: least TensorFlow 2.16, x may have no control edge either (``SubGraphMatcher`` in
#: ``pattern_utils.h``).
FUSED_WITH_SIBLING = frozenset({"Sigmoid", "Softplus"})

#: Families of ops (additions, multiplications) past which grappler moves a constant that an op of
#: the family combines: ``c + (x + y)`` becomes ``x + (c + y)`` if the outer op is the only reader
#: of the inner one. Here y is the second input unless the first is constant.
FOLDED_TOGETHER = (frozenset("Add AddV2 Sub BiasAdd".split()), frozenset("Mul Div RealDiv".split()))

#: Ops, mostly elementwise, that may write their result into the buffer of an input that no op
#: reads any more.
FORWARDING = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd Ceil Cos Cosh Digamma Div
    DivNoNan Elu EluGrad Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs Floor FloorDiv FloorMod
    Inv InvGrad LeakyRelu LeakyReluGrad Lgamma Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr
    MatrixBandPart Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter Pow RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu
    SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softmax Softplus SoftplusGrad Softsign SoftsignGrad
    Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlogy ClipByValue
    SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits""".split()
)

#: Ops whose last output is reserve space for their gradient. Its shape is unknown before they run.
RESERVES = frozenset({"FusedBatchNormV3"})

#: Ops by which devices communicate although their definitions do not say so. By their definitions,
#: the ops from ``HorovodAllreduce`` on seem to be pure.
COLLECTIVES = frozenset(
    """NcclAllReduce NcclReduce NcclBroadcast _NcclReduceSend _NcclReduceRecv _NcclBroadcastSend
    _NcclBroadcastRecv HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather
    HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall HorovodReducescatter
    HorovodGroupedReducescatter CrossReplicaSum AllToAll CollectivePermute""".split()
)

#: Ops that reduce their first input over the axes in the second.
REDUCTIONS = frozenset("Sum Mean Prod Max Min All Any EuclideanNorm".split())

#: Ops that make no more bytes than the largest of their inputs: if shapes are unknown, this bound
#: is better than a guess.
SIZED_BY_INPUTS = FORWARDING | REDUCTIONS

# The results of these ops depend on more than the values of their inputs, whatever their definition
# says, or the ops consume their inputs: a copy is never right.
_NEVER = frozenset("NoOp PyFunc EagerPyFunc PyFuncStateless Assert Print PrintV2".split()).union(
    SWITCHES, MERGES
)


def fold_together(one: str, other: str) -> bool:
    """Return whether ops of these types are of one family of `FOLDED_TOGETHER`."""
    return any(one in family and other in family for family in FOLDED_TOGETHER)


def reads_shapes(op: tf.Operation) -> bool:
    """Return whether ``op`` reads shapes, and no buffer. (``ZerosLike`` of a tensor list depends on
    the number of its elements.)"""
    return op.type in SHAPE_READERS and all(t.dtype != tf.variant for t in op.inputs)


def reads_known_shapes(op: tf.Operation) -> bool:
    """Return whether ``op`` needs only shapes that are known already, so that it becomes a
    constant."""
    return reads_shapes(op) and all(t.shape.is_fully_defined() for t in op.inputs)


def is_stateful(op: tf.Operation) -> bool:
    """Return whether running ``op`` twice may differ from running it once, by its op definition."""
    return _by_definition(op).is_stateful


def is_commutative(op: tf.Operation) -> bool:
    """Return whether the order of the inputs of ``op`` does not matter, by its op definition."""
    return _by_definition(op).is_commutative


def is_collective(op: tf.Operation) -> bool:
    """Return whether ``op`` runs together with ops on other devices: it would wait for these for
    ever if they waited for it."""
    return op.type in COLLECTIVES or (is_stateful(op) and _by_definition(op).is_collective)


class _Definition(NamedTuple):
    is_stateful: bool
    is_commutative: bool
    is_collective: bool
    takes_reference: bool


_definitions: dict[str, _Definition] = {}


def _by_definition(op: tf.Operation) -> _Definition:
    """Return facts from the definition of an op. They are cached by type, except for ops whose type
    names a function: such a definition belongs to one graph."""
    known = _definitions.get(op.type)
    if known is None:
        # Reading an op definition parses a proto; it is a property of the type alone.
        read = op.op_def
        known = _Definition(
            bool(read.is_stateful),
            bool(read.is_commutative),
            bool(read.is_distributed_communication),
            any(argument.is_ref for argument in read.input_arg),
        )
        if graphs.is_registered(op.type):
            _definitions[op.type] = known
    return known


def assigned_references(op: tf.Operation) -> list[tf.Operation]:
    """Return the reference variables (see `REFERENCE_VARIABLES`) that ``op`` may assign.

    An op that only reads a variable takes its value, by its definition, and not the reference.
    """
    if not _by_definition(op).takes_reference:
        return []
    found: list[tf.Operation] = []
    seen: set[tf.Operation] = set()
    todo = [op]
    while todo:
        for tensor in todo.pop().inputs:
            # Assignments, and branches and loops of control flow v1, pass the reference on.
            if tensor.dtype != tensor.dtype.base_dtype and tensor.op not in seen:
                seen.add(tensor.op)
                todo.append(tensor.op)
                if tensor.op.type in REFERENCE_VARIABLES:
                    found.append(tensor.op)
    return found


def is_random(op: tf.Operation) -> bool:
    """Return whether ``op`` draws random numbers (legacy stateful or stateless)."""
    return "Random" in op.type or "Multinomial" in op.type or op.type.startswith("RngRead")


def adds_as_buffers_come(op: tf.Operation) -> bool:
    """Return whether the order of a sum, and so its last bits, depends on other holders of its
    addends: the kernel begins with the first addend whose buffer it can take over."""
    return op.type == "AddN" and len(op.inputs) > 2


def is_split(op: tf.Operation) -> bool:
    """Return whether ``op`` is one view of several tensors that grappler splits into one view of
    each, so that none waits for the others.

    Grappler does so unless ``op`` has control inputs (``model_pruner.cc``).
    """
    return op.type == "IdentityN" and not op.control_inputs


def is_clonable(op: tf.Operation) -> bool:
    """Return whether a copy of ``op`` that reads the same inputs always gives the same outputs.

    Stateless ops with inputs qualify, stateless random draws included (the seed is an input).
    Stateful ops, sources, collectives and ops inside a TF1 control flow frame do not. Nor do ops
    that touch references, resources or variants.
    """
    kind = op.type
    if kind in SOURCES or kind in _NEVER or kind in COLLECTIVES or is_stateful(op):
        return False
    inputs, outputs = op.inputs, op.outputs
    if not inputs or not outputs:
        return False
    if any(_is_opaque(t.dtype) for t in (*outputs, *inputs)):
        return False
    return not adds_as_buffers_come(op) and not graphs.in_v1_control_flow(op)


@cache
def _is_opaque(dtype: tf.DType) -> bool:
    return dtype in (tf.resource, tf.variant) or dtype != dtype.base_dtype
