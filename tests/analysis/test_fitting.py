"""`fit_to`: the choice fits, changes only what it may change, and is the fastest of the
candidates."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, BudgetError
from tests.helpers.fresh import fresh

BATCH, WIDTH = 2048, 64
X, Y = tf.TensorSpec([BATCH, WIDTH]), tf.TensorSpec([BATCH, 4])


def network(normalized: int = 0, optimizer: str = "adam", count: int = 8) -> keras.Model:
    """Return ``count`` dense layers, the first ``normalized`` of them with batch normalization."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input([WIDTH])
    for layer in range(count):
        x = keras.layers.Dense(WIDTH, activation="gelu")(x)
        x = keras.layers.BatchNormalization()(x) if layer < normalized else x
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    model.compile(optimizer, "mse")
    return model


def test_plain_training_that_fits_is_left_alone() -> None:
    fit = ms.fit_to(network(), X, Y, memory="1 GB")
    assert (fit.chosen.technique, fit.settings) == ("plain", {"device_memory": "1 GB"})
    assert len(fit.candidates) == 1


def test_microbatches_are_as_few_as_fit() -> None:
    plain = ms.fit_to(network(count=4), X, Y, memory="1 GB").chosen.device
    fit = ms.fit_to(network(count=4), X, Y, memory=plain // 2)
    assert 2 <= -(-BATCH // fit.settings["microbatch"]) <= 4
    assert fit.chosen.changes == ()
    assert fit.chosen.device <= plain // 2
    assert fit.chosen.extra_time < 0.2
    assert fit.model is not None


@pytest.mark.parametrize(
    ("count", "share"),
    [(1, 1.5), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 2), (8, 5)])],
)
def test_batch_normalization_stays_what_it_is_unless_it_may_change(
    count: int, share: float
) -> None:
    model = network(count, "adam" if count == 8 else "sgd", count)
    plain = ms.fit_to(model, X, Y, memory="1 GB").chosen.device
    with pytest.raises(BudgetError, match=r"may=\['batch_norm'\] would fit") as refused:
        ms.fit_to(model, X, Y, memory=int(plain / share))
    if count == 8:
        exact = ms.fit_to(model, X, Y, memory=plain // 2)
        assert "microbatch" not in exact.settings
        # The least memory that the error names is enough.
        assert ms.fit_to(model, X, Y, memory=refused.value.least).chosen.changes == ()
    fit = ms.fit_to(model, X, Y, memory=int(plain / share), may=["batch_norm"])
    assert fit.settings["batch_norm"] == "microbatch"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lower_precision_only_if_it_may_be(count: int) -> None:
    # Batch normalization computes in float32, whatever the policy says.
    model = network(1, "sgd", count)
    x, y = (tf.TensorSpec([8 * BATCH, width]) for width in (WIDTH, 4))
    plain = ms.fit_to(model, x, y, memory="1 GB").chosen.device
    weights = model.get_weights()
    exact = ms.fit_to(model, x, y, memory=int(plain * 0.9))
    assert exact.model is model
    lowest = min(one.device for one in exact.candidates)
    fit = ms.fit_to(model, x, y, memory=int(lowest * 0.99), may=["precision"])
    assert fit.chosen.changes == ("precision",)
    policies = {layer.dtype_policy.name for layer in fit.model.layers[1:]}
    assert policies == {"mixed_bfloat16", "float32"}
    assert fit.model.layers[-1].dtype_policy.name == "float32"
    for a, b in zip(fit.model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


def trained(memory: int) -> dict[str, Any]:
    """Return the measured peak of a fitted step, and the room for it (in a fresh process)."""
    model = network(optimizer="sgd")
    fit = ms.fit_to(model, X, Y, memory=memory)
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((BATCH, WIDTH)), draw.standard_normal((BATCH, 4))
    data = tf.data.Dataset.from_tensors((x.astype(np.float32), y.astype(np.float32))).cache()

    class Peak(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")
            self.before = tf.config.experimental.get_memory_info("CPU:0")["current"]

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.peak = tf.config.experimental.get_memory_info("CPU:0")["peak"] - self.before

    peak = Peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(
            data.repeat(3), steps_per_epoch=1, epochs=3, verbose=0, callbacks=[fit.callback(), peak]
        )
    room = fit.memory.left + fit.memory.inputs
    return {"peak": peak.peak, "room": room, "technique": fit.chosen.technique}


@pytest.mark.parametrize("memory", [pytest.param(8_000_000, marks=pytest.mark.slow), 5_000_000])
def test_what_is_chosen_fits_as_measured(memory: int) -> None:
    found = fresh("tests.analysis.test_fitting:trained", {"memory": memory})
    assert found["technique"] != "plain"
    # The peak includes the batch and its copy in the cache.
    assert found["peak"] <= found["room"]


def test_the_table_says_what_was_chosen_and_what_else_there_is() -> None:
    fit = ms.fit_to(network(optimizer="sgd"), X, Y, memory="6 MB")
    text = str(fit)
    assert "✗ plain" in text
    assert f"→ {fit.chosen.technique}" in text
    assert text.endswith(")")
    assert f"MemorySavingGradients(microbatch={fit.settings['microbatch']}, budget=" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"may": "encode"}, "may='encode': give a list"),
        ({"may": ["sparsity"]}, "may='sparsity'"),
        ({"memory": "plenty"}, "memory='plenty'"),
        ({"memory": 1000}, "nothing is left for training"),
        ({"batch": [tf.TensorSpec([None, WIDTH]), Y]}, "with its size in all shapes"),
        ({"batch": []}, "with its size in all shapes"),
        (
            {"model": keras.Sequential([keras.layers.Dense(3)])},
            "is not a compiled and built Keras model",
        ),
    ],
)
def test_bad_input(arguments: dict[str, Any], problem: str) -> None:
    given = {"model": network(), "batch": [X, Y], "memory": "1 GB", **arguments}
    with pytest.raises(ArgumentError, match=problem):
        ms.fit_to(given.pop("model"), *given.pop("batch"), **given)


def test_offload_is_looked_at_where_there_is_another_device() -> None:
    with pytest.raises(ArgumentError, match="there is no such device"):
        ms.fit_to(network(8), X, Y, memory="3 MB", offload="/device:GPU:7")
