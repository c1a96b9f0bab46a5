"""Where a patch begins and ends: TensorFlow as it was afterwards, eager code, and blocks in which
nothing is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients import patching
from memsaving_gradients.engine.options import Options
from tests.engine.test_patching import chain, compare, data, taped

errors = ms.errors


# --- patching and unpatching


def _attributes() -> tuple[Any, ...]:
    tape = tf.GradientTape
    return (tape.gradient, tape.jacobian, tape.batch_jacobian)


def test_everything_is_restored() -> None:
    before = _attributes()
    ms.patch()
    assert all(a is not b for a, b in zip(before, _attributes(), strict=True))
    ms.unpatch()
    assert _attributes() == before


def test_restored_after_an_error() -> None:
    before = _attributes()
    with pytest.raises(KeyError), ms.patched():
        raise KeyError
    assert _attributes() == before


def test_signature_and_documentation_stay() -> None:
    before = inspect.signature(tf.GradientTape.gradient), tf.GradientTape.gradient.__doc__
    ms.patch()
    assert inspect.signature(tf.GradientTape.gradient) == before[0]
    assert tf.GradientTape.gradient.__doc__ == before[1]
    ms.unpatch()


def test_not_patched_outside() -> None:
    function = tf.function(taped)
    ms.patch()
    ms.unpatch()
    function(data())
    assert ms.plans(function) == ()


def test_patching_twice() -> None:
    ms.patch(checkpoints="speed")
    with pytest.raises(
        errors.PatchError, match=r"patched already, with checkpoints='speed'.*unpatch"
    ):
        ms.patch(checkpoints="memory")
    ms.unpatch()


def test_patched_inside_of_patched() -> None:
    with ms.patched():
        with pytest.raises(errors.PatchError, match="patched already"), ms.patched():
            pass
        (plan,) = ms.plans(_traced(taped))
    assert plan.mode == "memory"


def _traced(function: Callable[..., Any]) -> Any:
    traced = tf.function(function)
    traced(data())
    return traced


def test_unpatching_unpatched() -> None:
    with pytest.raises(errors.PatchError, match=r"call patch\(\) first"):
        ms.unpatch()


def test_unpatching_inside_of_a_block() -> None:
    with ms.patched():
        ms.unpatch()
    with pytest.raises(errors.PatchError):
        ms.unpatch()


def test_paused() -> None:
    def f(x: tf.Tensor) -> Any:
        with patching.paused():
            return taped(x)

    assert compare(f, data()) == ()


def test_ms_gradients_uses_its_own_options() -> None:
    (plan,) = compare(lambda x: ms.gradients(chain(x), x, checkpoints=["Sin_7"]), data())
    assert plan.mode == "named"


# --- eager code


def test_eager_tape() -> None:
    with (
        ms.patched(),
        pytest.raises(
            errors.EagerExecutionError, match=r"GradientTape\.gradient.*@tf\.function.*unpatch"
        ),
    ):
        taped(data())


def test_eager_gradients() -> None:
    x = data()
    with ms.patched(), pytest.raises(errors.EagerExecutionError, match=r"tf\.gradients"):
        tf.gradients(x, x)


def test_eager_is_plain_where_that_was_asked() -> None:
    plain = taped(data())
    with patching.scoped(Options(), eager_is_error=False):
        np.testing.assert_array_equal(taped(data()), plain)


def through_python(x: tf.Tensor) -> tf.Tensor:
    """Return gradients through a Python function, which TensorFlow differentiates eagerly, and
    which computes gradients itself."""

    def slope_of_square(h: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(h)
            y = tf.square(h)
        return y + 0.0 * tape.gradient(y, h)

    with tf.GradientTape() as tape:
        tape.watch(x)
        h = chain(x)
        h = tf.ensure_shape(tf.py_function(slope_of_square, [h], tf.float32), h.shape)
        loss = tf.reduce_sum(tf.sin(h))
    return tape.gradient(loss, x)


@pytest.mark.parametrize("options", [{}, {"checkpoints": None}])
def test_functions_of_python_differentiate_eagerly(options: dict[str, Any]) -> None:
    plain = tf.function(through_python, autograph=False)(data())
    with ms.patched(**options):
        found = tf.function(through_python, autograph=False)(data())
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_eager_code_of_another_thread_is_left_alone() -> None:
    plain = taped(data())
    with ms.patched(), ThreadPoolExecutor(1) as pool:
        np.testing.assert_array_equal(pool.submit(taped, data()).result(), plain)
        # The patched block asks for gradients as well.
        tf.function(taped, autograph=False)(data())


# --- a block in which nothing is traced


def test_function_that_was_traced_before_is_said() -> None:
    traced = tf.function(taped)
    traced(data())
    with (
        pytest.warns(errors.NothingSavedWarning, match="traced before keeps the graph") as said,
        ms.patched(checkpoints="memory"),
    ):
        traced(data())
    assert len(said) == 1
    assert str(said[0].message).startswith("patched(checkpoints='memory'): no gradients were asked")
    assert said[0].filename == __file__
    assert ms.plans(traced) == ()


@pytest.mark.filterwarnings("error")
def test_block_with_gradients_is_silent() -> None:
    with ms.patched():
        tf.function(taped)(data())
    with ms.patched():
        tf.function(lambda x: ms.gradients(chain(x), x))(data())
    with ms.patched(), patching.scoped(Options(checkpoints="speed")):
        tf.function(taped)(data())
    with pytest.raises(KeyError), ms.patched():
        raise KeyError


@pytest.mark.filterwarnings("error::memsaving_gradients.errors.NothingSavedWarning")
def test_tensorflow_is_restored_where_the_warning_is_an_error() -> None:
    with pytest.raises(errors.NothingSavedWarning), ms.patched():
        pass
    with pytest.raises(errors.PatchError):
        ms.unpatch()
