"""Keras with weights and slots in 16 bits: models fit, are saved and loaded, and tell of skipped
steps; optimizers are taken over, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, OverflowWarning
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering
from tests.helpers.versions import needs_keras
from tests.training.test_precision import EVERY


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


# --- models


#: Fits in the fast suite: optimizers whose slots are of different kinds. `test_precision` steps all
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


# --- optimizers that are taken over


def test_a_class_with_the_name_of_one_of_keras_does_not_replace_it() -> None:
    class Adam(keras.optimizers.Adam):
        pass

    ms.keras.low_precision(Adam())
    kept = keras.optimizers.serialize(ms.keras.low_precision("adam"))
    loaded = keras.optimizers.deserialize(kept)
    assert not isinstance(loaded, Adam) and isinstance(loaded, keras.optimizers.Adam)
    kept = keras.optimizers.serialize(ms.keras.low_precision(Adam()))
    assert isinstance(keras.optimizers.deserialize(kept), Adam)


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
