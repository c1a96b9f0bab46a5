"""Losses that are no means over examples, or that depend on more than their batch: they are exact
in microbatches, too, or a message says that they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import (
    ArgumentError,
    BatchStatisticsWarning,
    HigherOrderError,
    NothingSavedWarning,
)
from tests.helpers.sampling import covering

pytestmark = pytest.mark.filterwarnings(
    f"ignore::{NothingSavedWarning.__module__}.NothingSavedWarning"
)
ROWS, WIDTH = 7, 3


def batch(dtype: str = "float32") -> tuple[tf.Tensor, tf.Tensor]:
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((ROWS, WIDTH)), draw.standard_normal((ROWS, 1))
    return tf.constant(x, dtype), tf.constant(y, dtype)


def both(step: Callable[[Callable[..., Any]], Any], **options: Any) -> tuple[Any, Any]:
    """Return the results of a step with its loss cut into pieces, and with the whole loss."""
    cut = tf.function(lambda: step(lambda loss, **more: ms.microbatch(loss, 2, **more)), **options)
    whole = tf.function(lambda: step(lambda loss, **more: loss))
    return cut(), whole()


def equal(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize(("reads_again", "reduce"), covering([True, False], ["mean", "sum"]))
def test_tensors_that_a_loss_reads_from_outside(reads_again: bool, reduce: str) -> None:
    w = tf.Variable(2.0)
    x, _ = batch()

    def step(cut: Any) -> Any:
        total = tf.reduce_mean if reduce == "mean" else tf.reduce_sum
        with tf.GradientTape() as tape:
            squared = w * w
            mine = w if reads_again else 1.0
            loss = cut(lambda x: total((x * squared * mine) ** 2), reduce=reduce)(x)
        return loss, tape.gradient(loss, w)

    equal(*both(step), 1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_arguments_that_are_not_cut(whole: bool) -> None:
    w = tf.Variable([1.0, 2.0, 3.0] if whole else 2.0)
    x, _ = batch()

    def step(cut: Any) -> Any:
        options = {"whole": ["by"]} if whole else {}
        with tf.GradientTape() as tape:
            loss = cut(lambda x, by: tf.reduce_mean((x * by) ** 2), **options)(x, tf.exp(w))
        return tape.gradient(loss, w)

    equal(*both(step))


def test_gradients_of_tensorflow_1_see_them_too() -> None:
    x, _ = batch()

    def step(cut: Any) -> Any:
        start = tf.constant(3.0) + tf.reduce_sum(x)
        loss = cut(lambda x: tf.reduce_mean(tf.sin(x * start)))(x)
        return tf.gradients(loss, start)

    equal(*both(step), 1e-5)


def test_what_else_a_tape_watches() -> None:
    still, turning = tf.Variable(2.0, trainable=False), tf.Variable(1.0 + 1.0j)
    x, _ = batch()

    def step(cut: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(still)
            loss = cut(
                lambda x: tf.reduce_mean(tf.abs(tf.cast(x * still, turning.dtype) * turning))
            )(x)
        return tape.gradient(loss, [still, turning])

    equal(*both(step))


@pytest.mark.parametrize(
    ("dtype", "buffer"), covering(["bfloat16", "float16"], ["float32", "stochastic"])
)
def test_many_small_addends_of_16_bits_are_not_lost(dtype: str, buffer: str) -> None:
    w = tf.Variable(tf.ones([8], dtype))
    x = tf.ones([4096, 8], dtype)
    loss = ms.microbatch(lambda x: tf.reduce_mean(x * w), 1, buffer=buffer)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss(x)
        return value, tape.gradient(value, w)

    value, slope = step()
    assert value.dtype == slope.dtype == dtype
    off = 2**-8 if buffer == "float32" else 0.2
    np.testing.assert_allclose(tf.cast(value, tf.float32), 1, off)
    np.testing.assert_allclose(tf.cast(slope, tf.float32), 1 / 8, off)
    again = step()
    assert (slope == again[1]).numpy().all()


@pytest.mark.parametrize("buffer", ["float32", "stochastic"])
def test_large_sums_of_16_bits_are_made_some_rows_at_a_time(buffer: str) -> None:
    w = tf.Variable(tf.ones([400, 512], "bfloat16"))
    x = tf.constant(np.random.default_rng(0).random((8, 400, 512)), "bfloat16")

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = ms.microbatch(
                lambda x: tf.reduce_mean(tf.reduce_sum(x * w, [1, 2])), 2, buffer=buffer
            )(x)
        return tape.gradient(loss, w)

    ops = step.get_concrete_function().graph.get_operations()
    shapes = [
        out.shape for op in ops if op.type in ("While", "StatelessWhile") for out in op.outputs
    ]
    assert (
        sum(shape[0] for shape in shapes if shape[1:] == [512]) == 400 and [400, 512] not in shapes
    )
    mean = np.asarray(x).astype(np.float32).mean(0)
    np.testing.assert_allclose(tf.cast(step(), tf.float32), mean, rtol=0.03, atol=0.01)


def test_64_bits_stay_64() -> None:
    w = tf.Variable([[1.0], [2.0], [3.0]], dtype="float64")

    def step(cut: Any) -> Any:
        x, y = batch("float64")
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = cut(lambda x, y: tf.reduce_mean((x @ w - y) ** 2))(x, y)
        return loss, tape.gradient(loss, [w, x])

    equal(*both(step), 1e-14)


@pytest.mark.parametrize("xla", [True, False])
def test_rows_of_batches_that_do_not_divide(xla: bool) -> None:
    table = tf.Variable(tf.random.stateless_normal([5, 2], [0, 1]))
    x, _ = batch()
    ids = tf.constant([0, 1, 1, 4, 2, 0, 3])

    def step(cut: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = cut(
                lambda ids, x: tf.reduce_mean(
                    tf.reduce_sum(tf.gather(table, ids), 1) * tf.reduce_sum(x**2, 1)
                )
            )(ids, x)
        slope, by_x = tape.gradient(loss, [table, x])
        return cut(lambda x: x * 2, reduce="concat")(x), tf.convert_to_tensor(slope), by_x

    equal(*both(step, jit_compile=xla))


def test_numbers_of_examples_that_differ_are_found_as_they_run() -> None:
    w = tf.Variable(2.0)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x) * tf.reduce_mean(y) * w

    for known in (4, None):
        specs = [tf.TensorSpec([None]), tf.TensorSpec([known])]
        step = tf.function(ms.microbatch(loss, 2), input_signature=specs)
        step(tf.ones([4]), tf.ones([4]))
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.ones([10]), tf.ones([4]))


def test_a_loss_beside_other_results_is_differentiated_through_the_loop() -> None:
    w = tf.Variable([[1.0], [2.0], [3.0]])

    def step(cut: Any) -> Any:
        def loss(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.reduce_mean((x @ w - y) ** 2), x @ w

        with tf.GradientTape() as tape:
            value, found = cut(loss, reduce=("mean", "concat"))(*batch())
        return value, found, tape.gradient(value, w)

    with pytest.warns(NothingSavedWarning, match="the differentiated result is not a loss"):
        equal(*both(step), 1e-5)


def test_results_of_a_step_that_applies_gradients_have_none() -> None:
    w = tf.Variable([[1.0], [2.0], [3.0]])
    optimizer = keras.optimizers.SGD()
    optimizer.build([w])

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((x @ w - y) ** 2)
        optimizer.apply(tape.gradient(value, [w]), [w])
        return value

    @tf.function
    def outside() -> Any:
        with tf.GradientTape() as tape:
            value = ms.microbatch(step, 2)(*batch())
        return tape.gradient(value, w)

    with pytest.raises(HigherOrderError, match="applies gradients itself"):
        outside()


def test_two_optimizers_whose_gradients_are_there_before_are_no_problem() -> None:
    def trained(cut: bool) -> Any:
        a, b = tf.Variable([[1.0], [2.0], [3.0]]), tf.Variable(0.5)
        first, second = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1)
        first.build([a])
        second.build([b])

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = tf.reduce_mean((x @ a + b - y) ** 2)
            to_a, to_b = tape.gradient(value, [a, b])
            first.apply([to_a], [a])
            second.apply([to_b], [b])
            return value

        function = tf.function(ms.microbatch(step, 2) if cut else step)
        return [function(*batch()) for _ in range(3)], a, b

    equal(trained(True), trained(False), 1e-5)


# ---------------------------------------------------------------- Keras


def sequences(loss: Any, masked: bool = True, outputs: int = 1, xla: bool = False) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input([6], dtype="int32")
    x = keras.layers.Embedding(11, 8, mask_zero=masked)(inputs)
    given = [
        keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1), name=f"out{k}")(x)
        for k in range(outputs)
    ]
    model = keras.Model(inputs, given if outputs > 1 else given[0])
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=xla)
    return model


def fitted(model: keras.Model, *callbacks: Any, weights: bool = False) -> list[Any]:
    draw = np.random.default_rng(1)
    x = draw.integers(1, 11, (12, 6)) * (np.arange(6) < draw.integers(1, 7, (12, 1)))
    y = draw.standard_normal((12, 6, 1))
    model.fit(
        x,
        [y] * len(model.outputs) if len(model.outputs) > 1 else y,
        5,
        2,
        sample_weight=draw.random((12, 6)) if weights else None,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
    )
    return [*model.get_weights()]


@pytest.mark.parametrize(
    ("reduction", "masked", "weights"),
    covering(
        ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"],
        [True, False],
        [True, False],
        pairs=False,
    ),
)
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_reduction_of_a_loss(reduction: str, masked: bool, weights: bool, xla: bool) -> None:
    def trained(*callbacks: Any) -> list[Any]:
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return fitted(sequences(loss, masked, xla=xla), *callbacks, weights=weights)

    equal(trained(ms.keras.MemorySavingGradients(microbatch=2)), trained(), 2e-6)


def test_several_losses_with_masks_are_said() -> None:
    with pytest.warns(BatchStatisticsWarning, match="are means weighted by a mask"):
        fitted(sequences("mse", outputs=2), ms.keras.MemorySavingGradients(microbatch=2))


def test_masked_losses_of_functions_are_said() -> None:
    model = sequences("mse")
    loss = keras.losses.MeanSquaredError()
    step = tf.function(ms.microbatch(lambda x, y: loss(y, model(x)), 2))
    with pytest.warns(BatchStatisticsWarning, match="are means weighted by a mask"):
        step(tf.constant([[1, 2, 3, 0, 0, 0]] * 5), tf.zeros([5, 6, 1]))


def test_the_callback_says_what_sums_are_made_in() -> None:
    with pytest.raises(ArgumentError, match="buffer='16'"):
        ms.keras.MemorySavingGradients(microbatch=2, buffer="16")
    with pytest.raises(ArgumentError, match="give microbatch="):
        ms.keras.MemorySavingGradients(buffer="stochastic")
    saving = ms.keras.MemorySavingGradients(microbatch=2, buffer="stochastic")
    found = fitted(sequences("mse", xla=True), saving)
    equal(found, fitted(sequences("mse")), 2e-6)
