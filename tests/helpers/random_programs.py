"""Random TensorFlow programs as plain data.

A program is a list of instructions for a stack of tensors, each a tuple of a name and small
integers. Any integers are valid, so Hypothesis can shrink a program to the shortest one that fails.
Every tensor of the stack is a matrix of `ROWS` rows in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

ROWS = 4
WIDTHS = (2, 3, 4, 6, 8)
#: Rounding of half and of single precision, as a share of the largest value.
HALF, SINGLE = 2.0**-6, 1e-6
#: Rounding of several sums in a chain, each of ten addends in any order, which may cancel.
IN_ANY_ORDER = 1e-5
#: Wider matrices are cut, so that repeated concatenation does not explode.
WIDEST = 24

UNARY = (
    tf.tanh,
    tf.sigmoid,
    tf.nn.relu,
    tf.nn.gelu,
    tf.sin,
    tf.exp,
    tf.square,
    tf.nn.softplus,
    tf.nn.elu,
    tf.abs,
    tf.identity,
    tf.stop_gradient,
    tf.nn.leaky_relu,
    lambda t: tf.sqrt(tf.abs(t) + 1.0),
    lambda t: tf.clip_by_value(t, -0.5, 0.5),
    lambda t: tf.cumsum(t, axis=1),
    lambda t: tf.reverse(t, axis=[1]),
)
BINARY = (
    tf.add,
    tf.multiply,
    tf.subtract,
    tf.maximum,
    tf.minimum,
    tf.math.squared_difference,
    lambda a, b: a / (1.0 + tf.abs(b)),
    lambda a, b: tf.where(a > b, a, b * 0.5),
    lambda a, b: tf.add_n([a, b if b.shape == a.shape else a + b, a]),
)
REDUCTIONS = (
    tf.reduce_mean,
    tf.reduce_sum,
    tf.reduce_max,
    tf.math.reduce_variance,
    tf.reduce_logsumexp,
)
HALVES = (tf.float16, tf.bfloat16)

KINDS = (
    "unary",
    "unary",
    "binary",
    "binary",
    "matmul",
    "matmul",
    "bias",
    "views",
    "transpose",
    "concat",
    "split",
    "normalize",
    "reduce",
    "stateless_random",
    "dropout",
    "data",
    "half",
    "half_matmul",
    "gather",
    "softmax",
    "stack",
    "many_addends",
)


@dataclass(frozen=True)
class Program:
    """Instructions, and the losses to differentiate.

    Attributes
    ----------
    steps
        ``(kind, a, b, c)``: a name of `KINDS` and three operands, taken modulo the number of
        choices.
    losses
        Tensors of the stack, counted from the newest, whose sums are the losses.
    joined
        Whether the losses are added to a single one.
    """

    steps: tuple[tuple[str, int, int, int], ...]
    losses: tuple[int, ...]
    joined: bool


_operand = st.integers(0, 11)


def programs(least: int = 3, most: int = 22) -> st.SearchStrategy[Program]:
    """Generate programs of ``least`` to ``most`` instructions."""
    instruction = st.tuples(st.sampled_from(KINDS), _operand, _operand, _operand)
    return st.builds(
        Program,
        st.lists(instruction, min_size=least, max_size=most).map(tuple),
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
        st.booleans(),
    )


def rounding(program: Program) -> float:
    """Return the difference of results that rounding explains."""
    return HALF if any(kind.startswith("half") for kind, *_ in program.steps) else SINGLE


class Weights:
    """Variables by shape and slot; a program that uses one twice has tied weights."""

    SLOTS = 2

    def __init__(self) -> None:
        draw = np.random.default_rng(7)
        self.matrices = {
            (i, o, k): tf.Variable(draw.normal(size=(i, o)).astype(np.float32) / 2)
            for i in (*WIDTHS, 12, 16, WIDEST)
            for o in WIDTHS
            for k in range(self.SLOTS)
        }
        self.biases = {
            n: tf.Variable(draw.normal(size=n).astype(np.float32)) for n in range(1, WIDEST + 1)
        }
        self.tables = {n: tf.Variable(draw.normal(size=(5, n)).astype(np.float32)) for n in WIDTHS}


@dataclass(eq=False)
class Built:
    """A program in a graph: its losses, the xs of its gradients, and every tensor that it made."""

    losses: list[tf.Tensor]
    xs: list[object]
    tensors: list[tf.Tensor]


def inputs() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return data for programs: two matrices, indices."""
    draw = np.random.default_rng(11)
    return (
        tf.constant(draw.normal(size=(ROWS, 4)).astype(np.float32)),
        tf.constant(draw.normal(size=(ROWS, 6)).astype(np.float32)),
        tf.constant([0, 3, 3, 1], tf.int32),
    )


def build(
    program: Program, weights: Weights, first: tf.Tensor, side: tf.Tensor, indices: tf.Tensor
) -> Built:
    """Run ``program`` in the current graph."""
    stack = [first]
    made: list[tf.Tensor] = []
    used: dict[int, tf.Variable] = {}

    def use(variable: tf.Variable) -> tf.Variable:
        used[id(variable)] = variable
        return variable

    def pick(number: int) -> tf.Tensor:
        return stack[-1 - number % len(stack)]

    def fit(tensor: tf.Tensor, width: int) -> tf.Tensor:
        have = int(tensor.shape[1])
        if have == width or have == 1:
            return tensor
        if have > width:
            return tensor[:, :width]
        return tf.pad(tensor, [[0, 0], [0, width - have]])

    def matrix(rows: int, b: int, c: int) -> tf.Variable:
        return use(weights.matrices[rows, WIDTHS[b % len(WIDTHS)], c % Weights.SLOTS])

    def known_width(tensor: tf.Tensor) -> tf.Tensor:
        have = int(tensor.shape[1])
        known = (*WIDTHS, 12, 16, WIDEST)
        return fit(tensor, max((w for w in known if w <= have), default=2) if have > 1 else 2)

    for number, (kind, a, b, c) in enumerate(program.steps):
        x = pick(a)
        width = int(x.shape[1])
        new: list[tf.Tensor]
        if kind == "unary":
            y = UNARY[b % len(UNARY)](x)
            new = [tf.tanh(y)] if b % len(UNARY) in (5, 6, 15) else [y]
        elif kind == "binary":
            new = [BINARY[c % len(BINARY)](x, fit(pick(b), width))]
            new = [t if t.shape[1] == width else fit(t, width) for t in new]
        elif kind == "matmul":
            x = known_width(tf.tile(x, [1, 2]) if width == 1 else x)
            new = [tf.matmul(x, matrix(int(x.shape[1]), b, c))]
        elif kind == "bias":
            new = [tf.nn.bias_add(x, use(weights.biases[width]))]
        elif kind == "views":
            y = tf.reshape(x, [-1])
            y = UNARY[b % 5](y) if c % 2 else y
            new = [tf.reshape(tf.expand_dims(tf.identity(y), 0), [ROWS, width])]
        elif kind == "transpose":
            y = tf.transpose(x)
            new = [
                tf.transpose(tf.sin(y)) if b % 2 else tf.reshape(y, [ROWS, width]),
            ]
        elif kind == "concat":
            y = tf.concat([x, pick(b), *([pick(c)] if c % 3 == 0 else [])], axis=1)
            new = [y[:, :WIDEST]]
        elif kind == "split":
            new = (
                tf.split(x, 2, axis=1)
                if width % 2 == 0
                else list(tf.split(x, [1, width - 1], axis=1))
                if width > 1
                else [tf.sin(x)]
            )
            new = list(new)[: 1 + b % 2] if len(new) > 1 and b % 3 == 0 else list(new)
        elif kind == "normalize":
            mean, variance = tf.nn.moments(x, axes=[b % 2], keepdims=True)
            new = [(x - mean) * tf.math.rsqrt(variance + 1e-3)]
        elif kind == "reduce":
            reduced = REDUCTIONS[b % len(REDUCTIONS)](x, axis=c % 2, keepdims=True)
            new = [tf.tanh(reduced) + x] if b % 2 else [x * tf.sigmoid(reduced)]
        elif kind == "stateless_random":
            noise = tf.random.stateless_normal(x.shape, seed=[number, b])
            new = [x * noise if c % 2 else tf.tanh(x + noise)]
        elif kind == "dropout":
            new = [tf.nn.dropout(x, 0.5, seed=17 + number)]
        elif kind == "data":
            new = (
                [BINARY[b % 3](x, fit(side, width))]
                if width <= 6
                else [x + tf.reduce_mean(side, 1, keepdims=True)]
            )
        elif kind == "half":
            y = tf.cast(x, HALVES[b % 2])
            new = [tf.cast(tf.tanh(y) if c % 2 else y * y, tf.float32)]
        elif kind == "half_matmul":
            x = known_width(tf.tile(x, [1, 2]) if width == 1 else x)
            half = HALVES[c // 2 % 2]
            w = tf.cast(matrix(int(x.shape[1]), b, c), half)
            new = [tf.cast(tf.matmul(tf.cast(x, half), w), tf.float32)]
        elif kind == "gather":
            table = weights.tables[WIDTHS[b % len(WIDTHS)]]
            rows = tf.gather(use(table), indices)
            new = (
                [tf.concat([x, rows], 1)[:, :WIDEST]]
                if c % 2
                else [
                    fit(x, 1) * rows
                    if width == 1
                    else x * fit(rows, width)
                    if rows.shape[1] >= width
                    else x[:, : rows.shape[1]] * rows
                ]
            )
        elif kind == "softmax":
            new = [tf.nn.softmax(x) if b % 2 else tf.nn.log_softmax(x)]
        elif kind == "stack":
            y = tf.stack([x, fit(pick(b), width) if pick(b).shape[1] > 1 else x], axis=0)
            new = [tf.reduce_sum(tf.sin(y), axis=0)] if c % 2 else list(tf.unstack(y, axis=0))
        else:  # one tensor with many readers: a gradient of many addends
            new = [tf.add_n([tf.sin(x * float(k)) for k in range(1, 11 + b)]) / 8.0]
        stack.extend(new)
        made.extend(new)
    losses = [tf.reduce_sum(tf.tanh(pick(number))) for number in program.losses]
    if program.joined:
        losses = [tf.add_n(losses) if len(losses) > 1 else losses[0] * 2.0]
    return Built(losses, [first, side, *used.values()], made)


def between(xs: list[object], losses: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the ``tensors`` that gradients from ``losses`` to ``xs`` pass, without the ends."""
    graph = losses[0].graph
    captured = {id(outside): inside for outside, inside in graph.captures}
    starts = []
    for x in xs:
        handle = x.handle if isinstance(x, tf.Variable) else x
        handle = captured.get(id(handle), handle)
        if tf.is_symbolic_tensor(handle):
            starts.append(handle)
    ends = {y.ref() for y in losses}
    begins = {x.ref() for x in starts}
    above: set[object] = set()
    todo = [y.op for y in losses]
    while todo:
        op = todo.pop()
        if op not in above and op.type != "StopGradient":
            above.add(op)
            todo.extend(t.op for t in op.inputs)
    below: set[object] = {x.op for x in starts}
    todo = list(below)
    while todo:
        op = todo.pop()
        for out in op.outputs:
            for reader in out.consumers():
                if reader not in below and reader.type != "StopGradient":
                    below.add(reader)
                    todo.append(reader)
    return [
        t
        for t in tensors
        if any(reader in above for reader in t.consumers())
        and t.op in below
        and t.ref() not in ends
        and t.ref() not in begins
    ]


def adds_in_any_order(graph: tf.Graph, forward: int) -> bool:
    """Return whether an `AddN` sums three or more gradients. ``forward``: number of forward ops.

    It begins with an addend whose buffer happens to be free, so that the last bits of TensorFlow's
    own sums depend on timing.
    """
    backward = graph.get_operations()[forward:]
    return any(op.type == "AddN" and len(op.inputs) > 2 for op in backward)
