"""`memsaving_gradients.testing` passes if bits are the same, and names the values that differ."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients import testing

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)


def _weights(count: int = 6) -> list[tf.Variable]:
    values = np.random.default_rng(1).normal(size=(count, 16, 16)).astype(np.float32) / 4
    return [tf.Variable(value, name=f"w{k}") for k, value in enumerate(values)]


def _step(weights: list[tf.Variable], **options: Any) -> Any:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.nn.dropout(tf.tanh(h @ w), 0.1)
            loss = tf.reduce_mean(h**2)
        for w, grad in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(grad)
        return loss

    return step


@pytest.mark.parametrize("options", [{}, {"checkpoints": None}, {"checkpoints": "speed"}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_same(options: dict[str, Any], wrapped: bool) -> None:
    weights = _weights()
    before = [w.numpy() for w in weights]
    step = _step(weights)
    testing.assert_same_gradients(tf.function(step) if wrapped else step, tf.constant(X), **options)
    np.testing.assert_array_equal(before, [w.numpy() for w in weights])


def test_gradients_of_as_many_rows_as_are_chosen() -> None:
    table = tf.Variable(np.random.default_rng(2).normal(size=(50, 16)).astype(np.float32))

    def step(x: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            chosen = tf.gather(table, tf.unique(rows)[0])
            kept = tf.boolean_mask(tf.tanh(tf.tanh(x)), x[:, 0] > 0.0)
            loss = tf.reduce_sum(chosen**2) + tf.reduce_sum(tf.sin(kept))
        tape.gradient(loss, [table, x])
        return loss

    testing.assert_same_gradients(step, tf.constant(X), tf.constant([3, 1, 3, 7]))


def test_keras_and_its_optimizer() -> None:
    model = keras.Sequential(
        [
            keras.Input([16]),
            *(keras.layers.Dense(16, "gelu") for _ in range(3)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
        ]
    )
    optimizer = keras.optimizers.Adam()

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    testing.assert_same_gradients(step, tf.constant(X))
    assert int(optimizer.iterations) == 0


def test_explicit_gradients_are_plain_on_one_side() -> None:
    weights = _weights()
    plans = []

    def step(x: tf.Tensor) -> Any:
        h = x
        for w in weights:
            h = tf.tanh(h @ w)
        found = ms.gradients(tf.reduce_sum(h), weights, checkpoints=None)
        plans.append(len(ms.plans(h.graph)))
        return found

    testing.assert_same_gradients(step, tf.constant(X))
    assert plans == [0, 1]


def test_what_differs_is_named() -> None:
    one, other = (tf.Variable(tf.ones([4]), name=name) for name in ("one", "other"))
    traces = []

    def step(x: tf.Tensor) -> None:
        traces.append(None)
        loss = tf.reduce_sum(one * x) + len(traces) * tf.reduce_sum(other * x)
        for variable, grad in zip((one, other), tf.gradients(loss, [one, other]), strict=True):
            variable.assign_sub(grad)

    with pytest.raises(AssertionError) as caught:
        testing.assert_same_gradients(step, tf.constant([0.0, 1.0, 2.0, 3.0]))
    said = str(caught.value)
    far = "3 of 4 elements differ, by at most 3; the largest is"
    assert f"the gradient of 'other': {far} 3" in said
    assert f"after the step, the variable 'other': {far} 2" in said
    assert "'one'" not in said


def test_results_and_state_are_compared() -> None:
    counter = tf.Variable(0.0, name="counter")
    w = tf.Variable(tf.ones([4]), name="w")
    traces = []

    def step(x: tf.Tensor) -> tf.Tensor:
        traces.append(None)
        counter.assign_add(float(len(traces)))
        (grad,) = tf.gradients(tf.reduce_sum(w * x), [w])
        return grad * len(traces)

    with pytest.raises(AssertionError) as caught:
        testing.assert_same_gradients(step, tf.ones([4]))
    said = str(caught.value)
    assert "the result '0': 4 of 4 elements differ" in said
    assert "after the step, the variable 'counter'" in said
    assert "the gradient of" not in said


def test_settings_are_put_back() -> None:
    from tensorflow.python.util import _pywrap_determinism

    before = tf.config.optimizer.get_experimental_options()
    testing.assert_same_gradients(_step(_weights(2)), tf.constant(X))
    assert not _pywrap_determinism.is_enabled()
    after = tf.config.optimizer.get_experimental_options()
    assert after.get("arithmetic_optimization", True) == before.get("arithmetic_optimization", True)


class _Module(tf.Module):
    def __init__(self) -> None:
        self.weights = _weights()

    @tf.function
    def step(self, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            for w in self.weights:
                x = tf.tanh(x @ w)
            loss = tf.reduce_mean(x)
        return loss, tape.gradient(loss, self.weights)


def test_a_method_that_was_never_called() -> None:
    module = _Module()
    testing.assert_same_gradients(module.step, tf.constant(X))
    assert len(module.step(tf.constant(X))[1]) == 6


def _chain(x: tf.Tensor, weights: list[tf.Variable]) -> Any:
    with tf.GradientTape() as tape:
        for w in weights:
            x = tf.tanh(x @ w)
        loss = tf.reduce_mean(x**2)
    return loss, tape.gradient(loss, weights)


@pytest.mark.parametrize("wrapped", [False, True])
def test_autograph_and_strings(wrapped: bool) -> None:
    weights = _weights()

    def step(x: tf.Tensor) -> Any:
        if tf.reduce_sum(x) > 0.0:
            x = x * 2.0
        return _chain(x, weights), tf.constant(["hello", "world"])

    testing.assert_same_gradients(tf.function(step) if wrapped else step, tf.constant(X))


def test_gradients_in_a_branch_are_compared() -> None:
    weights = _weights()
    traces = []

    def inside(x: tf.Tensor) -> Any:
        traces.append(None)
        loss = tf.reduce_sum(x @ weights[0]) * float(len(traces))
        return tf.gradients(loss, weights[0])[0]

    def step(x: tf.Tensor) -> None:
        tf.cond(tf.reduce_sum(x) > -1e9, lambda: inside(x), lambda: tf.zeros([16, 16]))

    with pytest.raises(AssertionError, match="the gradient of 'w0': 256 of 256"):
        testing.assert_same_gradients(step, tf.constant(X))


def test_a_function_that_is_traced_once_is_refused() -> None:
    weights = _weights()
    inner = tf.function(lambda x: _chain(x, weights))
    with pytest.raises(ms.errors.ArgumentError, match="keeps the graph"):
        testing.assert_same_gradients(lambda x: inner(x), tf.constant(X))


def test_state_is_put_back_where_a_step_fails() -> None:
    weights = _weights()
    before = weights[0].numpy()

    def step(x: tf.Tensor) -> Any:
        loss, grads = _chain(x, weights)
        weights[0].assign_sub(grads[0] + 1.0)
        tf.debugging.assert_less(loss, -1.0)
        return loss

    with pytest.raises(tf.errors.InvalidArgumentError):
        testing.assert_same_gradients(step, tf.constant(X))
    np.testing.assert_array_equal(before, weights[0].numpy())


def test_bad_arguments() -> None:
    with pytest.raises(ms.errors.ArgumentError, match="budgets"):
        testing.assert_same_gradients(_step(_weights(2)), tf.constant(X), budgets=1)
    with pytest.raises(ms.errors.ArgumentError, match="asks for no gradients"):
        testing.assert_same_gradients(lambda x: x + 1.0, tf.constant(X))
