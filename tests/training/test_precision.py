"""Weights and slots in 16 bits: rounding that loses nothing, and training that goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, OverflowWarning
from memsaving_gradients.training.precision.rounding import number_of, rounded
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering, examples
from tests.helpers.versions import needs_keras

TYPES = (tf.bfloat16, tf.float16)
SEED = tf.constant([3, 4])


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


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


#: Fits in the fast suite: optimizers whose slots are of different kinds. The tests above step all
#: of them.
FITS = {
    ("SGD", "bfloat16"),
    ("Adam", "float16"),
    ("Nadam", "bfloat16"),
    ("Adafactor", "bfloat16"),
    ("Muon", "bfloat16"),
    ("ScheduleFreeAdamW", "bfloat16"),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(
            name,
            policy,
            marks=[] if (name, policy) in FITS else pytest.mark.slow,
        )
        for name, policy in itertools.product(EVERY, ["bfloat16", "float16"])
    ],
    indirect=["policy"],
)
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_optimizer_fits(name: str, policy: str, xla: bool) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    optimizer = ms.keras.low_precision(EVERY[name]())
    if policy == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
    model.compile(optimizer, "mse", jit_compile=xla)
    x = np.random.default_rng(0).standard_normal((32, 8))
    before = [np.asarray(v, np.float32) for v in model.trainable_variables]
    losses = model.fit(x, x[:, :4], 8, 4, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    for old, v in zip(before, model.trainable_variables, strict=True):
        new = np.asarray(v, np.float32)
        assert np.isfinite(new).all() and (new != old).any()


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bytes_are_those_of_16_bits(rounding: str) -> None:
    weights = keras.Variable(np.ones([1000]), dtype="bfloat16")
    optimizer = ms.keras.low_precision("adam", rounding)
    optimizer.build([weights])
    held = sum(v.value.numpy().nbytes for v in optimizer.variables if v.shape == (1000,))
    assert held == 2000 * (2 + (rounding == "kahan"))


@pytest.mark.parametrize("policy", ["bfloat16"], indirect=True)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_training_in_16_bits_comes_as_far_as_in_32(policy: str) -> None:
    def losses(dtype: str, optimizer: Any) -> list[float]:
        keras.config.set_dtype_policy(dtype)
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(32, activation="gelu") for _ in range(3)]
        model = keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])
        model.compile(optimizer, "mse", jit_compile=False)
        x = np.random.default_rng(0).standard_normal((512, 16)).astype(np.float32)
        y = np.sin(x.sum(1, keepdims=True))
        saving = ms.keras.MemorySavingGradients()
        history = model.fit(x, y, 64, 12, verbose=0, shuffle=False, callbacks=[saving])
        return history.history["loss"]

    wanted = losses("float32", keras.optimizers.Adam(3e-3))
    for rounding in ("stochastic", "kahan"):
        found = losses("bfloat16", ms.keras.low_precision(keras.optimizers.Adam(3e-3), rounding))
        assert found[-1] < wanted[0] - 0.8 * (wanted[0] - wanted[-1])


@pytest.mark.parametrize("policy", ["bfloat16"], indirect=True)
def test_it_is_saved_and_loaded(policy: str, tmp_path: Any) -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile(ms.keras.low_precision(keras.optimizers.Adam(0.01), "kahan", seed=7), "mse")
    x = np.ones([8, 4])
    model.fit(x, x[:, :3], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.optimizer.rounding, loaded.optimizer.seed) == ("kahan", 7)
    for one in (model, loaded):
        one.fit(x, x[:, :3], verbose=0)
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_saved_model_is_loaded_by_a_new_process(tmp_path: Any) -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, dtype="bfloat16")])
    inner = ms.keras.low_precision(keras.optimizers.AdamW(0.01), "kahan")
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    model.fit(np.ones([8, 4]), np.ones([8, 3]), verbose=0)
    model.save(tmp_path / "model.keras")
    found = fresh("tests.helpers.loading:optimizer_in", path=tmp_path / "model.keras")
    assert found == ("LowPrecisionAdamW", "kahan", 1)


def test_a_class_with_the_name_of_one_of_keras_does_not_replace_it() -> None:
    class Adam(keras.optimizers.Adam):
        pass

    ms.keras.low_precision(Adam())
    kept = keras.optimizers.serialize(ms.keras.low_precision("adam"))
    loaded = keras.optimizers.deserialize(kept)
    assert not isinstance(loaded, Adam) and isinstance(loaded, keras.optimizers.Adam)
    kept = keras.optimizers.serialize(ms.keras.low_precision(Adam()))
    assert isinstance(keras.optimizers.deserialize(kept), Adam)


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


class Doubling(keras.optimizers.SGD):
    """An optimizer as users write it, without a config."""

    def __init__(self, learning_rate: float = 0.1, factor: Any = 2.0, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.factor = factor


class Tripling(Doubling):
    """The same with a config."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


class Needing(keras.optimizers.SGD):
    """An optimizer that cannot be made from a config."""

    def __init__(self, needed: Any) -> None:
        super().__init__(0.1)


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a config."""

    def __call__(self, step: Any) -> float:
        return 0.1


@pytest.mark.parametrize("factor", [3.0, [1, {"a": 2}], np.ones([3]), "three"])
def test_attributes_that_a_config_has_are_taken_over(factor: Any) -> None:
    np.testing.assert_equal(ms.keras.low_precision(Tripling(factor=factor)).factor, factor)
    assert ms.keras.low_precision(Doubling()).factor == 2
    with pytest.raises(ArgumentError, match=r"factor=.*add it to the get_config\(\) of Doubling"):
        ms.keras.low_precision(Doubling(factor=factor))


def test_the_number_of_the_step_is_taken_over() -> None:
    optimizer = keras.optimizers.SGD()
    optimizer.iterations.assign(1000)
    assert ms.keras.low_precision(optimizer).iterations.numpy() == 1000


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


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_nothing_to_train_is_nothing_to_report(policy: str) -> None:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, trainable=False)])
    model.compile("sgd", "mse")
    data = np.ones((8, 3))
    history = model.fit(data, data, verbose=0, callbacks=[ms.keras.MemorySavingGradients()])
    assert history.history.keys() == {"loss"}


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_skipped_steps_are_reported(policy: str) -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**40),
        "mse",
    )
    x = np.full([256, 4], 100.0)
    saving = ms.keras.MemorySavingGradients()
    with pytest.warns(OverflowWarning, match="of 32 steps were skipped"):
        history = model.fit(x, x[:, :3], 8, verbose=0, callbacks=[saving])
    skipped, scale = (history.history[name][0] for name in ("skipped_steps", "loss_scale"))
    assert skipped == 32 - int(model.optimizer.iterations.numpy()) > 16
    assert scale == 2.0 ** (40 - skipped)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.parametrize(
    ("steps", "overflows"),
    covering([(4, 1, 40), (None, 7, 40), (4, 7, 43), (None, 7, 0)], [3, 0]),
)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_skipped_steps_are_counted_one_by_one(
    policy: str, steps: tuple[int | None, int, int], overflows: int
) -> None:
    """Some steps share one update, some run together, and data may have an unknown length."""
    accumulated, together, batches = steps
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    inner = keras.optimizers.SGD(1e-4, gradient_accumulation_steps=accumulated)
    model.compile(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0),
        "mse",
        steps_per_execution=together,
    )
    count = batches or 40
    x = np.ones([count, 4], np.float32)
    x[5 : 5 + overflows] = np.inf
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros([count, 3]))).batch(1)
    if not batches:
        data = data.filter(lambda *_: True)
    saving = ms.keras.MemorySavingGradients()
    logs = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[saving]).history
    assert logs["skipped_steps"] == [overflows, overflows]


@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
def test_casts_of_weights_are_recomputed(policy: str) -> None:
    layers = [keras.layers.Dense(512, activation="tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input([512]), *layers])

    @tf.function
    def step(x: tf.Tensor) -> Any:
        loss = tf.reduce_sum(model(x, training=True))
        return ms.gradients(loss, model.trainable_variables, checkpoints="memory")

    (plan,) = ms.plans(step.get_concrete_function(tf.TensorSpec([8, 512])))
    casts = [d for d in plan.decisions if "Cast" in d.tensor and d.bytes == 2 * 512 * 512]
    # The casts of the last layers are read before there is a peak to lower.
    assert [d.fate for d in casts][:2] == ["recompute"] * 2


def seeded(seed: Any) -> Any:
    return ms.keras.low_precision("sgd", seed=seed)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ms.keras.low_precision("adam", "up"), "rounding='up'"),
        (
            lambda: ms.keras.low_precision(keras.optimizers.SGD(use_ema=True)),
            "use_ema=True: cannot be combined",
        ),
        (
            lambda: ms.keras.low_precision(keras.optimizers.RMSprop(centered=True)),
            "centered=True: cannot be combined",
        ),
        (
            lambda: ms.keras.low_precision(keras.optimizers.SGD(gradient_accumulation_steps=2)),
            "gradient_accumulation_steps=2: cannot be combined",
        ),
        (
            lambda: ms.keras.low_precision(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
            ),
            "put LossScaleOptimizer around the result",
        ),
        pytest.param(
            lambda: ms.keras.low_precision(
                keras.optimizers.MultiOptimizer(
                    keras.optimizers.OptimizerMap(keras.optimizers.SGD())
                )
            ),
            "put MultiOptimizer around the results",
            marks=needs_keras("optimizers.MultiOptimizer"),
        ),
        (
            lambda: ms.keras.low_precision(ms.keras.low_precision("sgd")),
            "optimizer='(sgd.*|SGD)': has low precision already",
        ),
        (lambda: seeded(None), "seed=None: give an int"),
        (lambda: seeded("a"), "seed='a': give an int"),
        (lambda: seeded(1.5), "seed=1.5: give an int"),
        (lambda: ms.keras.low_precision("adamm"), "optimizer='adamm': is not a Keras optimizer"),
        (lambda: ms.keras.low_precision(None), "optimizer=None: is not a Keras optimizer"),
        (lambda: ms.keras.low_precision(keras.optimizers.Adam), "is not a Keras optimizer; give"),
        (
            lambda: ms.keras.low_precision(Needing(1)),
            "got an unexpected .*give Needing a get_config",
        ),
        (
            lambda: ms.keras.low_precision(keras.optimizers.SGD(lambda: 0.1)),
            "learning_rate=<function .*cannot be put into the config",
        ),
        (
            lambda: ms.keras.low_precision(keras.optimizers.SGD(Warmup())),
            "learning_rate=.*cannot be put into the config",
        ),
    ],
)
def test_bad_arguments(make: Any, problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        make()


def test_weights_of_32_bits_are_refused() -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    optimizer = ms.keras.low_precision("sgd")
    with pytest.raises(ArgumentError, match="either drop it, or drop the policy"):
        optimizer.build(model.trainable_variables)
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    with pytest.raises(ArgumentError, match="has slots already"):
        ms.keras.low_precision(optimizer)
