"""Models of Keras with recurrent layers, trained with their loops replayed: weights are those of
plain training."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.transforms.loops import gradient_hook
from tests.helpers.sampling import slow
from tests.helpers.support import assert_identical
from tests.transforms.test_loops_keras import FEATURES, SEQUENCES, STEPS, UNITS, layer

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")


LABELS = (SEQUENCES.sum((1, 2)) > 0).astype(np.float32)[:, None]


class Watched(keras.Sequential):
    """A model that remembers the graphs in which its training step was traced."""

    graphs = ()

    def train_step(self, data):
        logs = super().train_step(data)
        graph = tf.compat.v1.get_default_graph()
        self.graphs = (*self.graphs, graph)
        return logs

    @property
    def replayed(self):
        """The number of replayed loops in each graph."""
        return [
            sum(gradient_hook.replay_of(op) is not None for op in g.get_operations())
            for g in self.graphs
        ]


def model(units=UNITS, layers=1, optimizer=keras.optimizers.Adam, **options):
    keras.utils.set_random_seed(3)
    recurrent = [
        layer("LSTM", return_sequences=k < layers - 1, name=f"lstm_{k}", **options)
        if units == UNITS
        else keras.layers.LSTM(units, return_sequences=k < layers - 1, use_cudnn=False)
        for k in range(layers)
    ]
    found = Watched([keras.Input((STEPS, FEATURES)), *recurrent, keras.layers.Dense(1)])
    found.compile(optimizer(0.01), "mse", jit_compile=False)
    return found


def fit(made, callbacks=(), epochs=2, batch=4, repeated=4):
    x, y = np.repeat(SEQUENCES, repeated, 0), np.repeat(LABELS, repeated, 0)
    x = x * np.linspace(0.5, 1.5, len(x), dtype=np.float32)[:, None, None]
    made.fit(x, y, batch, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def state(made):
    return [np.asarray(v.value) for v in (*made.variables, *made.optimizer.variables)]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        pytest.param({}, {"loops": "segments"}, marks=pytest.mark.slow),
        pytest.param({}, {"loops": "treeverse"}, marks=pytest.mark.slow),
        ({}, {"checkpoints": "memory"}),
        pytest.param({"layers": 2, "dropout": 0.2}, {"loops": "segments"}, marks=pytest.mark.slow),
        pytest.param({"recurrent_dropout": 0.1}, {"loops": "segments"}, marks=pytest.mark.slow),
    ],
    ids=["segments", "treeverse", "auto", "two with dropout", "recurrent_dropout"],
)
def test_fit(options, asked):
    plain, ours = model(**options), model(**options)
    fit(plain)
    callback = ms.keras.MemorySavingGradients(**asked)
    fit(ours, [callback])
    assert callback.plans and all(plan.replayed for plan in callback.plans)
    assert all(ours.replayed) and not any(plain.replayed)
    assert_identical(state(ours), state(plain), str(asked))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("layers", [1, *slow(2)])
def test_fit_with_a_budget(layers):
    options = {"layers": layers, "units": 12, "optimizer": keras.optimizers.SGD}
    plain, ours = model(**options), model(**options)
    fit(plain, batch=64, repeated=32)
    callback = ms.keras.MemorySavingGradients(budget=0.5, batch_size=64)
    fit(ours, [callback], batch=64, repeated=32)
    assert callback.plans
    for plan in callback.plans:
        assert plan.replayed and plan.allocated <= plan.budget
    assert_identical(state(ours), state(plain), "budget")


@pytest.mark.usefixtures("exact")
def test_fit_is_plain_again_without_the_callback():
    made, twin = (model(optimizer=keras.optimizers.SGD) for _ in range(2))
    callback = ms.keras.MemorySavingGradients(loops="segments")
    fit(made, [callback])
    known = len(made.graphs)
    assert known and all(made.replayed)
    fit(made)
    # Another batch size leads to a new trace.
    fit(made, batch=2)
    assert len(made.graphs) > known + 1
    assert not any(made.replayed[known:])
    fit(twin)
    fit(twin)
    fit(twin, batch=2)
    assert_identical(state(made), state(twin), "with the callback and without it")


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [29, *slow(300)])
def test_many_steps(steps):
    def trained(patched):
        made = model(units=6)
        optimizer = made.optimizer
        optimizer.build(made.trainable_variables)

        @tf.function(autograph=False)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(made(x, training=True) - y))
            grads = tape.gradient(loss, made.trainable_variables)
            optimizer.apply_gradients(zip(grads, made.trainable_variables, strict=True))
            return loss

        losses = []
        with patched:
            for i in range(steps):
                x = tf.constant(SEQUENCES * np.float32(0.5 + (i % 7) / 7))
                losses.append(step(x, tf.constant(LABELS)).numpy())
        return [losses, state(made)], ms.plans(step)

    plain, _ = trained(contextlib.nullcontext())
    found, plans = trained(ms.patched(loops="segments"))
    assert plans[-1].replayed
    assert_identical(found, plain, f"{steps} steps")
    assert plain[0][-1] < plain[0][0]
