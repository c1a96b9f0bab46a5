"""Random programs of calls, branches and loops nested in each other, differentiated several times,
as plain data.

A program is a tree of instructions. Every tree is valid, so Hypothesis can shrink it to the
smallest one that fails. Each instruction maps one matrix of `SHAPE` to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

SHAPE = (3, 4)
WEIGHTS = 2

ELEMENTWISE = (
    tf.sin,
    tf.tanh,
    tf.nn.softplus,
    tf.square,
    tf.stop_gradient,
    lambda h: tf.nn.gelu(h) * h,
    lambda h: h / (1.0 + tf.abs(h)),
    lambda h: h - tf.reduce_mean(h, axis=0, keepdims=True),
    lambda h: tf.reverse(h, axis=[1]) * h,
)

Steps = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Nested:
    """A program and the gradients to compute.

    Attributes
    ----------
    steps
        ``("op", k)``, ``("product", k)``, ``("call", steps)``, ``("branch", steps, steps)``,
        ``("loop", count, steps)``.
    losses
        Results of steps, counted from the last one.
    derivatives
        For each gradient computation: the number of a loss, or of the sum of squares of an earlier
        computation's gradients, and whether it is with respect to a hidden result, too.
    """

    steps: Steps
    losses: tuple[int, ...]
    derivatives: tuple[tuple[int, bool], ...]


def _steps(depth: int, most: int) -> st.SearchStrategy[Steps]:
    kinds: list[st.SearchStrategy[tuple[Any, ...]]] = [
        st.tuples(st.just("op"), st.integers(0, len(ELEMENTWISE) - 1)),
        st.tuples(st.just("product"), st.integers(0, WEIGHTS - 1)),
    ]
    if depth:
        inner = _steps(depth - 1, 3)
        kinds += [
            st.tuples(st.just("call"), inner),
            st.tuples(st.just("branch"), inner, inner),
            st.tuples(st.just("loop"), st.integers(0, 3), inner),
        ]
    return st.lists(st.one_of(kinds), min_size=1, max_size=most).map(tuple)


def programs(depth: int = 2, most: int = 6) -> st.SearchStrategy[Nested]:
    """Generate programs of at most ``most`` instructions at the top, and 3 at ``depth`` levels."""
    return st.builds(
        Nested,
        _steps(depth, most),
        st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple),
        st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3).map(tuple),
    )


def values() -> tuple[np.ndarray, list[np.ndarray]]:
    """Return values for the matrix that a program begins with, and for its weights."""
    draw = np.random.default_rng(5)
    first = draw.normal(size=SHAPE).astype(np.float32)
    weights = [draw.normal(size=(SHAPE[1], SHAPE[1])) / 2 for _ in range(WEIGHTS)]
    return first, [weight.astype(np.float32) for weight in weights]


def run(steps: Steps, h: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return ``h`` and the result of each step."""

    def last(inner: Steps) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda h: run(inner, h, weights)[-1]

    found = [h]
    for kind, *more in steps:
        h = found[-1]
        if kind == "op":
            h = ELEMENTWISE[more[0]](h)
        elif kind == "product":
            h = tf.matmul(h, weights[more[0]])
        elif kind == "call":
            h = tf.function(last(more[0]), autograph=False)(h)
        elif kind == "branch":
            one, other = map(last, more)
            h = tf.cond(tf.reduce_sum(h) > 0.0, lambda h=h, f=one: f(h), lambda h=h, f=other: f(h))
        else:
            count, body = more[0], last(more[1])
            h = tf.while_loop(
                lambda k, h, count=count: k < count, lambda k, h, f=body: (k + 1, f(h)), (0, h)
            )[1]
        # Tanh bounds the numbers: else differences of rounding would grow without end.
        found.append(tf.tanh(h) if kind != "op" or more[0] == 3 else h)
        found[-1].set_shape(SHAPE)
    return found


def differentiated(
    program: Nested,
    h: tf.Tensor,
    weights: Sequence[tf.Tensor],
    gradients: Callable[[Any, Any], list[tf.Tensor | None]],
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Return all hidden results of a program, and all of its gradients."""
    hidden = run(program.steps, h, weights)
    losses = [tf.reduce_sum(tf.sin(hidden[-1 - number % len(hidden)])) for number in program.losses]
    found: list[tf.Tensor | None] = []
    for number, inside in program.derivatives:
        xs = [h, *weights, *([hidden[len(hidden) // 2]] if inside else [])]
        grads = gradients(losses[number % len(losses)], xs)
        found += grads
        squares = [tf.reduce_sum(tf.square(g)) for g in grads if g is not None]
        # Gradients that are all None have no squares to differentiate.
        losses += [tf.add_n(squares)] if squares else []
    return hidden, found
