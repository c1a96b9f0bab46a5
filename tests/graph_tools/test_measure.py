"""Peaks are whole tensors, ratios come from a known clock, processes are really fresh."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from graph_tools.errors import GraphToolsError
from graph_tools.memory import measure
from graph_tools.memory.measure import (
    MeasurementError,
    PeakMeasurement,
    TimeRatio,
    in_fresh_process,
    measure_peak,
    time_ratio,
)

UNIT = 4 * 2**18  # bytes of a tensor of 2**18 floats: chunks of powers of two are not rounded up


def chain_peak(length: int) -> PeakMeasurement:
    """Return the peak of the gradient of a chain of ``length`` equal ops."""
    x = tf.linspace(-1.0, 1.0, 2**18)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        y = x
        for _ in range(length):
            y = tf.tanh(y)
        return tf.reduce_sum(tf.square(tf.gradients(y, x)[0]))

    return measure_peak(lambda: step(x).numpy())


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def peak_without_statistics() -> str:
    try:
        measure_peak(lambda: None)
    except MeasurementError as error:
        return str(error)
    return "no error"


LENGTHS = [8, 24]
NAMES = ["TF_CPU_ALLOCATOR_USE_BFC", "MEASURE_OLD", "MEASURE_GONE", "MEASURE_NEW"]


def child(lengths: list[int]) -> tuple[int, list[str | None], list[PeakMeasurement]]:
    """Return the process id, part of the environment, and peaks of chains (in a fresh process)."""
    environment = [os.environ.get(name) for name in NAMES]
    return os.getpid(), environment, [chain_peak(length) for length in lengths]


@pytest.fixture(scope="module")
def seen() -> tuple[Any, ...]:
    """Return what a child sees of its environment, which has one variable more than this process,
    and one less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CPU_ALLOCATOR_USE_BFC", raising=False)
        for name in ("MEASURE_OLD", "MEASURE_GONE"):
            patch.setenv(name, "old")
        found = in_fresh_process(
            "tests.graph_tools.test_measure:child",
            {"lengths": LENGTHS},
            env={"MEASURE_GONE": None, "MEASURE_NEW": "2"},
        )
    return tuple(found)


# measure_peak


def test_peak_of_chain_is_its_residuals(seen: Any) -> None:
    for length, found in zip(LENGTHS, seen[2], strict=True):
        # Every op's output is read by its gradient; the gradient reuses buffers that have died.
        assert length * UNIT <= found["peak"] <= (length + 2) * UNIT
        assert found["baseline"] >= UNIT, "the input was there before"


def test_peak_is_the_worst_of_the_measured_steps() -> None:
    sizes = iter([2**22, 2**22, 2**10, 2**18, 2**10])
    found = measure_peak(lambda: tf.zeros([next(sizes)]) + 1.0, warmup=2, steps=3)
    assert len(found.peaks) == 3
    assert found.peak == found.peaks[1] == max(found.peaks)
    assert found.peak < 4 * 2**22, "the larger warm-up steps must not count"


def test_result_of_one_step_does_not_count_in_the_next() -> None:
    found = measure_peak(lambda: tf.zeros([2**18]) + 1.0, warmup=1, steps=4)
    assert len(set(found.peaks)) == 1


@pytest.mark.parametrize(("argument", "value"), [("warmup", -1), ("steps", 0)])
def test_peak_rejects_counts(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}.*{value}"):
        measure_peak(lambda: None, **{argument: value})


def test_unknown_device_is_named_beside_those_there_are() -> None:
    with pytest.raises(MeasurementError, match=r"'GPU:7'.*CPU:0") as caught:
        measure_peak(lambda: pytest.fail("must not run"), device="GPU:7")
    assert isinstance(caught.value, GraphToolsError)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_missing_statistics_name_the_way_out(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps no statistics, or a stand-in raises TensorFlow's error for this case."""

    def missing(device: str) -> None:
        raise ValueError(f"Allocator stats not available for device '{device}'")

    if real:
        message = in_fresh_process(
            "tests.graph_tools.test_measure:peak_without_statistics",
            env={"TF_CPU_ALLOCATOR_USE_BFC": None, "TF_ENABLE_ONEDNN_OPTS": "0"},
        )
    else:
        monkeypatch.setattr(tf.config.experimental, "get_memory_info", missing)
        monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", missing)
        message = peak_without_statistics()
    assert "'CPU:0' keeps no statistics" in message
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in message


# in_fresh_process


def test_process_is_another_one_with_the_counting_allocator(seen: Any) -> None:
    process, (counting, *_), _ = seen
    assert process != os.getpid()
    assert counting == "1"


def test_environment_can_be_added_to_and_taken_from(seen: Any) -> None:
    _, (_, *found), _ = seen
    assert found == ["old", None, "2"]


@pytest.fixture(params=["here", pytest.param("itself", marks=pytest.mark.slow)])
def child_or_what_it_does(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the child import TensorFlow, or do its work in this process."""

    def run(command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        measure._answer(json.loads(input))
        return subprocess.CompletedProcess(command, 0, "", "")

    if request.param == "here":
        monkeypatch.setattr(measure.subprocess, "run", run)


@pytest.mark.usefixtures("child_or_what_it_does")
def test_error_of_the_child_comes_with_its_traceback() -> None:
    with pytest.raises(MeasurementError, match=r"json:loads.*(?s:.*)JSONDecodeError"):
        in_fresh_process("json:loads", {"s": "{"})


@pytest.mark.usefixtures("child_or_what_it_does")
def test_result_that_json_cannot_carry_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="a module cannot be sent back"):
        in_fresh_process("importlib:import_module", {"name": "os"})


@pytest.mark.parametrize(
    "program",
    ["import os; os.abort()", pytest.param(measure._CHILD, marks=pytest.mark.slow)],
    ids=["at once", "itself"],
)
def test_child_ended_by_a_signal(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_CHILD", program)
    with pytest.raises(MeasurementError, match="ended by SIGABRT"):
        in_fresh_process("os:abort")


def test_child_that_takes_too_long() -> None:
    with pytest.raises(MeasurementError, match=r"within 0.5 seconds"):
        in_fresh_process("tests.graph_tools.test_measure:sleep", {"seconds": 60}, timeout=0.5)


@pytest.mark.parametrize("target", ["os", "os:", ":getpid", "os.getpid"])
def test_target_must_name_module_and_function(target: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        in_fresh_process(target)


# time_ratio


class Clock:
    """A clock that moves only in steps; `drift` makes each second longer than the one before."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now = 0.0
        self.calls = ""
        self.drift = drift

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls += name
            self.now += seconds * (1 + self.drift * len(self.calls))

        return run


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(getattr(request, "param", 0.0))
    monkeypatch.setattr(measure.time, "perf_counter", clock)
    return clock


def test_ratio_is_that_of_medians(clock: Clock) -> None:
    found = time_ratio(clock.step("a", 3.0), clock.step("b", 2.0), pairs=3)
    assert found == TimeRatio(ratio=1.5, control=1.0, seconds_a=3.0, seconds_b=2.0)
    assert clock.calls == "bab" * 4, "one round of warm-up, then plain, ours, plain"


@pytest.mark.parametrize("clock", [0.01], indirect=True)
def test_drift_of_the_machine_cancels(clock: Clock) -> None:
    found = time_ratio(clock.step("a", 3.0), clock.step("b", 2.0), pairs=15)
    assert found.ratio == pytest.approx(1.5, rel=1e-3)
    assert found.control == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("argument", "value"), [("pairs", 0), ("warmup", -1)])
def test_ratio_rejects_counts(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}.*{value}"):
        time_ratio(lambda: None, lambda: None, **{argument: value})


def test_measurements_print_briefly() -> None:
    assert str(PeakMeasurement(3 * 2**20, (2**20, 3 * 2**20), 2**20)) == (
        "3.0 MiB above 1.0 MiB, 1.0 at best"
    )
    assert str(TimeRatio(1.5, 1.01, 3.0, 2.0)) == "1.500 (3 s against 2 s, control 1.010)"
