"""A training step decides which variables it trains: the callback builds the optimizer early only
if these are known."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.keras_models import (
    WIDTH,
    MemorySavingGradients,
    WithTape,
    assert_trains_alike,
    build,
    compiled,
    fit,
)
from tests.helpers.versions import KERAS

pytestmark = pytest.mark.usefixtures("exact")


class Scaled(keras.Model):
    """A model whose step trains a variable in addition to the model's own."""

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) * self.scale - y))
        weights = [*self.trainable_variables, self.scale]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Late(keras.Model):
    """A model whose layers get their variables when they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(WIDTH, "gelu") for _ in range(4)]
        self.end = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return self.end(x)


class Unfreezes(keras.callbacks.Callback):
    """A callback that unfreezes a layer as training begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.get_layer("dense_1").trainable = True


def scaled() -> keras.Model:
    model = build(Scaled)
    model.scale = tf.Variable(2.0)
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    return model


def half_built() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Late()
    # Keras then takes the model to be built, whatever its layers say.
    model.built = True
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def frozen() -> keras.Model:
    model = compiled(optimizer=keras.optimizers.Adam(0.01))
    model.get_layer("dense_1").trainable = False
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            scaled,
            marks=pytest.mark.skipif(
                KERAS < (3, 4), reason="Keras 3.3 trains no variables but its own"
            ),
        ),
        half_built,
    ],
)
def test_variables_that_are_not_known_before_the_step(make: Any) -> None:
    assert_trains_alike(make)


def test_a_layer_that_another_callback_unfreezes() -> None:
    plain, ours = frozen(), frozen()
    fit(plain, others=[Unfreezes()])
    # Our callback begins first.
    fit(ours, others=[MemorySavingGradients(checkpoints="memory"), Unfreezes()])
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", [pytest.param(keras.Model, marks=pytest.mark.slow), WithTape])
def test_the_slots_of_a_device_are_known_in_any_case(kind: type[keras.Model]) -> None:
    model = compiled(kind, keras.optimizers.Adam(0.01))
    # 1 MB less its reserve, the variables, and twice the trainable ones (and a step count).
    with pytest.warns(ms.errors.PlanNote, match="budget of 934,6"):
        fit(model, MemorySavingGradients(device_memory="1 MB"))


def test_a_device_for_layers_without_variables_is_refused() -> None:
    with pytest.raises(ms.errors.ArgumentError, match="on a batch"):
        fit(half_built(), MemorySavingGradients(device_memory="1 MB"))
