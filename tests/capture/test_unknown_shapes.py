"""Plans for an unknown batch are about as good as plans for a known one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from graph_tools.memory.timeline import CHANCE
from tests.helpers.fresh import fresh


@pytest.mark.parametrize("batch", [32, None])
def test_layer_normalization_of_an_unknown_batch(batch):
    layers = [
        (keras.layers.LayerNormalization(), keras.layers.Dense(16, activation="gelu"))
        for _ in range(6)
    ]
    for norm, dense in layers:
        norm.build((batch, 12, 16))
        dense.build((batch, 12, 16))

    @tf.function(input_signature=[tf.TensorSpec([batch, 12, 16])], autograph=False)
    def step(h):
        for norm, dense in layers:
            h = h + dense(norm(h))
        return ms.gradients(tf.reduce_mean(h**2), [dense.kernel.value for _, dense in layers])

    step.get_concrete_function()
    (plan,) = ms.plans(step)
    assert plan.peak < 0.4 * plan.peak_plain
    assert plan.peak_plain < 2_000_000


@pytest.mark.parametrize(
    ("width", "dropout"),
    [
        # All sizes are 64, so that more ops than elsewhere might look equal.
        (64, 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(16, 0.0), (16, 0.1), (64, 0.1)]
        ),
    ],
)
def test_a_transformer_whose_last_batch_is_smaller(width, dropout):
    def plan(images):
        inputs = h = keras.Input([width, width])
        for _ in range(3):
            attended = keras.layers.MultiHeadAttention(2, 8, dropout=dropout)(h, h)
            h = keras.layers.LayerNormalization()(h + attended)
            inner = keras.layers.Dense(2 * width, activation="gelu")(h)
            h = keras.layers.LayerNormalization()(h + keras.layers.Dense(width)(inner))
        model = keras.Model(inputs, keras.layers.Dense(5)(h))
        model.compile("sgd", "mse", jit_compile=False)
        saving = ms.keras.MemorySavingGradients()
        data = np.zeros([images, width, width], "f"), np.zeros([images, width, 5], "f")
        model.fit(*data, batch_size=32, verbose=0, callbacks=[saving])
        return saving.plans[-1]

    known, unknown = plan(64), plan(70)
    # Where grappler does not know which sizes are equal, it combines other factors first.
    assert unknown.peak_plain < 1.2 * known.peak_plain
    assert unknown.peak < 1.2 * known.peak


@pytest.mark.parametrize("kind", ["weights", "examples"])
def test_smaller_batches_take_no_more_than_plain_training_of_the_largest(kind):
    """Gradients of weights are as large for a batch of one. A plan's extra bytes must not outgrow
    its savings."""
    plain, saving = fresh("tests.capture.test_unknown_shapes:measured", kind=kind)
    most = plain[max(plain)] * (1 + CHANCE)
    assert all(peak <= most for peak in saving.values())
    # The executor's order differs from step to step: 0.79 on a quiet machine, 0.801 on a busy one.
    assert kind == "weights" or saving[max(plain)] < 0.85 * plain[max(plain)]


def measured(kind: str) -> tuple[dict[int, int], dict[int, int]]:
    """Return the peaks of steps of several sizes, plain and with a plan for an assumed batch (in a
    fresh process).

    ``kind``: the tensors that take most of the bytes.
    """
    width, depth = {"weights": (512, 12), "examples": (64, 24)}[kind]
    layers = [keras.layers.Dense(width, activation="gelu") for _ in range(depth)]
    model = keras.Sequential([keras.Input([width]), *layers])
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    found: list[dict[int, int]] = []
    for patched in (False, True):

        @tf.function(input_signature=[tf.TensorSpec([None, width])], autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - x) ** 2)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

        if patched:
            with ms.patched():
                step.get_concrete_function()
            assert ms.plans(step)[-1].assumed_batch == 32
        batches = {size: tf.ones([size, width]) for size in (32, 7, 2, 1)}
        found.append(
            {
                size: max(measure_peak(lambda x=x, step=step: step(x), warmup=2, steps=4).peaks)
                for size, x in batches.items()
            }
        )
    return found[0], found[1]
