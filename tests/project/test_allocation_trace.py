"""Allocations of a real step, as the profiler records them."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.allocation_trace import alive_at_peak, allocation_events, requested_peak
from graph_tools.memory.measure import MeasurementError, measure_peak
from tests.helpers.fresh import fresh

MIB = 1 << 20


def three_squares() -> dict:
    """Trace a product of square matrices, two of which are alive at once (in a fresh process)."""
    import tensorflow as tf

    x = tf.ones([512, 512])

    @tf.function
    def step(x):
        a = tf.sin(x, name="first")
        b = tf.matmul(a, a, name="second")
        c = tf.matmul(b, b, name="third")
        return tf.reduce_sum(tf.matmul(c, c, name="fourth"))

    for _ in range(2):
        step(x)
    events = allocation_events(lambda: step(x).numpy())
    return {
        "events": events,
        "peak": requested_peak(events),
        "alive": [event.op for event in alive_at_peak(events) if event.requested == MIB],
        "near": [e.op for e in alive_at_peak(events, near=0.01) if e.requested == MIB],
        "chunks": max(event.allocated for event in events),
        "measured": measure_peak(lambda: step(x).numpy()).peak,
    }


@pytest.fixture(scope="module")
def squares() -> dict:
    return fresh("tests.project.test_allocation_trace:three_squares")


def test_every_op_asks_for_its_output_once(squares):
    asked = [event.op for event in squares["events"] if event.requested == MIB and event.kind]
    assert asked == ["first", "second", "third", "fourth"]


def test_two_squares_are_alive_at_the_peak(squares):
    assert len(squares["alive"]) == 2
    assert 2 * MIB <= squares["peak"] < 2 * MIB + 4096


def test_the_first_moment_of_several_that_are_near(squares):
    # Two matrices are alive when the second is made. Two matrices and a number are alive when they
    # are multiplied again.
    assert squares["near"] == ["first", "second"]


def test_running_sums_are_those_of_the_events(squares):
    for kind, total in (("requested", "running"), ("chunk", "allocated")):
        sums = list(itertools.accumulate(getattr(event, kind) for event in squares["events"]))
        assert sums == [getattr(event, total) for event in squares["events"]]


def test_what_is_released_was_allocated_before(squares):
    alive: dict[int, int] = {}
    for event in squares["events"]:
        if event.requested > 0:
            assert event.buffer not in alive
            assert event.chunk >= event.requested
            alive[event.buffer] = event.requested
        else:
            assert alive.pop(event.buffer) == -event.requested


def test_chunks_are_those_that_the_allocator_counts(squares):
    assert squares["chunks"] == pytest.approx(squares["measured"], rel=0.01)


def silent() -> str:
    import tensorflow as tf

    try:
        allocation_events(lambda: tf.zeros([4]).numpy(), device="/device:GPU:7")
    except MeasurementError as error:
        return str(error)
    return ""


def test_a_device_that_notes_nothing_is_named():
    message = fresh("tests.project.test_allocation_trace:silent")
    assert "/device:GPU:7" in message
    assert "TF_CPU_ALLOCATOR_USE_BFC" in message
