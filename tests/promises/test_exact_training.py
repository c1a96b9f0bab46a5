"""Training with memory-saving gradients ends at the weights that plain training ends at."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.keras import MemorySavingGradients
from tests.helpers.sampling import slow
from tests.helpers.support import assert_identical, numbers

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

FEATURES = numbers("features", 48, 12)
LABELS = (FEATURES[:, :3].argmax(1)).astype(np.int32)


def network(seed=0, blocks=2, policy=None, cls=keras.Model):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([12])
    h = keras.layers.Dense(24, dtype=policy)(inputs)
    for _ in range(blocks):
        g = keras.layers.BatchNormalization(dtype=policy)(h)
        g = keras.layers.Dense(24, activation="tanh", dtype=policy)(g)
        g = keras.layers.Dropout(0.2, dtype=policy)(g)
        h = keras.layers.Add(dtype=policy)([h, g])
    return cls(inputs, keras.layers.Dense(3, dtype="float32")(h))


class Stepping(keras.Model):
    """A model with its own training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out) + 1e-3 * tf.add_n(
                [tf.reduce_sum(w**2) for w in self.trainable_variables]
            )
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def compiled(model, optimizer=None, **kwargs):
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
        **kwargs,
    )
    return model


def fit(model, callbacks=(), epochs=1):
    model.fit(
        FEATURES, LABELS, 16, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def state(model):
    """Return weights, moving averages, seeds and moments."""
    return [
        np.asarray(v.value) for v in (*model.variables, *getattr(model.optimizer, "variables", ()))
    ]


CASES = {
    "names of layers": (lambda: compiled(network()), ["add*"]),
    "train_step": (lambda: compiled(network(cls=Stepping)), "memory"),
    "steps_per_execution": (lambda: compiled(network(), steps_per_execution=3), "memory"),
    "accumulation": (
        lambda: compiled(network(), keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
        "memory",
    ),
    "clipping": (
        lambda: compiled(network(), keras.optimizers.SGD(0.1, global_clipnorm=0.1)),
        "memory",
    ),
    "mixed_bfloat16": (lambda: compiled(network(policy="mixed_bfloat16")), "memory"),
}
#: Other tests cover these in more detail.
OTHERS = {
    "plain": (lambda: compiled(network()), "memory"),
    "speed": (lambda: compiled(network()), "speed"),
    "nothing kept": (lambda: compiled(network()), None),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", [*CASES, *slow(*OTHERS)])
def test_fit(case):
    make, checkpoints = (CASES | OTHERS)[case]
    plain = make()
    fit(plain)
    callback = MemorySavingGradients(checkpoints)
    ours = make()
    fit(ours, [callback])
    assert callback.plans and callback.plans[-1].clones
    assert_identical(state(ours), state(plain), case)


@pytest.mark.usefixtures("exact")
def test_before_with_and_after():
    plain, ours = compiled(network()), compiled(network())
    fit(plain)
    fit(plain)
    fit(plain)
    fit(ours)
    callback = MemorySavingGradients("memory")
    fit(ours, [callback])
    used = callback.plans
    assert used
    fit(ours)
    assert callback.plans == used
    assert_identical(state(ours), state(plain), "before, with, after")


@pytest.mark.usefixtures("exact")
def test_saved_and_loaded(tmp_path):
    ours = compiled(network())
    fit(ours, [MemorySavingGradients("memory")])
    # Keras does not save the states of dropout's generators: both models are loaded, and have the
    # same new states.
    loaded = [reloaded(ours, tmp_path / "model.keras") for _ in range(2)]
    for model in loaded:
        assert_identical(model.get_weights(), ours.get_weights(), "saved and loaded")
    fit(loaded[0], [MemorySavingGradients("memory")])
    fit(loaded[1])
    assert_identical(state(loaded[0]), state(loaded[1]), "loaded and trained")


def reloaded(model, path):
    model.save(path)
    keras.utils.set_random_seed(1)
    return keras.models.load_model(path)


def stepper(model, optimizer, mode):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss, grads

    if mode == "plain":
        return step
    function = step

    def saving(x, y):
        with ms.patched(checkpoints=mode):
            return function(x, y)

    saving.function = function
    return saving


def trained(mode, steps, blocks=2):
    model = network(blocks=blocks)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    step = stepper(model, optimizer, mode)
    losses = []
    for i in range(steps):
        part = slice(16 * (i % 3), 16 * (i % 3) + 16)
        losses.append(step(tf.constant(FEATURES[part]), tf.constant(LABELS[part]))[0].numpy())
    if mode != "plain":
        assert ms.plans(step.function)[-1].clones
    return [losses, [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("mode", [None, *slow("memory", "speed")])
def test_moving_averages_after_three_steps(mode):
    plain, ours = trained("plain", 3), trained(mode, 3)
    assert_identical(ours, plain, f"{mode!r}")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [31, *slow(300)])
def test_many_steps(steps):
    plain, ours = trained("plain", steps, 3), trained("memory", steps, 3)
    assert_identical(ours, plain, f"{steps} steps")
    assert plain[0][-1] < plain[0][0]


def test_under_default_settings_no_farther_than_plain_runs_are_apart():
    kernels = [
        tf.Variable(numbers(f"k{i}", 3, 3, 3 if i == 0 else 16, 16, scale=0.1)) for i in range(6)
    ]

    def loss(x):
        h = x
        for k in kernels:
            h = tf.nn.relu(tf.nn.conv2d(h, k, 1, "SAME"))
        return tf.reduce_mean(tf.square(h))

    @tf.function(autograph=False)
    def plain(x):
        return tf.gradients(loss(x), [x, *kernels])

    @tf.function(autograph=False)
    def ours(x):
        return ms.gradients(loss(x), [x, *kernels], checkpoints="memory")

    x = tf.constant(numbers("images", 8, 16, 16, 3))
    runs = [[g.numpy() for g in plain(x)] for _ in range(5)]
    found = [g.numpy() for g in ours(x)]
    assert ms.plans(ours)[-1].clones
    largest = max(np.abs(g).max() for g in runs[0])
    spread = max(np.ptp(np.stack(same), axis=0).max() for same in zip(*runs, strict=True))
    far = max(np.abs(a - b).max() for a, b in zip(found, runs[0], strict=True))
    assert far <= max(1e-6 * largest, 2 * spread)
