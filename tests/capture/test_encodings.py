"""Encoded residuals: their errors, the memory that they save, and the cases that are refused."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.capture.encodings import BLOCK, ENCODINGS
from memsaving_gradients.errors import ArgumentError, PlanError, PlanNote, SelectionError
from memsaving_gradients.keras import MemorySavingGradients
from tests.helpers.sampling import covering, examples
from tests.helpers.support import (
    Inputs,
    asking,
    check_error,
    in_function,
    numbers,
)

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

WIDTH = 128
#: The largest distance between gradients, as a share of the largest gradient. The errors of six
#: encoded layers add up.
FAR = {"bfloat16": 2e-2, "float16": 3e-3, "int8": 3e-2}


def through(encoding, array):
    tensor = tf.constant(array)
    parts = encoding.encode(tensor)
    return encoding.decode(parts, tensor).numpy(), sum(p.numpy().nbytes for p in parts)


@pytest.mark.parametrize("name", ENCODINGS)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.integers(1, 400),
    st.floats(0, 1e4, width=32),
)
@settings(max_examples=examples(40), deadline=None)
def test_no_number_is_further_off_than_promised(name, numbers_, repeat, scale):
    encoding = ENCODINGS[name]
    array = np.array(numbers_ * repeat, np.float32)
    array[0] = scale
    found, kept = through(encoding, array)
    assert found.dtype == array.dtype and found.shape == array.shape
    wrong = np.abs(found - array)
    if name == "int8":
        padded = np.pad(np.abs(array), (0, -len(array) % BLOCK)).reshape(-1, BLOCK)
        most = np.repeat(padded.max(1), BLOCK)[: len(array)]
    else:
        most = np.abs(array)
    tiny = float(tf.as_dtype(name).as_numpy_dtype(6e-8)) if name == "float16" else 1e-37
    assert (wrong <= most * encoding.error * (1 + 1e-6) + tiny).all()
    whole = -(-array.size // BLOCK) * BLOCK if name == "int8" else array.size
    assert kept == encoding.bytes(whole * 4, 4)


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_no_number_is_not_hidden(name):
    array = numbers("n", 3, 700)
    array[1, 5], array[2, 600] = np.nan, np.inf
    found, _ = through(ENCODINGS[name], array)
    assert np.isnan(found[1, 5])
    # float16 has its largest number in place of infinity; the other encodings keep infinity.
    assert found[2, 600] == 65504 if name == "float16" else not np.isfinite(found[2, 600])
    # A value that is no number spoils its own block only.
    assert np.isfinite(found[0, :512]).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_half_precision_fits_where_it_saves(name):
    encoding = ENCODINGS[name]
    assert encoding.fits(tf.float32) and encoding.fits(tf.float64)
    assert encoding.fits(tf.float16) == (name == "int8")
    assert not any(map(encoding.fits, (tf.int32, tf.bool, tf.complex64)))


def network(p, gradients, layers=6):
    h = p["x"]
    for k in range(layers):
        h = tf.nn.gelu(tf.matmul(h, p.weight(f"w{k}", WIDTH, WIDTH)), name=f"layer{k}")
    loss = tf.reduce_mean(tf.square(h))
    return [loss, gradients(loss, p.all)]


def inputs(dynamic=False):
    return Inputs({"x": numbers("x", 2048, WIDTH)}, dynamic=dynamic)


def distance(found, plain):
    (loss, found), (expected, plain) = found.results, plain.results
    assert loss.tobytes() == expected.tobytes(), "the forward pass is another one"
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, plain, strict=True)
    )


@pytest.fixture(scope="module")
def plain():
    return in_function(network, inputs())


@pytest.mark.parametrize(("name", "dynamic"), covering([*ENCODINGS], [False, True]))
def test_gradients_are_near(name, dynamic, plain):
    found = in_function(
        network, inputs(dynamic), asking(planner="keep", encode=name, batch_size=2048)
    )
    plan = found.plans[-1]
    assert 0 < distance(found, plain) < FAR[name]
    assert not plan.clones and len(plan.stored) >= 20
    assert {d.fate for d in plan.stored} == {"encode"}
    assert all(name in d.reason for d in plan.stored)
    # If sizes are unknown, blocks are padded.
    most = {"int8": 0.8 if dynamic else 0.5}.get(name, 0.75)
    assert plan.allocated < most * plan.allocated_plain
    assert f"encoded {len(plan.stored)}" in str(plan)


def test_a_budget_takes_no_more_than_it_needs(plain):
    found = in_function(network, inputs(), asking(budget=0.75, planner="keep", encode="bfloat16"))
    all_of_them = in_function(network, inputs(), asking(planner="keep", encode="bfloat16"))
    plan = found.plans[-1]
    assert plan.allocated <= plan.budget
    assert 0 < len(plan.stored) < len(all_of_them.plans[-1].stored)
    assert distance(found, plain) < FAR["bfloat16"]


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (3, {"budget": 0.7, "planner": "memory"}),
        pytest.param(6, {"budget": 0.4}, marks=pytest.mark.slow),
    ],
)
def test_recomputing_and_encoding_together(layers, options):
    some = functools.partial(network, layers=layers)
    plain = in_function(some, inputs())
    alone = in_function(some, inputs(), asking(**options)).plans[-1]
    found = in_function(some, inputs(), asking(**options, encode="bfloat16"))
    plan = found.plans[-1]
    # The plan promises less time; the executor adds a random share to each plan.
    assert plan.allocated <= plan.budget and plan.extra_time <= alone.extra_time + 0.1
    assert distance(found, plain) < FAR["bfloat16"]


def test_only_what_is_named(plain):
    found = in_function(
        network, inputs(), asking(planner="keep", encode={"*layer[12]*": "bfloat16"})
    )
    plan = found.plans[-1]
    names = {d.tensor.split("/")[0] for d in plan.stored}
    assert names and all(name.startswith(("layer1", "layer2")) for name in names)
    assert 0 < distance(found, plain) < FAR["bfloat16"]


def test_tensors_may_be_named_by_reference():
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [256, 64])
        h = x
        for k in range(12):
            y = tf.tanh(y)
            h = y if k <= 2 else h
        ms.gradients(tf.reduce_sum(y), x, planner="keep", encode={h.ref(): "float16"})
        (decision,) = ms.plans(graph)[-1].stored
    assert decision.tensor == h.name and "float16" in decision.reason


def test_names_that_make_no_difference():
    with tf.Graph().as_default():
        x = y = tf.compat.v1.placeholder(tf.float32, [256, 64])
        for k in range(12):
            y = tf.tanh(y, name=f"tanh{k}")
        with pytest.warns(PlanNote, match="none of the 1 tensors that encode= names"):
            ms.gradients(tf.reduce_sum(y), x, budget=0.5, encode={"tanh10": "int8"})


@pytest.mark.parametrize("mode", ["memory", "speed", None])
def test_modes_encode_what_they_keep(mode, plain):
    found = in_function(network, inputs(), asking(checkpoints=mode, encode="bfloat16"))
    exact = in_function(network, inputs(), mode).plans[-1]
    assert found.plans[-1].allocated <= 1.05 * exact.allocated
    assert distance(found, plain) < FAR["bfloat16"]


@pytest.mark.parametrize(
    "name", [n if n == "bfloat16" else pytest.param(n, marks=pytest.mark.slow) for n in ENCODINGS]
)
def test_under_xla(name):
    plain = in_function(network, inputs(), jit_compile=True)
    found = in_function(
        network, inputs(), asking(planner="keep", encode=name, xla=True), jit_compile=True
    )
    (_, found_), (_, plain_) = found.results, plain.results
    far = max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found_, plain_, strict=True)
    )
    # XLA must not remove a cast together with the cast back.
    assert 1e-5 < far < FAR[name]


def test_second_order_is_of_the_plain_graph():
    def twice(p, gradients):
        h = tf.tanh(tf.matmul(p["x"], p.weight("w", WIDTH, WIDTH)))
        (first,) = gradients(tf.reduce_sum(tf.square(h)), [p["x"]])
        return [first, tf.gradients(tf.reduce_sum(tf.square(first)), p.all)]

    plain = in_function(twice, inputs())
    found = in_function(twice, inputs(), asking(planner="keep", encode="bfloat16"))
    far = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(tf.nest.flatten(found.results), tf.nest.flatten(plain.results), strict=True)
    ]
    assert max(far) < FAR["bfloat16"]


def test_saved_plans_know_encodings(tmp_path, plain):
    path = tmp_path / "plan.json"
    first = in_function(network, inputs(), asking(budget=0.6, encode="int8", planner="keep"))
    first.plans[-1].save(path)
    again = in_function(network, inputs(), asking(plan=str(path), encode="int8"))
    assert again.plans[-1].schedule.stored == first.plans[-1].schedule.stored
    # Op names differ if a plan was not the first one tried. Grappler may add in another order then,
    # as it goes by names.
    found, expected = tf.nest.flatten(again.results), tf.nest.flatten(first.results)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
    for other in ({}, {"encode": "bfloat16"}, {"encode": {"layer1*": "int8"}}):
        with pytest.raises(PlanError, match="changes gradients: give encode='int8' as well"):
            in_function(network, inputs(), asking(plan=str(path), **other))


def test_fit_and_its_loss_curve():
    """Compare losses over 304 steps."""

    def losses(callbacks):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(128, "gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        x = numbers("features", 512, 16)
        y = np.tanh(x[:, :1] * 2 + x[:, 1:2])
        return model.fit(x, y, 64, epochs=38, shuffle=False, verbose=0, callbacks=callbacks).history

    callback = MemorySavingGradients(planner="keep", encode="bfloat16")
    encoded, exact = losses([callback])["loss"], losses([])["loss"]
    assert callback.plans[-1].stored
    np.testing.assert_allclose(encoded, exact, rtol=0.01)
    assert encoded != exact


def test_the_error_is_reported():
    weights = [tf.Variable(numbers(f"w{k}", 128, 128, scale=0.1)) for k in range(4)]
    unread = tf.Variable([1.0])

    def loss(x):
        for w in weights:
            x = tf.tanh(tf.matmul(x, w))
        return tf.reduce_sum(x**2)

    x = numbers("x", 64, 128)
    found = {
        name: ms.gradient_error(loss, [*weights, unread], x, encode=name, planner="keep")
        for name in ("int8", "bfloat16", "float16")
    }
    assert all(isinstance(error, ms.GradientError) for error in found.values())
    assert all(len(error.variables) == 4 and error.control == 0 for error in found.values())
    assert 0.03 > found["int8"].worst > found["bfloat16"].worst > found["float16"].worst > 0
    assert all(error.worst >= error.median for error in found.values())
    assert f"{found['int8'].worst:.1e}" in str(found["int8"])
    draw = tf.random.Generator.from_seed(1)
    drawn = ms.gradient_error(lambda x: loss(x * draw.uniform(x.shape)), weights, x, encode="int8")
    assert drawn.control > 0.1
    dropped = ms.gradient_error(lambda x: loss(tf.nn.dropout(x, 0.4)), weights, x, encode="int8")
    assert dropped.control == 0
    for none in (lambda x: x, lambda x: None, lambda x: [loss(x)]):
        with pytest.raises(ArgumentError, match="is not a scalar"):
            ms.gradient_error(none, weights, x)
    with pytest.raises(ArgumentError, match="call gradient_error outside of it"):
        tf.function(lambda: ms.gradient_error(loss, weights, x))()
    with pytest.raises(ArgumentError, match="loss=3: is not a function"):
        ms.gradient_error(3, weights, x)
    with pytest.raises(ArgumentError, match="(?s)variables=.*is not a list"):
        ms.gradient_error(loss, weights[0], x)
    with pytest.raises(ArgumentError, match="none of them has a gradient"):
        ms.gradient_error(loss, [unread], x)


@pytest.mark.parametrize(
    "options",
    [
        {"encode": "lossless"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"encode": None}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_is_encoded_without_consent(options):
    few = functools.partial(network, layers=3)
    plan = in_function(few, inputs(), asking(budget=0.6, **options)).plans[-1]
    assert not plan.stored


@pytest.mark.parametrize(
    ("encode", "way_out"),
    [
        (True, "which encoding"),
        ("bfloat8", "'bfloat16'"),
        (16, "'lossless'"),
        ({"*": "lossless"}, "'bfloat16'"),
        ({"*": "int4"}, "'int8'"),
        ({"layer1": None}, "'layer1'"),
        ({}, "names no tensors"),
        (["bfloat16"], "mapping"),
    ],
)
def test_bad_encodings(encode, way_out):
    with pytest.raises(ArgumentError) as caught:
        in_function(network, inputs(), asking(encode=encode))
    assert caught.value.argument == "encode" and way_out in str(caught.value)


def test_names_of_nothing_and_of_integers():
    with pytest.raises(SelectionError) as caught:
        in_function(network, inputs(), asking(encode={"layr1*": "bfloat16"}))
    check_error(caught.value, "encode", "layr1*", "layer1")

    def halves(p, gradients):
        h = tf.cast(tf.tanh(tf.cast(p["x"], tf.float16)), tf.float16, name="half")
        index = tf.argmax(p["x"], 1, name="index")
        loss = tf.reduce_sum(tf.cast(tf.square(h), tf.float32)) + tf.reduce_sum(
            tf.gather(p.weight("v", WIDTH, 3), index)
        )
        return gradients(loss, p.all)

    for name in ("*Tanh*", "index"):
        with pytest.raises(ArgumentError) as caught:
            in_function(halves, inputs(), asking(encode={name: "bfloat16"}))
        assert caught.value.argument == "encode"
        assert "dtype" in str(caught.value)
