"""The largest batch for a memory: monotone, tight, and proven by a step in a process of its own."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.measure import EndedBySignalError, MeasurementError, in_fresh_process
from memsaving_gradients import largest
from memsaving_gradients.errors import ArgumentError, BudgetError
from tests.keras_models import convolutions

WIDTH = 2**12


def make(batch: int):
    def step(x):
        y = x
        for _ in range(24):
            y = tf.sin(y)
        return tf.gradients(y, x)

    return step, (tf.TensorSpec([batch, WIDTH]),)


def make_model(batch: int):
    specs = tf.TensorSpec([batch, 16, 16, 3]), tf.TensorSpec([batch], tf.int32)
    return convolutions(16, 6, "sgd"), specs


def test_the_largest_fits_and_the_next_does_not():
    found = ms.largest_batch(make, budget="4 MB")
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


def test_a_step_in_another_process_proves_it():
    found = ms.largest_batch(make, budget="4 MB", prove=True)
    assert found.measured is not None
    assert 0.5 * found.budget < found.measured <= found.budget


def test_a_device_has_variables_too():
    device = ms.largest_batch(make_model, device_memory="3 MB", start=32, prove=True)
    budget = ms.largest_batch(make_model, budget="3 MB", start=32)
    assert device.budget < budget.budget
    assert device.batch <= budget.batch
    assert device.measured <= device.budget


def test_a_proof_that_fails_is_followed_by_one_in_less_memory(monkeypatch):
    ran = []

    def measured(make, batch, budget, device_memory):
        ran.append((budget, batch))
        return None if len(ran) < 3 else budget - 1

    monkeypatch.setattr(largest, "_measured", measured)
    found = ms.largest_batch(make, budget="4 MB", prove=True)
    assert len(ran) == 3 and ran == sorted(ran, reverse=True)
    assert [budget for budget, _ in ran] == [4_000_000, 3_800_000, 3_610_000]
    assert (found.budget, found.batch) == ran[-1] and found.measured == found.budget - 1
    assert found.need <= found.budget


def test_a_device_that_never_gives_enough_is_an_error(monkeypatch):
    monkeypatch.setattr(largest, "_measured", lambda *_: None)
    with pytest.raises(MeasurementError, match="no step could be run"):
        ms.largest_batch(make, budget="4 MB", prove=True)


def test_a_step_that_gets_no_memory_says_so():
    request = {"target": "tests.test_largest_batch:make", "batch": 64, "budget": 4_000_000}
    environment = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": "1"}
    run_once = "memsaving_gradients.largest:run_once"
    assert in_fresh_process(run_once, {**request, "limit": 1}, environment) is None


def test_a_step_that_ends_its_process_proves_nothing(monkeypatch):
    def ended(*_):
        raise EndedBySignalError("SIGABRT")

    monkeypatch.setattr(largest, "in_fresh_process", ended)
    assert largest._measured(make, 8, 4_000_000, "5 MB") is None


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
        (None, "give a function of a batch size"),
        (lambda batch: None, "gave NoneType for a batch of 8"),
        (lambda batch: make(8), "the same for batches of 8 and 16"),
        (lambda batch: (make(8)[0], (tf.TensorSpec([None, WIDTH]),)), "unknown shapes"),
    ],
)
def test_functions_that_make_no_steps_of_a_batch(made, what):
    with pytest.raises(ArgumentError, match=what):
        ms.largest_batch(made, budget="4 MB")


def test_what_cannot_be_imported_cannot_be_proven():
    with pytest.raises(ArgumentError, match="cannot be imported"):
        ms.largest_batch(lambda batch: make(batch), budget="4 MB", prove=True)
