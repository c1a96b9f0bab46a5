"""The Keras callback: its options, and what it cannot rewire."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.keras_models import compiled, data, fit

MemorySavingGradients = ms.keras.MemorySavingGradients
errors = ms.errors

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
    """Return the options that reach the engine."""
    from memsaving_gradients.engine import differentiate
    from memsaving_gradients.engine.call import Call

    seen = []
    engine = differentiate.rewire_now

    def spy(call: Call) -> Any:
        seen.append(call.options)
        return engine(call)

    monkeypatch.setattr(differentiate, "rewire_now", spy)
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


# --- cases that cannot be rewired


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
