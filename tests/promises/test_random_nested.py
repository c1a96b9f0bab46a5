"""Random programs of nested calls, branches and loops: TensorFlow's gradients, of any order, also
where a session feeds tensors inside."""

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
#: In four parts, which different processes can take.
_quarter = settings(
    _fast,
    max_examples=examples(250),
    derandomize=False,
    # Explanations run a failing program hundreds of times.
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
#: Which of several gradient computations are TensorFlow's own: all modulo this number is one, or
#: none.
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
            # Sums inside of functions have no fixed order, and further orders multiply the
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
    """In a graph of TF1, with the values that hidden result number ``fed`` is fed with instead of
    its own."""
    first, weights = values()
    with tf.Graph().as_default(), v1.Session() as session:
        # Sessions optimize by their own configuration.
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
            # What TensorFlow itself cannot differentiate, or run.
            event(f"TensorFlow: {type(error).__name__}")
            assume(False)
        try:
            found = run(_bound(options, plain))
        except ms.errors.HigherOrderError:
            # Of loops inside of functions whose steps are not kept; not where they are to be.
            if options.get("loops") == "keep" or len(program.derivatives) == 1:
                raise
            event("refused: higher order")
            return
        except ValueError as error:
            # The one other answer but the right one: the session refuses to feed what is
            # recomputed, by its name.
            if where in ("function", None) or "may not be fed" not in str(error):
                raise
            event("refused")
            return
    _same(expected, found)


_where = st.one_of(st.just("function"), st.none(), st.integers(0, 6))


#: The first gradients replay the loop, the second ones need all of its steps: what was built to
#: replay it has to do nothing, though its inputs are held back.
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
