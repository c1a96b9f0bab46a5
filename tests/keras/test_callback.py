"""The Keras callback: training is the same, memory is saved, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.keras_models import (
    WIDTH,
    WithGradients,
    WithTape,
    assert_trains_alike,
    compiled,
    data,
    fit,
)

MemorySavingGradients = ms.keras.MemorySavingGradients
errors = ms.errors


@pytest.fixture(autouse=True)
def _float32_afterwards() -> Any:
    yield
    keras.config.set_dtype_policy("float32")


# --- training is the same


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", [keras.Model, WithTape, WithGradients])
def test_bit_identical(kind: type[keras.Model]) -> None:
    assert_trains_alike(lambda: compiled(kind))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1), id="clipped"),
        pytest.param(
            lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), id="accumulated"
        ),
        # With the policy "mixed_float16", Keras wraps each optimizer in one.
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
            id="loss scaled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bit_identical_optimizers(optimizer: Callable[[], Any]) -> None:
    assert_trains_alike(lambda: compiled(optimizer=optimizer()))


# Keras 3.3 warns if batches are no multiple of the steps, with and without a callback.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_bit_identical_steps_per_execution(steps: int) -> None:
    assert_trains_alike(lambda: compiled(steps_per_execution=steps))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "policy", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_bit_identical_mixed_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    assert_trains_alike(compiled)


@pytest.mark.usefixtures("exact")
def test_bit_identical_fusable_activation() -> None:
    # Grappler fuses MatMul, BiasAdd and Tanh into one kernel if no other op reads the values
    # between.
    assert_trains_alike(lambda: compiled(activation="tanh"))


@pytest.mark.usefixtures("exact")
def test_bit_identical_smaller_last_batch() -> None:
    plans = assert_trains_alike(compiled, batch_size=24)
    assert plans


def test_under_xla() -> None:
    (plan,) = assert_trains_alike(lambda: compiled(jit_compile=True), tolerance=1e-4)
    assert plan.gating == "data"


def test_jit_compile_auto() -> None:
    plans = assert_trains_alike(lambda: compiled(jit_compile="auto"), tolerance=1e-4)
    expected = "data" if compiled(jit_compile="auto").jit_compile else "control"
    assert {plan.gating for plan in plans} == {expected}


# --- a model trained before, and afterwards


@dataclass
class Trained:
    """A model that was trained without the callback and then with it."""

    model: keras.Model
    callback: Any
    function: Any
    attributes: set[str]


@pytest.fixture(scope="module")
def trained() -> Trained:
    model = compiled()
    fit(model)
    function, attributes = model.train_function, set(vars(model))
    callback = MemorySavingGradients()
    fit(model, callback)
    return Trained(model, callback, function, attributes)


def test_model_trained_before(trained: Trained) -> None:
    assert trained.callback.plans


def test_training_function_is_given_back(trained: Trained) -> None:
    assert trained.model.train_function is trained.function


def test_model_has_no_attributes_of_ours(trained: Trained) -> None:
    assert set(vars(trained.model)) == trained.attributes


def test_plain_again_afterwards() -> None:
    model = compiled()
    callback = MemorySavingGradients()
    fit(model, callback)
    known = len(callback.plans)
    fit(model)
    x, y = data()
    model.train_on_batch(x, y)
    assert len(callback.plans) == known
    assert not tf.GradientTape.gradient.__module__.startswith("memsaving")


class Fails(keras.callbacks.Callback):
    """A callback that raises in the middle of training."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.where == "begin":
            raise KeyError(self.where)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.where == "end":
            raise KeyError(self.where)


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("begin", True),
        pytest.param("begin", False, marks=pytest.mark.slow),
        pytest.param("end", True, marks=pytest.mark.slow),
        pytest.param("end", False, marks=pytest.mark.slow),
    ],
)
def test_plain_again_after_an_error_in_another_callback(where: str, first: bool) -> None:
    model = compiled()
    ours, fails = MemorySavingGradients(), Fails(where)
    x, y = data()
    with pytest.raises(KeyError, match=where):
        model.fit(
            x, y, batch_size=16, verbose=0, callbacks=[fails, ours] if first else [ours, fails]
        )
    model.fit(x, y, batch_size=16, verbose=0)
    known = len(ours.plans)
    # Another shape leads to a new trace.
    model.fit(x[:10], y[:10], batch_size=5, verbose=0)
    assert len(ours.plans) == known


def test_plain_again_after_an_error_in_the_step() -> None:
    class Breaks(keras.Model):
        broken = True

        def train_step(self, batch: Any) -> Any:
            logs = super().train_step(batch)
            if self.broken:
                raise KeyError("broken")
            return logs

    model = compiled(Breaks)
    callback = MemorySavingGradients()
    with pytest.raises(KeyError, match="broken"):
        fit(model, callback)
    model.broken = False
    known = len(callback.plans)
    fit(model)
    assert len(callback.plans) == known


def test_no_retracing_when_the_callback_is_used_again() -> None:
    traces = []

    class Traced(keras.Model):
        def train_step(self, batch: Any) -> Any:
            traces.append(1)
            return super().train_step(batch)

    model = compiled(Traced)
    callback = MemorySavingGradients()
    fit(model, callback)
    once, plans = len(traces), callback.plans
    fit(model, callback)
    assert len(traces) == once
    assert callback.plans == plans


def test_traced_anew_after_compile() -> None:
    model = compiled()
    callback = MemorySavingGradients(checkpoints="memory")
    fit(model, callback)
    first = callback.plans
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse", jit_compile=False)
    fit(model, callback)
    assert callback.plans
    assert all(plan not in first for plan in callback.plans)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # h5py's
def test_saving_and_loading_while_training(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = compiled()
    saver = keras.callbacks.ModelCheckpoint(str(path))
    fit(model, MemorySavingGradients(), others=[saver])
    loaded = keras.models.load_model(path)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    fit(loaded)


# --- checkpoints


def test_layer_names() -> None:
    callback = MemorySavingGradients(checkpoints=["drop_1", "drop_3"])
    fit(compiled(), callback)
    (plan,) = callback.plans
    assert plan.mode == "named"
    assert all("/drop_1_1/" in name or "/drop_3_1/" in name for name in plan.checkpoints)


def test_layer_pattern() -> None:
    callback = MemorySavingGradients(checkpoints=["drop_*"])
    fit(compiled(), callback)
    assert callback.plans


def test_default_layer_names_mean_their_own_layer() -> None:
    # Keras puts layer "dense" into scope "dense_1" and layer "dense_1" into "dense_1_2".
    keras.backend.clear_session()
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input([WIDTH]), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    callback = MemorySavingGradients(checkpoints=[layers[1].name, layers[4].name])
    fit(model, callback)
    kept = [name.split("/")[1] for name in callback.plans[-1].checkpoints]
    assert kept == [f"{layers[1].name}_2", f"{layers[4].name}_1"]


def test_marks_in_a_functional_model() -> None:
    keras.utils.set_random_seed(1)
    x = start = keras.Input([WIDTH])
    for k in range(8):
        x = keras.layers.Dense(WIDTH, activation="tanh")(x)
        if k == 4:
            x = ms.checkpoint(x, name="marked")
    model = keras.Model(start, x)
    model.compile("sgd", "mse", jit_compile=False)
    callback = MemorySavingGradients(checkpoints="collection")
    fit(model, callback)
    assert callback.plans[-1].clones > 0


def test_marks_in_a_layer() -> None:
    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(3)]

        def call(self, x: Any) -> Any:
            for layer in self.inner:
                x = layer(x)
            return ms.checkpoint(x, name="block")

    model = keras.Sequential([Block(), Block(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    callback = MemorySavingGradients(checkpoints="collection")
    fit(model, callback)
    assert callback.plans[-1].mode == "collection"


def test_layer_that_is_not_there() -> None:
    model = compiled()
    weights = model.get_weights()
    with pytest.raises(errors.SelectionError, match=r"'drpo_1'.*did you mean 'drop_1'"):
        fit(model, MemorySavingGradients(checkpoints=["drpo_1", "drop_3"]))
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)
    fit(model)


def test_op_of_no_use() -> None:
    class Aside(keras.Model):
        def train_step(self, batch: Any) -> Any:
            tf.exp(batch[0], name="aside")
            return super().train_step(batch)

    with pytest.raises(errors.SelectionError, match=r"'aside'.*is not between"):
        fit(compiled(Aside), MemorySavingGradients(checkpoints=["drop_1", "aside"]))


def test_two_losses_share_a_list() -> None:
    class TwoSteps(keras.Model):
        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            return super().train_step(batch)

    callback = MemorySavingGradients(checkpoints=["drop_1"])
    fit(compiled(TwoSteps), callback)
    assert len(callback.plans) == 2
