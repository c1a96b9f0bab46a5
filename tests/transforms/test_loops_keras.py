"""Keras' recurrent layers with their loops replayed: gradients are TensorFlow's own."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.transforms.loops import gradient_hook
from tests.helpers.sampling import covering, one_of, slow
from tests.helpers.support import assert_identical, numbers

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

WAYS = ("segments", "treeverse")
BATCH, STEPS, FEATURES, UNITS = 4, 24, 5, 8
SEQUENCES = numbers("sequences", BATCH, STEPS, FEATURES)
#: Layers become loops without the kernels of oneDNN, cuDNN and others for whole sequences.
LOOP = {"use_cudnn": False}


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    keras.config.set_dtype_policy("float32")


class Noisy(keras.layers.Layer):
    """A cell with dropout inside, by a layer or by numbers drawn with a seed of its own."""

    def __init__(self, units, by_layer, **options):
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units
        self.seed = keras.random.SeedGenerator(11)
        self.drop = keras.layers.Dropout(0.3, seed=12) if by_layer else None

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, self.units), name="recurrent")
        super().build(shape)

    def call(self, inputs, states, training=False):
        (h,) = states
        h = keras.ops.tanh(inputs @ self.kernel + h @ self.recurrent)
        if self.drop is not None:
            h = self.drop(h, training=training)
        elif training:
            h = h * keras.random.uniform(keras.ops.shape(h), 0.5, 1.5, seed=self.seed)
        return h, [h]


class Residual(keras.layers.Layer):
    """A cell with two states of different sizes; one of them reads the other through a branch."""

    state_size = (UNITS, 3)
    output_size = UNITS

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1] + UNITS + 3, UNITS + 3), name="kernel")
        super().build(shape)

    def call(self, inputs, states, training=False):
        h, gate = states
        both = keras.ops.tanh(keras.ops.concatenate([inputs, h, gate], -1) @ self.kernel)
        new, gate = keras.ops.split(both, [UNITS], -1)
        new = tf.cond(tf.reduce_sum(gate) > 0, lambda: new + h, lambda: new - 0.5 * h)
        return new, [new, gate]


class Deep(keras.layers.Layer):
    """A cell of layers; grappler fuses each one's product, bias and activation into one kernel."""

    state_size = output_size = UNITS

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(12, activation="tanh")
        self.gate = keras.layers.Dense(UNITS, activation="sigmoid")
        self.last = keras.layers.Dense(UNITS, activation="tanh")

    def build(self, shape):
        self.hidden.build((None, shape[-1] + UNITS))
        self.gate.build((None, 12))
        self.last.build((None, 12))
        super().build(shape)

    def call(self, inputs, states, training=False):
        (h,) = states
        z = self.hidden(keras.ops.concatenate([inputs, h], -1))
        h = self.gate(z) * self.last(z) + 0.1 * h
        return h, [h]


def cells(kind):
    layer = getattr(keras.layers, f"{kind}Cell")
    return layer(UNITS)


def stacked():
    return keras.layers.StackedRNNCells([cells("LSTM"), cells("GRU"), cells("SimpleRNN")])


def layer(kind, **options):
    if kind in ("LSTM", "GRU"):
        options = LOOP | options
    return getattr(keras.layers, kind)(UNITS, **options)


def around(cell, **options):
    return keras.layers.RNN(cell, **options)


#: By name, a function that makes the layer.
LAYERS = {
    "RNN of StackedRNNCells": lambda: around(stacked()),
    "RNN of a cell of layers": lambda: around(Deep(), return_sequences=True),
    "RNN of a cell with two states": lambda: around(Residual(), return_sequences=True),
    "backwards": lambda: layer("LSTM", go_backwards=True, return_sequences=True),
    "GRU that resets before": lambda: layer("GRU", reset_after=False),
    "penalties": lambda: layer("LSTM", kernel_regularizer="l2", recurrent_constraint="unit_norm"),
}
#: The layers that other tests use.
ELSEWHERE = {
    **{kind: lambda kind=kind: layer(kind) for kind in ("LSTM", "GRU", "SimpleRNN")},
    "Bidirectional": lambda: keras.layers.Bidirectional(layer("LSTM", return_sequences=True)),
}
#: Layers that are similar to the above, or to parts of the models below.
OTHER_LAYERS = {
    **{
        f"RNN of {kind}Cell": lambda kind=kind: around(cells(kind))
        for kind in ("LSTM", "GRU", "SimpleRNN")
    },
    "RNN of a list of cells": lambda: around([cells("LSTM"), cells("LSTM")], return_sequences=True),
    "sequences": lambda: layer("LSTM", return_sequences=True),
    "state": lambda: layer("LSTM", return_state=True),
    "sequences and state": lambda: layer("GRU", return_sequences=True, return_state=True),
    "Bidirectional, summed": lambda: keras.layers.Bidirectional(layer("GRU"), merge_mode="sum"),
    "relu, no bias": lambda: layer("SimpleRNN", activation="relu", use_bias=False),
}
DRAWING = {
    "both": lambda: layer("LSTM", dropout=0.2, recurrent_dropout=0.3, seed=3),
    "a Dropout layer in the cell": lambda: around(Noisy(UNITS, True), return_sequences=True),
    "keras.random in the cell": lambda: around(Noisy(UNITS, False), return_sequences=True),
}
OTHER_DRAWING = {
    "dropout": lambda: layer("LSTM", dropout=0.3, seed=3),
    "recurrent_dropout": lambda: layer("GRU", recurrent_dropout=0.3, seed=3),
    "both in a list of cells": lambda: around(
        [keras.layers.LSTMCell(UNITS, dropout=0.2, recurrent_dropout=0.3, seed=k) for k in range(2)]
    ),
}


def gradients_of(make, calls=1, inputs=SEQUENCES, specs=None, patched=None, **given):
    """Return the results, gradients and state of several calls of a layer (or model), the plans,
    and the function."""
    keras.utils.set_random_seed(1)
    made = make()
    arrays = tf.nest.map_structure(tf.constant, inputs)
    # Variables that a call creates, such as states, must exist before a function is traced.
    made(arrays, training=True, **given)
    keras.utils.set_random_seed(2)

    def call(x):
        with tf.GradientTape() as tape:
            tape.watch([t for t in tf.nest.flatten(x) if t.dtype.is_floating])
            out = made(x, training=True, **given)
            total = sum(tf.reduce_sum(tf.cast(o, tf.float32) ** 2) for o in tf.nest.flatten(out))
            total += tf.add_n(made.losses) if made.losses else 0.0
        xs = [t for t in tf.nest.flatten(x) if t.dtype.is_floating]
        weights = [v.value for v in made.trainable_variables]
        return out, tape.gradient(total, [*xs, *weights])

    function = tf.function(
        call, autograph=False, input_signature=None if specs is None else [specs]
    )
    with contextlib.nullcontext() if patched is None else patched:
        found = [as_arrays(function(arrays)) for _ in range(calls)]
    states = [np.asarray(v.value) for v in made.variables]
    return [found, states], ms.plans(function), function


def as_arrays(results):
    # NumPy has no bfloat16 of its own that it could compare.
    def array(t):
        t = tf.convert_to_tensor(t)
        return (tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t).numpy()

    return tf.nest.map_structure(array, results)


def assert_same(make, loops=1, ways=("segments",), **options):
    """Check for the same bits with ``loops`` loops replayed."""
    plain, _, _ = gradients_of(make, **options)
    for way in ways:
        found, plans, _ = gradients_of(make, patched=ms.patched(loops=way), **options)
        assert_identical(found, plain, way)
        replayed = [len(plan.replayed) for plan in plans]
        assert replayed == [loops], f"{way}: {replayed} loops replayed"


def replays(function):
    """Return the loops of a function's graphs that are replayed."""
    graphs = [concrete.graph for concrete in function._list_all_concrete_functions()]
    return [op for g in graphs for op in g.get_operations() if gradient_hook.replay_of(op)]


# --- layers


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", [*LAYERS, *slow(*ELSEWHERE, *OTHER_LAYERS)])
def test_layers(name):
    assert_same(
        (LAYERS | ELSEWHERE | OTHER_LAYERS)[name], loops=2 if "Bidirectional" in name else 1
    )


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["LSTM", *slow("RNN of a cell with two states", "Bidirectional")])
def test_layers_in_several_levels(name):
    loops = 2 if "Bidirectional" in name else 1
    assert_same((LAYERS | ELSEWHERE)[name], loops=loops, ways=["treeverse"])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", [*DRAWING, *slow(*OTHER_DRAWING)])
def test_masks_are_drawn_once(name):
    # The states of the generators are compared, too, and two calls draw different masks.
    assert_same((DRAWING | OTHER_DRAWING)[name], calls=2)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dimensions", [1, *slow(2)])
def test_convolutional_layers(dimensions):
    shape = (2, 24, 6, 3) if dimensions == 1 else (2, 24, 5, 5, 3)
    convolution = getattr(keras.layers, f"ConvLSTM{dimensions}D")
    make = functools.partial(convolution, 4, 3, padding="same", return_sequences=True)
    assert_same(make, inputs=numbers("images", *shape))


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_convolutional_layer_with_dropout():
    make = functools.partial(keras.layers.ConvLSTM1D, 4, 3, dropout=0.2, recurrent_dropout=0.2)
    assert_same(make, inputs=numbers("images", 2, 24, 6, 3))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["GRU", *slow("LSTM")])
def test_given_initial_states(kind):
    count = 2 if kind == "LSTM" else 1
    states = [tf.constant(numbers(f"state {i}", BATCH, UNITS)) for i in range(count)]
    make = functools.partial(layer, kind, return_sequences=True, return_state=True)
    assert_same(make, initial_state=states)


@pytest.mark.usefixtures("exact")
def test_the_state_of_one_layer_begins_the_next_one():
    def make():
        x = keras.Input((STEPS, FEATURES))
        _, h, c = layer("LSTM", return_state=True)(x)
        y = layer("LSTM", return_sequences=True)(x, initial_state=[h, c])
        return keras.Model(x, y)

    assert_same(make, loops=2)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["LSTM", *slow("GRU", "SimpleRNN")])
def test_states_carried_over(kind):
    assert_same(functools.partial(layer, kind, stateful=True), calls=3)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_two_layers_on_top_of_one_another():
    def make():
        return keras.Sequential(
            [
                keras.Input((STEPS, FEATURES)),
                layer("LSTM", return_sequences=True),
                layer("LSTM"),
                keras.layers.Dense(3),
            ]
        )

    assert_same(make, loops=2)


@pytest.mark.usefixtures("exact")
def test_one_layer_used_twice():
    def make():
        x = keras.Input((STEPS, UNITS))
        shared = layer("GRU", return_sequences=True)
        return keras.Model(x, shared(shared(x)))

    assert_same(make, loops=2, inputs=numbers("wide", BATCH, STEPS, UNITS))


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_layer_applied_at_each_step():
    def make():
        x = keras.Input((STEPS, FEATURES))
        h = layer("LSTM", return_sequences=True)(x)
        return keras.Model(x, keras.layers.TimeDistributed(keras.layers.Dense(3))(h))

    assert_same(make)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_an_encoder_and_a_decoder_with_attention():
    def make():
        x = keras.Input((STEPS, FEATURES))
        keys, h, c = layer("LSTM", return_sequences=True, return_state=True)(x)
        queries = layer("LSTM", return_sequences=True)(x, initial_state=[h, c])
        return keras.Model(x, keras.layers.Attention()([queries, keys]))

    assert_same(make, loops=2)


@pytest.mark.usefixtures("exact")
@pytest.mark.sampled
def test_time_first():
    """Test `keras.backend.rnn` as layers call it, but with the time axis in front."""
    w = tf.Variable(numbers("w", UNITS, UNITS, scale=0.3))
    x = tf.constant(numbers("first", STEPS, BATCH, UNITS))

    def found(patched):
        @tf.function(autograph=False)
        def step(x):
            def cell(e, states):
                h = tf.tanh(e + tf.matmul(states[0], w))
                return h, [h]

            with tf.GradientTape() as tape:
                tape.watch(x)
                start = [tf.zeros([BATCH, UNITS])]
                last, all_, _ = keras.src.backend.rnn(cell, x, start, time_major=True)
                total = tf.reduce_sum(last) + tf.reduce_sum(tf.square(all_))
            return [all_, *tape.gradient(total, [x, w])]

        with patched:
            return [t.numpy() for t in step(x)], ms.plans(step)

    plain, _ = found(contextlib.nullcontext())
    for way in one_of(WAYS):
        ours, plans = found(ms.patched(loops=way))
        assert_identical(ours, plain, way)
        assert plans[-1].replayed


# --- masks


def padded(length=STEPS):
    """Return sequences of several lengths, padded with zeros."""
    found = SEQUENCES[:, :length].copy()
    for row, end in enumerate([length, length - 7, 3, 1]):
        found[row, end:] = 0.0
    return found


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("kind", "zeros"), covering(["LSTM", "GRU", "SimpleRNN"], [False, True]))
def test_masked_sequences(kind, zeros):
    def make():
        x = keras.Input((STEPS, FEATURES))
        h = keras.layers.Masking()(x)
        options = {"return_sequences": True, "zero_output_for_mask": True} if zeros else {}
        return keras.Model(x, layer(kind, **options)(h))

    assert_same(make, inputs=padded())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("more", [False, *slow(True)])
def test_embedded_tokens_with_a_mask(more):
    tokens = np.random.default_rng(0).integers(1, 20, (BATCH, STEPS)).astype(np.int32)
    tokens[1, 9:] = tokens[2, 2:] = 0

    def make():
        x = keras.Input((STEPS,), dtype="int32")
        h = keras.layers.Embedding(20, FEATURES, mask_zero=True)(x)
        h = keras.layers.Bidirectional(layer("LSTM", return_sequences=True))(h)
        return keras.Model(x, layer("GRU")(h) if more else h)

    assert_same(make, loops=2 + more, inputs=tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_mask_that_is_given_and_dropout():
    mask = tf.sequence_mask([STEPS, 11, 2, 1], STEPS)
    make = functools.partial(layer, "LSTM", dropout=0.2, recurrent_dropout=0.2, seed=4)
    assert_same(make, mask=mask, calls=2)


# --- shapes and dtypes


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("LSTM", "both"),
        pytest.param("masked", "batch", marks=pytest.mark.slow),
        pytest.param("LSTM", "batch", marks=pytest.mark.slow),
        pytest.param("LSTM", "steps", marks=pytest.mark.slow),
        pytest.param("Bidirectional", "batch", marks=pytest.mark.slow),
    ],
)
def test_unknown_sizes(name, shape):
    batch = None if shape != "steps" else BATCH
    steps = None if shape != "batch" else STEPS

    def make():
        if name == "Bidirectional":
            return ELSEWHERE[name]()
        if name == "masked":
            x = keras.Input((STEPS, FEATURES))
            return keras.Model(x, layer("LSTM")(keras.layers.Masking()(x)))
        return layer(name, return_sequences=True)

    spec = tf.TensorSpec([batch, steps, FEATURES])
    assert_same(make, specs=spec, inputs=padded(), loops=1 + (name == "Bidirectional"))


@pytest.mark.usefixtures("exact")
@pytest.mark.sampled
def test_one_function_for_sequences_of_several_lengths():
    def found(patched):
        keras.utils.set_random_seed(1)
        made = layer("LSTM")
        made(SEQUENCES)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None, FEATURES])])
        def step(x):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(made(x) ** 2)
            return tape.gradient(total, [v.value for v in made.trainable_variables])

        with patched:
            lengths = [1, 2, 3, 7, 16, STEPS]
            return [as_arrays(step(SEQUENCES[:, :n])) for n in lengths], ms.plans(step)

    plain, _ = found(contextlib.nullcontext())
    for way in one_of(WAYS):
        ours, plans = found(ms.patched(loops=way))
        assert_identical(ours, plain, way)
        assert plans[-1].replayed


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("LSTM", "mixed_bfloat16"),
        ("GRU", "float64"),
        pytest.param("GRU", "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param("LSTM", "mixed_float16", marks=pytest.mark.slow),
    ],
)
def test_dtypes(kind, policy):
    make = functools.partial(layer, kind, return_sequences=True, dtype=policy)
    inputs = SEQUENCES.astype(np.float64) if policy == "float64" else SEQUENCES
    assert_same(make, inputs=inputs)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("steps", [1, *slow(2, 3)])
def test_sequences_too_short_to_gain_anything(steps):
    inputs = SEQUENCES[:, :steps]
    plain, _, _ = gradients_of(ELSEWHERE["LSTM"], inputs=inputs)
    found, _, _ = gradients_of(
        ELSEWHERE["LSTM"], inputs=inputs, patched=ms.patched(loops="segments")
    )
    assert_identical(found, plain, f"{steps} steps")


@pytest.mark.usefixtures("exact")
def test_an_unrolled_layer_is_planned_as_a_graph():
    make = functools.partial(layer, "LSTM", unroll=True)
    plain, _, _ = gradients_of(make)
    patched = ms.patched(checkpoints="memory", loops="segments")
    found, (plan,), _ = gradients_of(make, patched=patched)
    assert_identical(found, plain, "unrolled")
    assert plan.clones and not plan.replayed


@pytest.mark.usefixtures("exact")
def test_kept_loops():
    plain, _, _ = gradients_of(ELSEWHERE["LSTM"])
    patched = ms.patched(checkpoints="memory", loops="keep")
    found, plans, function = gradients_of(ELSEWHERE["LSTM"], patched=patched)
    assert_identical(found, plain, "kept")
    assert not any(plan.replayed for plan in plans)
    assert not replays(function)


@pytest.mark.usefixtures("exact")
def test_a_second_layer_inside_of_a_step():
    """The body of a loop contains a loop."""

    class Outer(keras.layers.Layer):
        state_size = output_size = UNITS

        def __init__(self):
            super().__init__()
            self.inner = layer("SimpleRNN")

        def build(self, shape):
            self.inner.build((None, FEATURES, UNITS))
            super().build(shape)

        def call(self, inputs, states, training=False):
            rows = keras.ops.expand_dims(inputs, -1) + keras.ops.expand_dims(states[0], 1)
            h = self.inner(rows)
            return h, [h]

    assert_same(lambda: around(Outer(), return_sequences=True))
