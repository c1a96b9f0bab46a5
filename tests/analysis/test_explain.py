"""The predictions of `explain`, compared with TensorFlow's allocator when the step runs."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.allocation_trace import allocation_events, requested_peak
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import ArgumentError, BudgetError
from tests.helpers.fresh import fresh
from tests.helpers.keras_models import convolutions

LAYERS, LENGTH = 16, 2**16


def tower(x, layers: int = LAYERS):
    """Return the output of layers that keep their results for the backward pass."""
    y = x
    for _ in range(layers):
        y = tf.sin(y)
    return y


def slope(x):
    return tf.gradients(tower(x), x)


def network() -> keras.Model:
    return convolutions(32, 5, "adam")


BATCH = np.zeros((16, 32, 32, 3), np.float32), np.zeros((16,), np.int32)


@functools.cache
def explained_slope() -> Any:
    return ms.explain(slope, tf.TensorSpec([LENGTH]))


@functools.cache
def explained_network() -> tuple[keras.Model, Any]:
    model = network()
    return model, ms.explain(model, *BATCH)


def test_the_curve_falls_from_plain_training_to_the_least():
    found = explained_slope()
    budgets = [point.budget for point in found.curve]
    times = [point.extra_time for point in found.curve]
    assert budgets == sorted(set(budgets), reverse=True)
    assert times == sorted(times)
    assert times[0] == 0 and found.allocated_plain <= budgets[0] <= 1.1 * found.allocated_plain
    assert all(point.lower_bound <= point.extra_time for point in found.curve)
    assert found.least == found.curve[-1]
    assert found.least.share < 0.5
    assert found.parts.activations == (LAYERS - 1) * 4 * LENGTH
    assert found.parts.parameters == found.parts.slots == 0


def test_no_plan_for_a_budget_of_the_curve_beats_its_bound():
    tanh = [keras.layers.Dense(128, activation="tanh") for _ in range(12)]
    model = keras.Sequential([keras.Input((128,), batch_size=1024), *tanh, keras.layers.Dense(1)])
    weights = [variable.value for variable in model.trainable_variables]

    def step(x, budget=None):
        loss = tf.reduce_mean(tf.square(model(x, training=True)))
        given = {} if budget is None else {"budget": budget}
        return tf.add_n([tf.norm(grad) for grad in ms.gradients(loss, weights, **given)])

    x = tf.TensorSpec([1024, 128])
    found = ms.explain(step, x)
    assert len(found.curve) > 4
    for point in (found.curve[1], found.curve[len(found.curve) // 2]):
        planned = tf.function(step)
        planned.get_concrete_function(x, point.budget)
        assert ms.plans(planned)[-1].extra_time >= point.lower_bound - 1e-6


@pytest.mark.parametrize("deep", [False, True])
def test_a_budget_of_the_curve_is_kept_at_about_its_time(monkeypatch, deep):
    if deep:
        with monkeypatch.context() as patched:
            patched.setattr(Site, "is_large", True)
            found = ms.explain(slope, tf.TensorSpec([LENGTH]))
    else:
        found = explained_slope()
    for point in (found.curve[len(found.curve) // 2], found.least):

        @tf.function
        def step(x, budget=point.budget):
            return ms.gradients(tower(x), x, budget=budget)

        step.get_concrete_function(tf.TensorSpec([LENGTH]))
        (plan,) = ms.plans(step)
        assert plan.allocated <= plan.budget == point.budget
        assert plan.extra_time <= 1.1 * point.extra_time + 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.BudgetWarning")
def test_the_time_that_packed_masks_take_counts():
    weights = [tf.Variable(tf.eye(256)) for _ in range(8)]

    def step(x, budget=None):
        y = x
        for weight in weights:
            y = tf.nn.dropout(tf.tanh(y @ weight), 0.4)
        loss = tf.reduce_sum(y)
        grads = (
            tf.gradients(loss, weights)
            if budget is None
            else ms.gradients(loss, weights, budget=budget)
        )
        # The step uses each gradient at once: returned gradients need bytes that no point counts.
        return tf.add_n([tf.reduce_sum(grad**2) for grad in grads])

    x = tf.TensorSpec([1024, 256])
    found = ms.explain(step, x)
    for point in (*found.curve[1:-1:3], found.curve[-1]):
        planned = tf.function(step)
        planned.get_concrete_function(x, point.budget)
        (plan,) = ms.plans(planned)
        assert plan.extra_time <= 1.1 * point.extra_time + 0.01
    # With a large budget, recomputing is faster; the least budget needs packed masks.
    assert plan.packed


def test_at_gives_the_fastest_point_within_a_budget():
    found = explained_slope()
    middle = found.curve[2]
    assert found.at(middle.budget) == middle
    assert found.at(middle.budget - 1) == found.curve[3]
    assert found.at(1.0) == found.curve[0]
    with pytest.raises(BudgetError, match=f"least budget is {found.least.budget:,}") as error:
        found.at(100)
    assert error.value.least == found.least.budget


def test_tapes_functions_and_our_own_gradients_are_explained_alike():
    def by_tape(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tower(x)
        return tape.gradient(y, x)

    def by_ours(x):
        return ms.gradients(tower(x), x, budget=0.5)

    spec = tf.TensorSpec([LENGTH])
    plain = explained_slope()
    assert ms.explain(by_tape, spec).curve == plain.curve
    assert ms.explain(tf.function(by_ours), spec).curve == plain.curve


def test_a_function_that_ran_before_is_explained_and_left_as_it_was():
    step = tf.function(slope)
    x = tf.ones([LENGTH])
    before = step(x)[0].numpy()
    traces = step.experimental_get_tracing_count()
    assert ms.explain(step, x).curve
    assert step.experimental_get_tracing_count() == traces
    assert not ms.plans(step)
    np.testing.assert_array_equal(step(x)[0].numpy(), before)


def test_a_model_is_explained_and_trains_as_before():
    plain, (model, found) = network(), explained_network()
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.variables)
    slots = sum(int(np.prod(v.shape)) * 4 for v in model.optimizer.variables)
    # A metric, a learning rate and a counter may be counted on either side.
    assert abs(found.parts.parameters - weights) <= 16
    assert abs(found.parts.slots - slots) <= 16
    assert {layer.name.rpartition("/")[2].partition("_")[0] for layer in found.layers} >= {"conv2d"}
    assert sum(layer.bytes for layer in found.layers) == found.parts.activations
    x = np.random.default_rng(0).random(BATCH[0].shape, np.float32)
    for each in (plain, model):
        each.fit(x, BATCH[1], verbose=0, shuffle=False)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def measured_peak() -> int:
    model = network()
    step = tf.function(lambda x, y: model.train_step((x, y)))
    batch = [tf.constant(part) for part in BATCH]
    for _ in range(2):
        step(*batch)
    peaks = [requested_peak(allocation_events(lambda: step(*batch))) for _ in range(5)]
    # A step takes more if one of its threads is stalled for long.
    return min(peaks)


def test_what_plain_training_takes_is_what_it_takes():
    _, found = explained_network()
    peak = fresh("tests.analysis.test_explain:measured_peak")
    assert found.parts.transient == pytest.approx(peak, rel=0.1)


def test_the_text_names_parts_layers_budgets_and_what_to_do():
    _, found = explained_network()
    text = str(found)
    for word in (
        "parameters",
        "activations",
        "extra time",
        "conv2d",
        f"budget={found.least.budget}",
    ):
        assert word in text
    assert repr(found).startswith("<Explanation")


def test_an_unknown_batch_is_said_or_given():
    def step(x):
        return tf.gradients(tower(x), x)

    spec = tf.TensorSpec([None, 1024])
    assumed = ms.explain(step, spec)
    given = ms.explain(step, spec, batch_size=64)
    assert assumed.assumed_batch == 32 and "assumed" in str(assumed)
    assert given.assumed_batch is None and "assumed" not in str(given)
    assert given.parts.activations == 2 * assumed.parts.activations


@pytest.mark.parametrize(
    ("fn", "args", "what"),
    [
        (3, (), "is not a function"),
        (lambda x: x + 1, (tf.TensorSpec([4]),), "asks for no gradients"),
    ],
)
def test_what_cannot_be_explained_is_said(fn, args, what):
    with pytest.raises(ArgumentError, match=what):
        ms.explain(fn, *args)


def test_models_that_cannot_train_are_named():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ArgumentError, match="call compile first"):
        ms.explain(model, np.zeros((2, 4)))
    with pytest.raises(ArgumentError, match="such as x, y"):
        ms.explain(network())


def test_a_model_of_a_class_of_its_own_is_built_and_trains():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)

        def call(self, x):
            return self.outer(self.inner(x))

    model = Model()
    model.compile("adam", "mse")
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    assert ms.explain(model, x, y).parts.parameters >= 4 * (4 * 8 + 8 + 8 + 1)
    model.fit(x, y, verbose=0)


def test_gradients_of_nothing_are_explained_as_nothing():
    found = ms.explain(lambda x: tf.gradients(x, x), tf.TensorSpec([4]))
    assert found.curve[0].extra_time == 0 and len(found.curve) == 1


def test_an_unknown_option_is_named():
    with pytest.raises(ArgumentError, match="bugdet=1: no such option; options are batch_size"):
        ms.explain(slope, tf.TensorSpec([4]), bugdet=1)


def test_a_step_with_microbatches_is_explained_by_one_of_them():
    weights = [tf.Variable(tf.ones([32, 32])) for _ in range(6)]
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)

    def loss(x):
        for weight in weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_mean(x)

    def step(x):
        with tf.GradientTape() as tape:
            value = ms.microbatch(loss, 512)(x)
        optimizer.apply(tape.gradient(value, weights), weights)

    found = ms.explain(step, tf.TensorSpec([2048, 32]))
    held = 6 * 32 * 32 * 4
    assert (found.parts.parameters, found.sums) == (held, held)
    assert 2 * held <= found.parts.slots <= 2 * held + 64
    # The activations of all layers, or of all but the last one.
    assert found.parts.activations // (512 * 32 * 4) in (5, 6)
    assert "a plain microbatch takes" in str(found)
