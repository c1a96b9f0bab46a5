"""Weights and slots in 16 bits: rounding that loses nothing, and optimizers that go as far as in 32
bits."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.training.precision.rounding import number_of, rounded
from tests.helpers.sampling import covering, examples
from tests.helpers.versions import needs_keras

TYPES = (tf.bfloat16, tf.float16)
SEED = tf.constant([3, 4])


def neighbors(value: float, dtype: tf.DType) -> tuple[float, float]:
    """Return the numbers of ``dtype`` next to ``value``, found among all numbers of the type."""
    kind = dtype.as_numpy_dtype
    with np.errstate(invalid="ignore"):
        every = np.arange(2**16, dtype=np.uint16).view(kind).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    at = np.searchsorted(every, value)
    if every[at] == value:
        return value, value
    return float(every[at - 1]), float(every[at])


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=examples(100), deadline=None)
@given(value=st.floats(-60000, 60000, width=32).filter(lambda x: abs(x) > 2.0**-110))
def test_rounding_gives_a_neighbor_with_the_chance_of_its_distance(
    dtype: tf.DType, value: float
) -> None:
    low, high = neighbors(value, dtype)
    count = 4000
    found = tf.cast(rounded(tf.fill([count], value), dtype, SEED), tf.float64).numpy()
    assert set(found) <= {low, high}
    if low != high:
        chance = float((Fraction(value) - Fraction(low)) / (Fraction(high) - Fraction(low)))
        spread = (chance * (1 - chance) / count) ** 0.5
        assert abs((found == high).mean() - chance) <= 5 * spread + 1e-3


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_stays(dtype: tf.DType) -> None:
    value = tf.constant([np.inf, -np.inf, np.nan, 0.0, -0.0])
    found = tf.cast(rounded(value, dtype, SEED), tf.float32).numpy()
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("make", "way"),
    covering(
        [
            lambda: keras.optimizers.SGD(1e-4),
            lambda: keras.optimizers.SGD(1e-5, momentum=0.9, nesterov=True),
            lambda: keras.optimizers.Adam(1e-4),
            lambda: keras.optimizers.AdamW(1e-4, weight_decay=0.01),
            lambda: keras.optimizers.RMSprop(1e-4),
            lambda: keras.optimizers.Lion(1e-4),
            lambda: keras.optimizers.Adafactor(1e-3),
        ],
        [*itertools.product(["bfloat16", "float16"], ["stochastic", "kahan"])],
    ),
)
def test_many_small_updates_come_to_their_sum(make: Any, way: tuple[str, str]) -> None:
    """Each update is below half of a step of the type; plainly, weights of 1 would never move."""
    dtype, rounding = way

    def moved(optimizer: Any, dtype: str) -> np.ndarray:
        weights = keras.Variable(np.ones([64, 64]), dtype=dtype)
        optimizer.build([weights])
        grad = tf.random.stateless_uniform([64, 64], [1, 2], 0.5, 1.0)

        @tf.function
        def step() -> None:
            optimizer.apply([tf.cast(grad, dtype)], [weights])

        for _ in range(200):
            step()
        return 1 - np.asarray(tf.cast(weights.value, tf.float32))

    wanted = moved(make(), "float32")
    found = moved(ms.keras.low_precision(make(), rounding), dtype)
    assert wanted.mean() > 1e-3
    # Kahan's sum leaves the nearest numbers in the weights: for bfloat16, up to 1/512 away.
    away = 2.0**-9 if (dtype, rounding) == ("bfloat16", "kahan") else 0
    np.testing.assert_allclose(found.mean(), wanted.mean(), rtol=0.05, atol=away)


#: Optimizers with options that make each of them do all it can.
ALL_OF_IT = [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    lambda: keras.optimizers.AdamW(0.1, clipnorm=0.5),
    lambda: keras.optimizers.Adamax(0.1),
    lambda: keras.optimizers.Nadam(0.1),
    lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    lambda: keras.optimizers.Adagrad(0.1),
    lambda: keras.optimizers.Adadelta(0.1),
    lambda: keras.optimizers.Ftrl(0.1),
    lambda: keras.optimizers.Lion(0.1),
    lambda: keras.optimizers.Adafactor(0.1),
    # Older versions of Keras have no Lamb.
    *([lambda: keras.optimizers.Lamb(0.1)] if hasattr(keras.optimizers, "Lamb") else []),
]


@pytest.mark.parametrize(("make", "graph"), covering(ALL_OF_IT, [True, False]))
def test_large_variables_are_updated_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, make: Any, graph: bool
) -> None:
    gradients = np.random.default_rng(0).standard_normal((4, 23, 3)).astype(np.float32)

    def trained(elements: int) -> list[Any]:
        monkeypatch.setattr("memsaving_gradients.training.precision.runs.ELEMENTS", elements)
        optimizer = ms.keras.low_precision(make(), "nearest")
        weight = keras.Variable(gradients[-1], dtype="bfloat16")
        optimizer.build([weight])

        def step(gradient: tf.Tensor) -> None:
            optimizer.apply([tf.cast(gradient, tf.bfloat16)], [weight])

        run = tf.function(step) if graph else step
        for gradient in gradients:
            run(tf.constant(gradient))
        return [tf.cast(v, tf.float32).numpy() for v in [weight, *optimizer.variables]]

    for whole, pieces in zip(trained(10**9), trained(8), strict=True):
        np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_rows_are_rounded_by_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    monkeypatch.setattr("memsaving_gradients.training.precision.runs.ELEMENTS", 256)
    weight = keras.Variable(np.ones([4, 256]), dtype="bfloat16")
    optimizer = ms.keras.low_precision(keras.optimizers.SGD(0.1, momentum=0.9), rounding)
    optimizer.apply([np.full([4, 256], 0.0123)], [weight])
    slot = optimizer.momentums[0].numpy()
    assert len(np.unique(slot.astype(np.float32))) == 2
    assert len(np.unique(slot, axis=0)) == 4


#: Optimizers with learning rates at which a hundred steps go far enough to be compared.
EVERY = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Adamax": lambda: keras.optimizers.Adamax(2e-3),
    "Nadam": lambda: keras.optimizers.Nadam(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.2),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
    "Lamb": lambda: keras.optimizers.Lamb(1e-3),
    "Muon": lambda: keras.optimizers.Muon(2e-3),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(2e-3),
}
# Older versions of Keras have fewer optimizers.
EVERY = {name: make for name, make in EVERY.items() if hasattr(keras.optimizers, name)}


def test_every_optimizer_is_tried() -> None:
    apart = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    found = {
        name
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
    }
    assert found - apart == set(EVERY)


def moved_by(optimizer: Any, dtype: str, scale: float, steps: int = 100) -> np.ndarray:
    """Return how far weights move, with gradients of about ``scale``."""
    start = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float16)
    weights = keras.Variable(start, dtype=dtype)
    optimizer.build([weights])
    gradients = np.random.default_rng(1).standard_normal((steps, 16, 8)) * 0.5
    gradients += np.random.default_rng(2).standard_normal((16, 8))
    fed = tf.constant(gradients * scale, tf.float32)

    @tf.function
    def step(k: tf.Tensor) -> None:
        optimizer.apply([tf.cast(fed[k], dtype)], [weights])

    for k in tf.range(steps):
        step(k)
    return np.asarray(tf.cast(weights.value, tf.float32)) - start


@pytest.mark.parametrize(("name", "scale"), covering([*EVERY], [1e-4, 1.0]))
def test_float16_goes_where_float32_goes(name: str, scale: float) -> None:
    """Second moments of small gradients are zero in float16. Values divided by their roots once ran
    away."""
    wanted = moved_by(EVERY[name](), "float32", scale)
    # On TensorFlow, Keras reads a slot after a write, though it means to read it before.
    away = 0.2 if name == "ScheduleFreeAdamW" else 0.1
    for rounding in ("stochastic", "kahan"):
        found = moved_by(ms.keras.low_precision(EVERY[name](), rounding), "float16", scale)
        assert np.vdot(found, wanted) / np.vdot(wanted, wanted) == pytest.approx(1, abs=away)
        assert np.linalg.norm(found - wanted) < (0.3 + away) * np.linalg.norm(wanted)
    found = moved_by(ms.keras.low_precision(EVERY[name](), "nearest"), "float16", scale)
    # Updates of more than half of a step become a whole step.
    assert np.abs(found).max() < 2.5 * np.abs(wanted).max()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
def test_small_gradients_in_float16_do_not_run_away(rounding: str) -> None:
    """With slots in float16, Adam once went from 1 to -15 in twenty steps of 0.001."""
    weight = keras.Variable([1.0], dtype="float16")
    optimizer = ms.keras.low_precision(keras.optimizers.Adam(1e-3), rounding)
    for _ in range(20):
        optimizer.apply([tf.constant([1e-3], tf.float16)], [weight])
    assert float(weight[0]) == pytest.approx(0.98, abs=2e-3)
    assert {v.dtype for v in optimizer.variables if v.shape == (1,)} == {"bfloat16"}


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bytes_are_those_of_16_bits(rounding: str) -> None:
    weights = keras.Variable(np.ones([1000]), dtype="bfloat16")
    optimizer = ms.keras.low_precision("adam", rounding)
    optimizer.build([weights])
    held = sum(v.value.numpy().nbytes for v in optimizer.variables if v.shape == (1000,))
    assert held == 2000 * (2 + (rounding == "kahan"))


@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_what_is_excluded_from_weight_decay_stays_excluded(by: str) -> None:
    kept, decayed = (
        keras.Variable([1.0], dtype="bfloat16", name=name) for name in ("bias", "kernel")
    )
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**{by: [kept] if by == "var_list" else ["bias"]})
    zero = tf.zeros([1], tf.bfloat16)
    ms.keras.low_precision(optimizer, "nearest").apply([zero, zero], [kept, decayed])
    assert (float(kept[0]), float(decayed[0])) == (1, 0.75)


@needs_keras("optimizers.Muon")
def test_muon_decays_by_two_rates() -> None:
    """One rate is for matrices, the other for the variables that Adam updates."""
    weights = [keras.Variable(np.ones(n), dtype="bfloat16") for n in ([2, 2], [2])]
    optimizer = keras.optimizers.Muon(0.5, weight_decay=0.5, adam_weight_decay=None)
    zeros = [tf.zeros(w.shape, tf.bfloat16) for w in weights]
    ms.keras.low_precision(optimizer, "nearest").apply(zeros, weights)
    assert [float(np.asarray(w, np.float32).mean()) for w in weights] == [0.75, 1]


def test_neighboring_seeds_share_no_numbers() -> None:
    """Seed, variable and row were once added. The second variable drew the numbers that the first
    one draws with the next seed."""

    def trained(seed: int) -> list[np.ndarray]:
        weights = [keras.Variable(np.ones([200]), dtype="bfloat16") for _ in range(3)]
        optimizer = ms.keras.low_precision(
            keras.optimizers.SGD(2.0**-9, weight_decay=1.0), seed=seed
        )
        optimizer.apply([tf.ones([200], tf.bfloat16)] * 3, weights)
        return [np.asarray(w, np.float32) for w in weights]

    found = [w for seed in (0, 1, 2**40) for w in trained(seed)]
    assert len({w.tobytes() for w in found}) == 9
    # Decay and update are rounded by numbers of their own; otherwise, both go down at once.
    assert len(np.unique(found[0])) == 3
    numbers = {number_of(seed, k, row) for seed in range(9) for k in range(9) for row in range(9)}
    assert len(numbers) == 9**3


def test_the_same_seed_gives_the_same_weights() -> None:
    def trained(seed: int) -> np.ndarray:
        weights = keras.Variable(np.ones([100]), dtype="bfloat16")
        optimizer = ms.keras.low_precision(keras.optimizers.SGD(1e-3), seed=seed)
        for _ in range(5):
            optimizer.apply([tf.ones([100], tf.bfloat16)], [weights])
        return np.asarray(weights)

    np.testing.assert_array_equal(trained(1), trained(1))
    assert (trained(1) != trained(2)).any()


def test_gradients_of_few_rows() -> None:
    weights = keras.Variable(np.ones([10, 4]), dtype="bfloat16")
    optimizer = ms.keras.low_precision(keras.optimizers.SGD(0.5))
    rows = tf.IndexedSlices(
        tf.ones([3, 4], tf.bfloat16), tf.constant([2, 5, 2]), tf.constant([10, 4])
    )
    optimizer.apply([rows], [weights])
    expected = np.ones([10, 4])
    expected[2], expected[5] = 0, 0.5
    np.testing.assert_array_equal(np.asarray(weights, np.float32), expected)


@pytest.mark.parametrize("elements", [10**9, 8])
def test_rows_that_come_a_thousand_times_are_added_up_in_32_bits(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """In bfloat16, the sum of 256 and 1 is 256."""
    monkeypatch.setattr("memsaving_gradients.training.precision.runs.ELEMENTS", elements)
    weights = keras.Variable(np.zeros([10, 4]), dtype="bfloat16")
    optimizer = ms.keras.low_precision(keras.optimizers.SGD(1.0), "nearest")
    ones = tf.ones([1001, 4], tf.bfloat16)
    places = tf.constant([7] * 1000 + [2])
    optimizer.apply([tf.IndexedSlices(ones, places, tf.constant([10, 4]))], [weights])
    expected = np.zeros([10, 4])
    expected[7], expected[2] = -1000, -1
    np.testing.assert_array_equal(np.asarray(weights, np.float32), expected)


CLIPS: list[dict[str, float]] = [
    {"clipnorm": 2.0},
    {"global_clipnorm": 2.0},
    {"clipvalue": 0.5},
    {"loss_scale_factor": 1024.0},
    {"loss_scale_factor": 1024.0, "global_clipnorm": 0.1},
]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_are_clipped_as_in_32_bits(clip: dict[str, Any], sparse: bool) -> None:
    """In float16, the norm of these gradients is infinite."""
    rows = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16) * 200
    places, shape = tf.constant([0, 3, 4, 5, 6, 7, 2, 9]), tf.constant([10, 4])

    def moved(make: Any, dtypes: tuple[str, str]) -> list[np.ndarray]:
        weights = [keras.Variable(np.zeros([10, 4]), dtype=dtype) for dtype in dtypes]
        gradients = [
            (
                tf.IndexedSlices(tf.cast(rows, dtype), places, shape)
                if sparse and "loss_scale_factor" not in clip
                else tf.cast(np.concatenate([rows, rows[:2]]), dtype)
            )
            for dtype in dtypes
        ]
        make(keras.optimizers.SGD(1.0, **clip)).apply(gradients, weights)
        return [np.asarray(tf.cast(w.value, tf.float32)) for w in weights]

    wanted = moved(lambda optimizer: optimizer, ("float32", "float32"))
    # The second weight, of float32, is updated as usual.
    found = moved(
        lambda optimizer: ms.keras.low_precision(optimizer, "nearest"), ("float16", "float32")
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)


def test_a_gradient_that_is_not_finite_spoils_the_norm_of_all() -> None:
    weight = keras.Variable([1.0, 1.0], dtype="bfloat16")
    optimizer = ms.keras.low_precision(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    optimizer.apply([tf.constant([np.inf, 1.0], tf.bfloat16)], [weight])
    assert np.isnan(np.asarray(weight, np.float32)).all()


def test_no_two_gradients_have_32_bits_at_once_for_their_norm() -> None:
    weights = [keras.Variable(np.zeros([4, 4]), dtype="bfloat16") for _ in range(3)]
    optimizer = ms.keras.low_precision(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    optimizer.build(weights)

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        optimizer.apply(gradients, weights)

    graph = step.get_concrete_function(*[tf.TensorSpec([4, 4], tf.bfloat16)] * 3).graph
    squares = [op for op in graph.get_operations() if op.type == "Square"]
    assert len(squares) == 3
    for before, after in itertools.pairwise(squares):
        cast = after.inputs[0].op
        (total,) = cast.control_inputs
        (addend,) = [i.op for i in total.inputs if i.op.type == "Sum"]
        assert addend.inputs[0].op is before
