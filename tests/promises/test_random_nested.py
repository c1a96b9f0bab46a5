"""Random programs of nested calls, branches and loops: gradients of any order are TensorFlow's,
also if a session feeds tensors inside."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, assume, event, example, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from tests.helpers.random_nested import SHAPE, Nested, differentiated, programs, values
from tests.helpers.sampling import examples

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

_fast = settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
#: A quarter of the cases, so that four processes can share them.
_quarter = settings(
    _fast,
    max_examples=examples(250),
    derandomize=False,
    # To explain a failure, hypothesis would run the program hundreds of times.
    phases=[phase for phase in Phase if phase is not Phase.explain],
)

_options = st.sampled_from(
    [
        {},
        {"checkpoints": None},
        {"checkpoints": "speed"},
        {"loops": "keep"},
        {"attention": "blocks"},
    ]
)
#: Which of several gradient computations are TensorFlow's own: those whose number is 1 modulo this
#: one; 0: none.
_plain = st.sampled_from([0, 2, 3])


def _bound(options: dict[str, Any], plain: int) -> Any:
    asked = 0

    def gradients(ys: Any, xs: Any) -> Any:
        nonlocal asked
        asked += 1
        if plain and asked % plain == 1:
            return tf.gradients(ys, xs)
        return ms.gradients(ys, xs, **options)

    return gradients


def _same(plain: Any, ours: Any) -> None:
    assert [g is None for g in plain] == [g is None for g in ours]
    for theirs, found in zip(plain, ours, strict=True):
        if theirs is not None:
            # Sums inside of functions have no fixed order, and higher orders multiply the
            # difference.
            far = np.abs(np.subtract(theirs, found)).max(initial=0.0)
            assert far <= 1e-5 * max(1.0, np.abs(theirs).max(initial=0.0)), (theirs, found)


def _in_function(program: Nested, gradients: Any) -> list[np.ndarray | None]:
    first, weights = values()
    variables = [tf.Variable(weight) for weight in weights]

    @tf.function(autograph=False)
    def step(h: tf.Tensor) -> Any:
        return differentiated(program, h, [tf.identity(v) for v in variables], gradients)[1]

    return [None if g is None else g.numpy() for g in step(tf.constant(first))]


def _in_session(program: Nested, gradients: Any, fed: int | None) -> list[np.ndarray | None]:
    """Return gradients of a TF1 graph; ``fed`` is the number of a hidden result that gets another
    value."""
    first, weights = values()
    with tf.Graph().as_default(), v1.Session() as session:
        # Sessions have a configuration of their own for optimization.
        h = v1.placeholder(tf.float32, SHAPE)
        constants = [v1.placeholder_with_default(weight, weight.shape) for weight in weights]
        hidden, found = differentiated(program, h, constants, gradients)
        feed = {h: first}
        if fed is not None:
            feed[hidden[fed % len(hidden)]] = 0.3 * first[::-1]
        there = [g for g in found if g is not None]
        result = iter(session.run(there, feed))
        return [None if g is None else next(result) for g in found]


def _check(program: Nested, options: dict[str, Any], plain: int, where: Any) -> None:
    def run(gradients: Any) -> Any:
        if where == "function":
            return _in_function(program, gradients)
        return _in_session(program, gradients, where)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(tf.gradients)
        except Exception as error:
            # TensorFlow itself cannot differentiate the program, or cannot run it.
            event(f"TensorFlow: {type(error).__name__}")
            assume(False)
        try:
            found = run(_bound(options, plain))
        except ms.errors.HigherOrderError:
            # Loops inside of functions raise it unless their steps are kept.
            if options.get("loops") == "keep" or len(program.derivatives) == 1:
                raise
            event("refused: higher order")
            return
        except ValueError as error:
            # The only other right answer: the session refuses to feed a recomputed tensor, and
            # names it.
            if where in ("function", None) or "may not be fed" not in str(error):
                raise
            event("refused")
            return
    _same(expected, found)


_where = st.one_of(st.just("function"), st.none(), st.integers(0, 6))


#: The first gradients replay the loop, the second ones need all of its steps. The ops that were
#: built for the replay must do nothing, though their inputs are held back.
_STEPS_NEEDED_AFTER_ALL = Nested(
    steps=(
        ("call", (("product", 1),)),
        ("loop", 2, (("call", (("op", 2), ("product", 1))),)),
        ("op", 0),
    ),
    losses=(0,),
    derivatives=((0, False), (1, False)),
)


@given(programs(), _options, _plain, _where)
@example(_STEPS_NEEDED_AFTER_ALL, {}, 0, "function")
@_fast
def test_gradients_of_nested_programs(
    program: Nested, options: dict[str, Any], plain: int, where: Any
) -> None:
    _check(program, options, plain, where)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@given(programs(), _options, _plain, _where)
@_quarter
def test_gradients_of_a_thousand_nested_programs(
    part: int, program: Nested, options: dict[str, Any], plain: int, where: Any
) -> None:
    _check(program, options, plain, where)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@given(programs(), _options, _plain, st.one_of(st.none(), st.integers(0, 6)))
@_quarter
def test_gradients_of_a_thousand_nested_programs_with_control_flow_v1(
    part: int, program: Nested, options: dict[str, Any], plain: int, where: Any
) -> None:
    v1.disable_control_flow_v2()
    try:
        _check(program, options, plain, where)
    finally:
        v1.enable_control_flow_v2()
