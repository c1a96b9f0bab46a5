"""The largest batch for a memory: monotone, tight, and proven by a step in a process of its own."""

from __future__ import annotations

import importlib
import os

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import EndedBySignalError, MeasurementError
from memsaving_gradients.analysis import largest_batch
from memsaving_gradients.errors import ArgumentError, BudgetError
from tests.helpers.fresh import FreshProcessError, fresh
from tests.helpers.keras_models import convolutions

WIDTH = 2**14


def make(batch: int):
    def step(x):
        y = x
        for _ in range(12):
            y = tf.sin(y)
        return tf.gradients(y, x)

    return step, (tf.TensorSpec([batch, WIDTH]),)


def make_model(batch: int):
    specs = tf.TensorSpec([batch, 16, 16, 3]), tf.TensorSpec([batch], tf.int32)
    return convolutions(16, 6, "sgd"), specs


def make_small_model(batch: int):
    specs = tf.TensorSpec([batch, 16, 16, 3]), tf.TensorSpec([batch], tf.int32)
    return convolutions(16, 2, "sgd"), specs


def within(target: str, kwargs: dict, env: dict):
    """Call ``target`` in a fresh process, whose allocator reads the environment at the first op."""
    os.environ.update(env)
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(**kwargs)


def forked(target: str, kwargs: dict, env: dict):
    given = {"target": target, "kwargs": kwargs, "env": env}
    try:
        return fresh("tests.analysis.test_largest_batch:within", given)
    except FreshProcessError as error:
        if "exit code -" in str(error):
            raise EndedBySignalError(str(error)) from error
        raise


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def process(request, monkeypatch):
    """Let the processes that prove a batch be forked, or import TensorFlow."""
    if request.param == "forked":
        monkeypatch.setattr(largest_batch, "in_fresh_process", forked)


def test_the_largest_fits_and_the_next_does_not():
    found = ms.largest_batch(make, budget="4 MB")
    assert isinstance(found, ms.LargestBatch)
    assert found.need <= found.budget == 4_000_000
    assert 1 <= found.plain < found.batch
    fn, args = make(found.batch)
    assert ms.explain(fn, *args).least.budget <= found.budget
    fn, args = make(found.batch + 1)
    assert ms.explain(fn, *args).least.budget > found.budget
    assert str(found.batch) in str(found)


def test_more_memory_is_more_examples_wherever_the_search_begins():
    less, more = (ms.largest_batch(make, budget=b).batch for b in (2_000_000, 4_000_000))
    assert less < more
    assert ms.largest_batch(make, budget=4_000_000, start=100).batch == more


@pytest.mark.usefixtures("process")
def test_a_step_in_another_process_proves_it():
    found = ms.largest_batch(make, budget="4 MB", prove=True)
    assert found.measured is not None
    assert 0.5 * found.budget < found.measured <= found.budget


@pytest.mark.parametrize(
    "make", [make_small_model, pytest.param(make_model, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("process")
def test_a_device_has_variables_too(make, monkeypatch):
    if make is make_small_model:
        monkeypatch.setattr(largest_batch, "MOST_EXAMPLES", 72)
    device = ms.largest_batch(make, device_memory="3 MB", start=64, prove=True)
    budget = ms.largest_batch(make, budget="3 MB", start=64)
    assert device.budget < budget.budget
    assert device.batch <= budget.batch
    assert device.measured <= device.budget


def test_a_proof_that_fails_is_followed_by_one_in_less_memory(monkeypatch):
    ran = []

    def measured(make, batch, budget, device_memory, loop_steps):
        ran.append((budget, batch))
        return None if len(ran) < 3 else budget - 1

    monkeypatch.setattr(largest_batch, "_measured", measured)
    found = ms.largest_batch(make, budget="4 MB", prove=True)
    assert len(ran) == 3 and ran == sorted(ran, reverse=True)
    assert [budget for budget, _ in ran] == [4_000_000, 3_800_000, 3_610_000]
    assert (found.budget, found.batch) == ran[-1] and found.measured == found.budget - 1
    assert found.need <= found.budget


def test_a_device_that_never_gives_enough_is_an_error(monkeypatch):
    monkeypatch.setattr(largest_batch, "_measured", lambda *_: None)
    monkeypatch.setattr(largest_batch, "MOST_PROOFS", 2)
    with pytest.raises(MeasurementError, match="no step could be run"):
        ms.largest_batch(make, budget="4 MB", prove=True)


def make_exhausted(batch: int):
    def step(x):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    return step, (tf.TensorSpec([batch, WIDTH]),)


def test_a_step_that_is_refused_memory_says_so():
    assert largest_batch.run_once(f"{__name__}:make_exhausted", 8, 4_000_000) is None


# The allocator waits ten seconds for memory before it gives up.
@pytest.mark.slow
@pytest.mark.usefixtures("process")
def test_a_step_that_gets_no_memory_says_so():
    request = {"target": "tests.analysis.test_largest_batch:make", "batch": 64, "budget": 4_000_000}
    environment = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "1"}
    run_once = "memsaving_gradients.analysis.largest_batch:run_once"
    assert largest_batch.in_fresh_process(run_once, {**request, "limit": 1}, environment) is None


def test_a_step_that_ends_its_process_proves_nothing(monkeypatch):
    def ended(*_):
        raise EndedBySignalError("SIGABRT")

    monkeypatch.setattr(largest_batch, "in_fresh_process", ended)
    assert largest_batch._measured(make, 8, 4_000_000, "5 MB") is None


def test_where_nothing_fits_the_least_is_named():
    with pytest.raises(BudgetError, match="no batch fits: 1 example needs") as error:
        ms.largest_batch(make, budget=10_000)
    assert error.value.least > 10_000


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "give a budget in bytes or device_memory"),
        ({"budget": 10, "device_memory": 10}, "not both"),
        ({"budget": "2 gigs"}, "unit"),
        ({"budget": 0.5}, "bytes"),
        ({"budget": "1 MB", "start": 0}, "1 to 1,048,576"),
        ({"budget": "1 MB", "speed": 1}, "no such option"),
    ],
)
def test_bad_input(arguments, what):
    with pytest.raises(ArgumentError, match=what):
        ms.largest_batch(make, **arguments)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (None, "give a function that takes a batch size"),
        (lambda batch: None, "returned NoneType for a batch of 8"),
        (lambda batch: make(8), "the same bytes for batches of 8 and 16"),
        (lambda batch: (make(8)[0], (tf.TensorSpec([None, WIDTH]),)), "unknown shapes"),
    ],
)
def test_functions_that_make_no_steps_of_a_batch(made, what):
    with pytest.raises(ArgumentError, match=what):
        ms.largest_batch(made, budget="16 MB")


def test_what_cannot_be_imported_cannot_be_proven():
    with pytest.raises(ArgumentError, match="cannot be imported"):
        ms.largest_batch(lambda batch: make(batch), budget="4 MB", prove=True)
