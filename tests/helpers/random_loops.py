"""Random loops, as plain data: kinds of their states, instructions of their body, conditions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from hypothesis import strategies as st

SHAPE = (4, 8)
#: Kinds of states, with dtype and shape.
STATES = {
    "float": (tf.float32, SHAPE),
    "small": (tf.float32, (3,)),
    "scalar": (tf.float32, ()),
    "double": (tf.float64, (2, 8)),
    "half": (tf.bfloat16, (8,)),
    "int": (tf.int32, ()),
    "bool": (tf.bool, (8,)),
    "array": (tf.float32, SHAPE),
    "unchanged": (tf.float32, SHAPE),
}
BODY = """matmul variable layer slices gather split branch function inner_loop inner_array
stateless_random drawn_once custom_gradient element reduced softmax normalized outer step_number
where einsum cumulated rematerialized dense swish joined""".split()
CONDITIONS = """counted bounded both two_by_two run_time_steps run_time_maximum value bounded_value
fuel""".split()


@dataclass(frozen=True)
class Loop:
    """A random loop: kinds of its states, instructions of its body, its differentiated outputs."""

    states: tuple[str, ...]
    body: tuple[tuple[str, int, int], ...]
    updates: tuple[int, ...]
    condition: str
    steps: int
    outputs: tuple[int, ...]
    xs: tuple[int, ...]
    leaf: int | None
    tape: bool
    parallel: int


@st.composite
def loops(draw, most=7):
    count = draw(st.integers(0, 3))
    states = ("float", *(draw(st.sampled_from(sorted(STATES))) for _ in range(count)))
    number = st.integers(0, 30)
    body = draw(
        st.lists(st.tuples(st.sampled_from(BODY), number, number), min_size=1, max_size=most)
    )
    drawn = any(kind == "drawn_once" for kind, *_ in body)
    return Loop(
        states=states,
        body=tuple(body),
        updates=tuple(draw(number) for _ in states),
        condition=draw(st.sampled_from(CONDITIONS)),
        steps=draw(st.integers(0, 30)),
        outputs=tuple(draw(st.lists(number, min_size=1, max_size=3))),
        xs=tuple(draw(st.lists(number, min_size=1, max_size=5))),
        leaf=draw(st.one_of(st.none(), st.integers(1, 9))),
        tape=draw(st.booleans()),
        # In parallel, steps would draw in an order of their own.
        parallel=1 if drawn else draw(st.sampled_from([1, 10])),
    )


@tf.function(autograph=False)
def _squashed(h):
    return tf.sin(h) * tf.cos(h)


@tf.custom_gradient
def _clipped(h):
    return tf.exp(-tf.square(h)), lambda dy: tf.clip_by_value(-2.0 * h * dy, -0.1, 0.1)


@dataclass(frozen=True)
class Outside:
    """The tensors and the variable that a body captures."""

    x: Any
    w: Any
    v: Any
    each: Any
    shift: Any

    @property
    def all(self):
        return [self.x, self.w, self.v, self.each, self.shift]


def _instruction(kind, a, b, k, i, out):
    """Return a new tensor made of two others, for instruction ``k`` of step ``i``."""
    if kind == "matmul":
        return tf.matmul(a, out.w)
    if kind == "variable":
        return tf.tanh(tf.matmul(a, out.v) + out.v[0])
    if kind == "layer":
        return tf.tanh(tf.matmul(a, out.w) + out.shift)
    if kind == "slices":
        return tf.concat([a[1:], b[:1]], 0)
    if kind == "gather":
        return a + tf.gather(out.w, tf.stack([i % 8, 0, k % 8, 2]))
    if kind == "split":
        left, right = tf.split(a, 2, 1)
        return tf.concat([tf.sin(right), left * b[:, :4]], 1)
    if kind == "branch":
        return tf.cond(
            tf.equal((i + k) % 3, 0), lambda: tf.sin(a), lambda: tf.tanh(tf.matmul(b, out.w))
        )
    if kind == "function":
        return _squashed(a)
    if kind == "inner_loop":
        body = lambda j, h: (j + 1, tf.tanh(tf.matmul(h, out.w)))  # noqa: E731
        return tf.while_loop(lambda j, _: j < 1 + k % 3, body, (0, a))[1]
    if kind == "inner_array":
        array = tf.TensorArray(tf.float32, size=2, element_shape=SHAPE, clear_after_read=False)
        array = array.write(0, tf.sin(a)).write(1, b)
        return array.read(0) * array.read(1) + array.read(k % 2)
    if kind == "stateless_random":
        return a * tf.random.stateless_uniform(SHAPE, tf.stack([i, k]), 0.5, 1.5)
    if kind == "drawn_once":
        return a * tf.random.uniform(SHAPE, 0.5, 1.5, seed=k)
    if kind == "custom_gradient":
        return _clipped(a)
    if kind == "element":
        return a + tf.gather(out.each, i % 30)
    if kind == "reduced":
        return a - tf.reduce_mean(b, 1, keepdims=True)
    if kind == "softmax":
        return tf.nn.softmax(a)
    if kind == "normalized":
        mean, variance = tf.nn.moments(a, [0])
        return tf.nn.batch_normalization(a, mean, variance, None, None, 1e-2)
    if kind == "outer":
        return a * tf.cos(out.shift)
    if kind == "step_number":
        return a * tf.cast(i % 5 + 1, tf.float32) * 0.3
    if kind == "where":
        return tf.where(a > b, tf.tanh(a), 0.5 * b)
    if kind == "einsum":
        return tf.einsum("ij,kj,kl->il", a, b, b) * 0.1
    if kind == "cumulated":
        return 0.3 * tf.cumsum(a, 1)
    if kind == "dense":
        return tf.tanh(tf.nn.bias_add(tf.matmul(a, out.w), out.shift[0]))
    if kind == "joined":
        return tf.sigmoid((tf.matmul(a, out.w) + out.shift[0]) + tf.gather(out.each, i % 30))
    if kind == "swish":
        return tf.nn.sigmoid(tf.matmul(a, out.w) + out.shift[1]) * b
    assert kind == "rematerialized"
    return tf.recompute_grad(lambda h: tf.tanh(tf.matmul(h, out.w)))(a)


def _seen(kind, state, i):
    """Return 4 × 8 numbers of a state, for the instructions of a body to read."""
    if kind == "array":
        return state.read(tf.maximum(i - 1, 0))
    if kind in ("float", "unchanged"):
        return state
    state = tf.cast(state, tf.float32)
    if kind == "small":
        return tf.reduce_sum(state) + tf.fill(SHAPE, 0.1)
    if kind == "double":
        return tf.tile(state, [2, 1])
    return tf.zeros(SHAPE) + tf.sin(state)


def _made(kind, value, old, i):
    """Return a state's next value, made of 4 × 8 numbers."""
    value = tf.tanh(value)
    if kind == "unchanged":
        return old
    if kind == "array":
        return old.write(i, value)
    if kind == "float":
        return value
    if kind == "bool":
        return value[0] > 0.1
    if kind == "int":
        return old + tf.cast(value[0, 0] > 0.0, tf.int32)
    dtype, shape = STATES[kind]
    flat = tf.reshape(value, [-1])[: math.prod(shape)]
    return tf.cast(tf.reshape(flat, shape), dtype)


def _first(kind, x, most):
    if kind == "array":
        array = tf.TensorArray(
            tf.float32, size=most + 1, element_shape=SHAPE, clear_after_read=False
        )
        return array.write(0, x)
    if kind in ("int", "bool"):
        dtype, shape = STATES[kind]
        return tf.zeros(shape, dtype)
    return _made("float" if kind == "unchanged" else kind, tf.cos(x), None, 0)


def _condition(loop, most):
    """Return a loop's condition, its given maximum of steps, and its counter's increment."""
    name, steps = loop.condition, loop.steps
    alive = lambda h: tf.reduce_sum(tf.square(h)) > 0.2  # noqa: E731
    return {
        "counted": (lambda i, h: i < steps, None, 1),
        "bounded": (lambda i, h: i < 1000, steps, 1),
        "both": (lambda i, h: i <= steps // 2, steps, 1),
        "two_by_two": (lambda i, h: i < steps, None, 2),
        "run_time_steps": (lambda i, h: i < most, None, 1),
        "run_time_maximum": (lambda i, h: i >= 0, most, 1),
        "value": (lambda i, h: tf.logical_and(i < steps, alive(h)), None, 1),
        "bounded_value": (lambda i, h: alive(h), steps, 1),
        # Nothing in the graph says that the loop ends.
        "fuel": (lambda i, h: 1.0 - 0.1 * tf.cast(i, tf.float32) > -0.05 * steps, None, 1),
    }[name]


def built(loop, out, most):
    """Return the differentiated tensor: parts of the states that the loop ends with."""
    size = 64

    def body(i, *states):
        pool = [_seen(kind, s, i) for kind, s in zip(loop.states, states, strict=True)]
        for k, (kind, a, b) in enumerate(loop.body):
            # Mostly the last ones, so that the body is deep.
            one, other = pool[-1 - a % min(len(pool), 3)], pool[b % len(pool)]
            pool.append(_instruction(kind, one, other, k, i, out))
        news = [
            _made(kind, pool[-1 - u % len(pool)], s, i)
            for kind, u, s in zip(loop.states, loop.updates, states, strict=True)
        ]
        return (i + growth, *news)

    condition, maximum, growth = _condition(loop, most)
    first = [_first(kind, tf.sin(out.x), size) for kind in loop.states]
    _, *ends = tf.while_loop(
        lambda i, *states: condition(i, states[0]),
        body,
        (0, *first),
        maximum_iterations=maximum,
        parallel_iterations=loop.parallel,
    )
    ys = []
    for n in dict.fromkeys(k % len(ends) for k in loop.outputs):
        kind, end = loop.states[n], ends[n]
        if kind == "array":
            end = end.gather([0, 1])
        ys.append(tf.reduce_sum(tf.square(tf.cast(end, tf.float32))))
    return tf.add_n([tf.sin(y) for y in ys[:2]]) + sum(ys[2:])
