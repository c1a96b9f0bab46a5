"""Microbatches in ``fit``: the same weights after training, for all optimizers, data and steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, BatchStatisticsWarning, NothingSavedWarning

CLASSES = 5

# Networks this small have little to recompute.
pytestmark = pytest.mark.filterwarnings(
    f"ignore::{NothingSavedWarning.__module__}.NothingSavedWarning"
)

#: Fits without XLA in the fast suite, with and without it otherwise.
XLA = pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])


def callback(**options: Any) -> ms.keras.MemorySavingGradients:
    return ms.keras.MemorySavingGradients(microbatch=8, **options)


def network(norm: Any = None, step: bool = False) -> keras.Model:
    keras.utils.set_random_seed(2)
    inputs = keras.Input([16])
    x = inputs
    for _ in range(2):
        x = keras.layers.Dense(24, activation="gelu")(x)
        x = x if norm is None else norm()(x)
    outputs = keras.layers.Dense(CLASSES, dtype="float32")(x)
    return (WithStep if step else keras.Model)(inputs, outputs)


class WithStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss, "largest": tf.reduce_max(y)}


def trained(
    model: keras.Model,
    saving: Any,
    optimizer: Any = "sgd",
    xla: bool = False,
    rows: int = 48,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Return the history and the weights after three epochs of batches of 24."""
    model.compile(
        optimizer() if callable(optimizer) else optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None if isinstance(model, WithStep) else ["accuracy"],
        jit_compile=xla,
        **options,
    )
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, 16)).astype(np.float32)
    y = draw.integers(0, CLASSES, rows)
    history = model.fit(x, y, 24, 3, verbose=0, shuffle=False, callbacks=[saving] if saving else [])
    return history.history, model.get_weights()


def same(ours: Any, plain: Any, tolerance: float = 2e-6) -> None:
    for name in plain[0]:
        np.testing.assert_allclose(ours[0][name], plain[0][name], rtol=1e-5, err_msg=name)
    for a, b in zip(ours[1], plain[1], strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=pytest.mark.slow),
        "adam",
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            marks=pytest.mark.slow,
        ),
    ],
)
@XLA
def test_weights_and_metrics_are_those_of_whole_batches(optimizer: Any, xla: bool) -> None:
    # The last batch is smaller.
    ours = trained(network(), callback(), optimizer, xla, rows=104)
    same(ours, trained(network(), None, optimizer, xla, rows=104))


# Keras 3.3 warns if batches are no multiple of the steps, with and without a callback.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("options", [{"xla": True}, {"steps_per_execution": 2}])
def test_ways_to_run(options: dict[str, Any]) -> None:
    same(trained(network(), callback(), **options), trained(network(), None, **options))


@XLA
def test_a_step_of_the_users(xla: bool) -> None:
    ours = trained(network(step=True), callback(), xla=xla)
    plain = trained(network(step=True), None, xla=xla)
    del ours[0]["largest"], plain[0]["largest"]
    same(ours, plain)


@XLA
def test_sample_weights(xla: bool) -> None:
    def fitted(saving: Any) -> Any:
        model = network()
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=xla)
        draw = np.random.default_rng(0)
        x, weights = draw.standard_normal((48, 16)), draw.random(48)
        y = draw.integers(0, CLASSES, 48)
        history = model.fit(
            x, y, 24, sample_weight=weights, verbose=0, callbacks=[saving] if saving else []
        )
        return history.history, model.get_weights()

    same(fitted(callback()), fitted(None))


def test_training_without_the_callback_is_plain_again() -> None:
    model = network()
    trained(model, callback())
    assert "train_step" not in vars(model)
    assert model.train_step.__func__ is keras.Model.train_step


@XLA
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_mixed_precision(policy: str, xla: bool) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        ours, plain = (trained(network(), saving, xla=xla) for saving in (callback(), None))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(ours[0]["loss"], plain[0]["loss"], rtol=1e-3)
    for a, b in zip(ours[1], plain[1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_batch_normalization_is_said() -> None:
    with pytest.warns(BatchStatisticsWarning, match="noisy for microbatches of 8.*GroupNorm"):
        trained(network(keras.layers.BatchNormalization), callback())
    with pytest.raises(ArgumentError, match="batch_norm='error': .*statistics of microbatches"):
        trained(network(keras.layers.BatchNormalization), callback(batch_norm="error"))


@XLA
def test_normalization_of_each_example_is_exact(xla: bool) -> None:
    norm = keras.layers.LayerNormalization
    ours = trained(network(norm), callback(batch_norm="error"), xla=xla)
    same(ours, trained(network(norm), None, xla=xla))


@XLA
def test_moving_averages_move_as_far_as_in_one_batch(xla: bool) -> None:
    """Three microbatches have the same rows: the mean is the same in all, and the moving average
    ends at the same value."""

    def moved(saving: Any) -> np.ndarray:
        keras.utils.set_random_seed(2)
        norm = keras.layers.BatchNormalization(momentum=0.8)
        model = keras.Sequential([keras.Input([4]), norm, keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=xla)
        rows = np.tile(np.arange(32.0).reshape(8, 4), [3, 1])
        model.fit(
            rows, rows[:, :1], 24, shuffle=False, verbose=0, callbacks=[saving] if saving else []
        )
        assert norm.momentum == 0.8
        return norm.moving_mean.numpy()

    np.testing.assert_allclose(moved(callback(batch_norm="microbatch")), moved(None), rtol=1e-5)


def test_device_memory_knows_the_buffer() -> None:
    model = network()
    model.build([None, 16])
    weights = sum(w.nbytes for w in model.get_weights())
    with pytest.raises(ArgumentError, match=f"a buffer of gradients {weights:,}"):
        trained(model, callback(device_memory=weights + 1))


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="size=0"):
        ms.keras.MemorySavingGradients(microbatch=0)
    with pytest.raises(ArgumentError, match="batch_norm='error': applies to microbatches only"):
        ms.keras.MemorySavingGradients(batch_norm="error")
