"""Budgets in the Keras callback."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.budget import DeviceMemory
from memsaving_gradients.planners.meter import EXECUTOR_ADDS
from tests.helpers.greedy import greedy
from tests.helpers.sampling import slow

MemorySavingGradients = ms.keras.MemorySavingGradients
errors = ms.errors

# Here weights are as large as activations, and so are the values that Adam computes of them.
pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.BudgetWarning")

ROWS, WIDTH, LAYERS = 128, 64, 8


def model(optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(LAYERS)]
    found = keras.Sequential([keras.Input([WIDTH]), *layers])
    found.compile(optimizer or keras.optimizers.Adam(0.001), "mse", jit_compile=False)
    return found


def fit(
    trained: keras.Model, callback: Any = None, data: Any = None, **options: Any
) -> list[float]:
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    given = {"x": data} if data is not None else {"x": x, "y": x, "batch_size": 64}
    given |= options
    callbacks = [] if callback is None else [callback]
    return trained.fit(**given, epochs=1, verbose=0, shuffle=False, callbacks=callbacks).history[
        "loss"
    ]


def saving(**options: Any) -> Any:
    return MemorySavingGradients(**{"planner": greedy, **options})


def dataset() -> tf.data.Dataset:
    x = np.zeros([ROWS, WIDTH], "f")
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(64)


@functools.cache
def within(budget: Any) -> tuple[ms.Plan, list[float]]:
    """Return the plan for a budget, and the losses with it."""
    callback = saving(budget=budget)
    losses = fit(model(), callback)
    (plan,) = callback.plans
    return plan, losses


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("budget", [0.65, pytest.param("380 kB", marks=pytest.mark.slow)])
def test_budget_is_kept_and_training_is_the_same(budget: Any) -> None:
    plan, losses = within(budget)
    assert losses == fit(model())
    assert plan.mode == "budget"
    assert plan.clones
    assert plan.budget is not None
    assert plan.allocated <= plan.budget < plan.allocated_plain


def test_least_budget_is_named_and_works_for_the_model_as_it_was() -> None:
    trained = model()
    fit(trained)
    before = trained.train_function
    with pytest.raises(errors.BudgetError) as caught:
        fit(trained, saving(budget="10 kB"))
    assert trained.train_function is before
    fit(trained)
    callback = saving(budget=caught.value.least)
    fit(trained, callback)
    assert callback.plans[-1].allocated <= caught.value.least


def test_max_slowdown() -> None:
    callback = saving(max_slowdown=1.2)
    fit(model(), callback)
    (plan,) = callback.plans
    assert 0 < plan.extra_time <= 0.2
    assert plan.allocated < plan.allocated_plain


def test_device_memory() -> None:
    trained = model()
    weights = sum(int(np.prod(v.shape)) * 4 for v in trained.weights)
    # Adam has two slots for each weight, and a few numbers.
    callback = saving(device_memory=4_000_000)
    assert weights * 3 < 4_000_000
    with pytest.warns(errors.PlanNote):
        fit(trained, callback)
    budget = callback.plans[-1].budget
    assert budget is not None
    assert ms.keras.RESERVE == 1 / 20
    assert abs(4_000_000 * 19 // 20 - 3 * weights - budget) < 500
    tight = 3 * weights + 350_000
    callback = saving(device_memory=tight * 20 // 19)
    fit(trained, callback)
    plan = callback.plans[-1]
    assert plan.budget is not None
    assert abs(plan.budget - 350_000) < 500
    assert plan.clones


def test_device_memory_for_another_optimizer() -> None:
    budgets = []
    for optimizer in (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)):
        callback = saving(device_memory="8 MB")
        with pytest.warns(errors.PlanNote):
            fit(model(optimizer), callback)
        budgets.append(callback.plans[-1].budget)
    assert budgets[0] - budgets[1] > 8 * LAYERS * WIDTH * WIDTH


def test_device_that_is_too_small() -> None:
    with pytest.raises(errors.ArgumentError, match="nothing is left for training") as caught:
        fit(model(), saving(device_memory="100 kB"))
    assert caught.value.argument == "device_memory"
    assert "variables take" in str(caught.value)


@pytest.mark.parametrize(
    "refused", [False, *slow(True)], ids=lambda refused: "refused" if refused else "kept"
)
def test_least_device_memory_is_named_and_works(refused: bool) -> None:
    trained = model()
    weights = sum(int(np.prod(v.shape)) * 4 for v in trained.weights)
    with pytest.raises(errors.BudgetError) as caught:
        fit(trained, saving(device_memory=f"{3 * weights + 200_000} B"))
    error = caught.value
    assert error.argument == "device_memory"
    assert error.value == f"{3 * weights + 200_000} B"
    assert f"the model's variables take {weights:,} bytes" in str(error)
    assert f"which leaves {error.budget:,} bytes" in str(error)
    assert "budget=" not in str(error)
    (least,) = re.findall(r"the least device memory that works is ([\d,]+) bytes", str(error))
    whole = int(least.replace(",", ""))
    if refused:
        clearly_less = int(error.least * (1 - EXECUTOR_ADDS) ** 2)
        with pytest.raises(errors.BudgetError):
            fit(trained, saving(device_memory=whole - error.least + clearly_less))
        return
    callback = saving(device_memory=whole)
    fit(trained, callback)
    assert callback.plans[-1].budget == error.least


def test_ample_device_is_named() -> None:
    with pytest.warns(errors.PlanNote, match=r"MiB, left by device_memory='8 MB'\)"):
        fit(model(), saving(device_memory="8 MB"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"checkpoints": "speed"},
            "device_memory='16GiB': cannot be combined with checkpoints='speed'",
        ),
        (
            {"max_slowdown": 1.2},
            "max_slowdown=1.2: cannot be combined with device_memory='16GiB'",
        ),
    ],
    ids=lambda options: "-".join(options) if isinstance(options, dict) else "",
)
def test_errors_name_what_was_given(options: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        MemorySavingGradients(device_memory="16GiB", **options)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("taken", [0, 1, 19, 123_457])
def test_a_device_that_is_enough_for_a_budget_is_the_least(taken: int) -> None:
    for budget in (1, 20, 999_999):
        whole = DeviceMemory(1, weights=taken).enough_for(budget)
        assert DeviceMemory(whole, weights=taken).left >= budget
        assert whole == 1 or DeviceMemory(whole - 1, slots=taken).left < budget


def test_the_same_error_every_time() -> None:
    trained, callback = model(), saving(device_memory="100 kB")
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="nothing is left for training"):
            fit(trained, callback)
    fit(trained)


def test_unknown_batch_is_asked_for() -> None:
    with pytest.raises(errors.ArgumentError, match="give batch_size=") as caught:
        fit(model(), saving(budget="350 kB"), dataset())
    assert caught.value.argument == "batch_size"
    callback = saving(budget="350 kB", batch_size=64)
    fit(model(), callback, dataset())
    assert callback.plans[-1].clones


def test_unknown_batch_does_not_matter_to_a_fraction() -> None:
    callback = saving(budget=0.9)
    fit(model(), callback, dataset())
    assert callback.plans[-1].clones


def test_gradients_that_are_held_count() -> None:
    peaks = []
    for clip in (None, 1.0):
        callback = saving(budget=1.0)
        with pytest.warns(errors.PlanNote):
            fit(model(keras.optimizers.SGD(0.1, global_clipnorm=clip)), callback, batch_size=8)
        peaks.append(callback.plans[-1].peak_plain)
    assert peaks[0] < peaks[1]


@pytest.mark.usefixtures("exact")
def test_saved_plan(tmp_path: Path) -> None:
    first, _ = within(0.65)
    first.save(tmp_path / "plan.json")
    again = MemorySavingGradients(plan=tmp_path / "plan.json")
    fit(model(), again)
    (second,) = again.plans
    assert first.fingerprint == second.fingerprint
    assert (first.schedule, first.clones, first.mode) == (
        second.schedule,
        second.clones,
        second.mode,
    )
    # The first plan was revised to leave room for the optimizer, and its figures include that.
    assert first.peak == pytest.approx(second.peak, rel=0.05)
    assert second.whole_step is not None
    assert first.budget is not None
    assert second.whole_step <= first.budget
