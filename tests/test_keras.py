"""The Keras callback: training is the same, memory is saved, and the model is left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms

MemorySavingGradients = ms.keras.MemorySavingGradients
errors = ms.errors

ROWS, WIDTH = 64, 16


@pytest.fixture(autouse=True)
def _float32_afterwards() -> Any:
    yield
    keras.config.set_dtype_policy("float32")


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return (
        numbers.normal(size=(ROWS, WIDTH)).astype("f"),
        numbers.normal(size=(ROWS, 1)).astype("f"),
    )


class WithTape(keras.Model):
    """A training step of the user's."""

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class WithGradients(keras.Model):
    """The same with tf.gradients."""

    def train_step(self, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = [v.value for v in self.trainable_variables]
        self.optimizer.apply(tf.gradients(loss, weights), self.trainable_variables)
        return {"loss": loss}


def build(kind: type[keras.Model] = keras.Model, activation: str = "gelu") -> keras.Model:
    keras.utils.set_random_seed(1)
    x = start = keras.Input([WIDTH])
    for k in range(4):
        x = keras.layers.Dense(WIDTH, activation=activation, name=f"dense_{k}")(x)
        x = keras.layers.BatchNormalization(name=f"norm_{k}")(x)
        x = keras.layers.Dropout(0.2, name=f"drop_{k}")(x)
    return kind(start, keras.layers.Dense(1, name="last")(x))


def compiled(
    kind: type[keras.Model] = keras.Model,
    optimizer: Any = None,
    activation: str = "gelu",
    **options: Any,
) -> keras.Model:
    model = build(kind, activation)
    options = {"jit_compile": False, **options}
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", **options)
    return model


def fit(model: keras.Model, callback: Any = None, **options: Any) -> list[float]:
    x, y = data()
    options = {"batch_size": 16, "epochs": 1, "verbose": 0, "shuffle": False, **options}
    callbacks = options.pop("others", []) + ([callback] if callback else [])
    return model.fit(x, y, callbacks=callbacks, **options).history["loss"]


def assert_trains_alike(
    make: Callable[[], keras.Model], tolerance: float = 0.0, **fitting: Any
) -> Any:
    """The same losses and weights with the callback; its plans."""
    plain, ours = make(), make()
    losses = fit(plain, **fitting)
    callback = MemorySavingGradients(checkpoints="memory")
    found = fit(ours, callback, **fitting)
    np.testing.assert_allclose(found, losses, rtol=tolerance)
    for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert callback.plans
    assert all(plan.clones > 0 for plan in callback.plans)
    return callback.plans


# --- training is the same


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", [keras.Model, WithTape, WithGradients])
def test_bit_identical(kind: type[keras.Model]) -> None:
    assert_trains_alike(lambda: compiled(kind))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
        lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
    ],
    ids=["clipped", "accumulated", "loss scaled"],
)
def test_bit_identical_optimizers(optimizer: Callable[[], Any]) -> None:
    assert_trains_alike(lambda: compiled(optimizer=optimizer()))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [2, 3])
def test_bit_identical_steps_per_execution(steps: int) -> None:
    assert_trains_alike(lambda: compiled(steps_per_execution=steps))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_bit_identical_mixed_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    assert_trains_alike(compiled)


@pytest.mark.usefixtures("exact")
def test_bit_identical_fusable_activation() -> None:
    # Grappler makes one kernel of MatMul, BiasAdd and Tanh where nothing else reads what is between them.
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


def test_model_trained_before() -> None:
    model = compiled()
    fit(model)
    callback = MemorySavingGradients()
    fit(model, callback)
    assert callback.plans


def test_training_function_is_given_back() -> None:
    model = compiled()
    fit(model)
    before = model.train_function
    fit(model, MemorySavingGradients())
    assert model.train_function is before


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
    """Raises in the middle of training."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.where == "begin":
            raise KeyError(self.where)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.where == "end":
            raise KeyError(self.where)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", ["begin", "end"])
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
    # Another shape is traced anew.
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


def test_model_has_no_attributes_of_ours() -> None:
    model = compiled()
    fit(model)
    before = set(vars(model))
    fit(model, MemorySavingGradients())
    assert set(vars(model)) == before


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
    layers = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(8)]
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
            self.inner = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(6)]

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

    with pytest.raises(errors.SelectionError, match=r"'aside'.*does not lie between"):
        fit(compiled(Aside), MemorySavingGradients(checkpoints=["drop_1", "aside"]))


def test_two_losses_share_a_list() -> None:
    class TwoSteps(keras.Model):
        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            return super().train_step(batch)

    callback = MemorySavingGradients(checkpoints=["drop_1"])
    fit(compiled(TwoSteps), callback)
    assert len(callback.plans) == 2


# --- options


def test_verbose_prints_each_plan_once(capsys: pytest.CaptureFixture[str]) -> None:
    fit(compiled(), MemorySavingGradients(verbose=1))
    assert capsys.readouterr().out.count("simulated peak") == 1


@pytest.mark.parametrize(
    ("optimizer", "held"),
    [
        (lambda: keras.optimizers.SGD(0.1), False),
        (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), False),
        (lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0), True),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), True),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), True),
    ],
)
def test_whether_gradients_are_held_is_read_off_the_optimizer(
    optimizer: Callable[[], Any], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _seen(compiled(optimizer=optimizer()), monkeypatch).hold_gradients is held


def test_hold_gradients_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seen(compiled(), monkeypatch, hold_gradients=True).hold_gradients


def test_batch_size_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seen(compiled(), monkeypatch, batch_size=7).batch_size == 7


def _seen(model: keras.Model, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> Any:
    """The options that reach the engine."""
    from memsaving_gradients import saving

    seen = []
    engine = saving.save_memory

    def spy(*args: Any) -> Any:
        seen.append(args[-1])
        return engine(*args)

    monkeypatch.setattr(saving, "save_memory", spy)
    fit(model, MemorySavingGradients(**asked))
    return seen[-1]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"checkpoints": "sped"}, "did you mean 'speed'"),
        ({"hold_gradients": "yes"}, "hold_gradients='yes'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"xla": "auto"}, "xla='auto'"),
    ],
)
def test_bad_options(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        MemorySavingGradients(**asked)


# --- what cannot be rewired


def test_run_eagerly() -> None:
    model = compiled(run_eagerly=True)
    with pytest.raises(errors.EagerExecutionError, match=r"run_eagerly=True.*run_eagerly=False"):
        fit(model, MemorySavingGradients())
    fit(model)


@pytest.mark.filterwarnings("ignore:Even though the:UserWarning")  # tf.data's
def test_functions_run_eagerly() -> None:
    model = compiled()
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(errors.EagerExecutionError, match="run_functions_eagerly"):
            fit(model, MemorySavingGradients())
    finally:
        tf.config.run_functions_eagerly(False)


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(errors.ArgumentError, match=r"'jax'.*KERAS_BACKEND=tensorflow"):
        MemorySavingGradients()


def test_no_gradients_asked_for() -> None:
    class Idle(keras.Model):
        def train_step(self, batch: Any) -> Any:
            return {"loss": tf.reduce_mean(self(batch[0]))}

    with pytest.warns(errors.NothingSavedWarning, match="asked for no gradients"):
        fit(compiled(Idle), MemorySavingGradients())


def test_eager_gradients_of_another_callback_are_left_alone() -> None:
    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            x = tf.constant(data()[0])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.model(x)
            assert tape.gradient(y, x) is not None

    fit(compiled(), MemorySavingGradients(), others=[Looks()])


def test_eager_gradients_in_a_thread_are_left_alone() -> None:
    stop = threading.Event()
    failed: list[Exception] = []

    def work() -> None:
        while not stop.is_set():
            x = tf.constant(2.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x * x
            try:
                tape.gradient(y, x)
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        fit(compiled(), MemorySavingGradients())
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_inside_of_a_patch_of_the_user() -> None:
    callback = MemorySavingGradients(checkpoints="speed")
    with ms.patched(checkpoints="memory"):
        fit(compiled(), callback)
    assert {plan.mode for plan in callback.plans} == {"speed"}
