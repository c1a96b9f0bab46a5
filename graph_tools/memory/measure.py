"""Measurements of a real step: the allocator's peak, and ratios of times.

A peak is a fact about a process, not about a graph: kernels ask for scratch space, the allocator
rounds sizes up, threads reorder ops, and earlier work has left its mark on the free lists. Hence
three tools. `measure_peak` asks TensorFlow's own allocator. It takes the worst of several steps
after a warm-up, because the order of execution moves a peak from run to run. `in_fresh_process`
gives each measurement a process of its own, with the one allocator for the CPU that keeps
statistics. `time_ratio` interleaves two callables and times one of them twice a round, so that the
ratio is reported together with the noise of the machine: a ratio nearer to one than the control
says nothing.

Cost: a measurement is ``warmup + steps`` calls, a ratio ``3 * (pairs + warmup)`` calls, a process
3-10 seconds for importing TensorFlow.

Not checked: whether the callable does any work. A ``tf.function`` whose results are not returned,
or a session that fetches ``tf.group(...)``, is pruned to nothing and peaks at nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_tools.errors import GraphToolsError

__all__ = [
    "EndedBySignalError",
    "MeasurementError",
    "PeakMeasurement",
    "TimeRatio",
    "in_fresh_process",
    "measure_peak",
    "time_ratio",
]

# The BFC allocator counts; the default allocator of the CPU counts only where oneDNN is on.
CHILD_ENVIRONMENT = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


class MeasurementError(GraphToolsError, RuntimeError):
    """A quantity cannot be measured here, or the measuring process failed."""


class EndedBySignalError(MeasurementError):
    """A signal ended the measuring process, as happens when memory runs out and no library handles
    it."""


@dataclass(frozen=True)
class PeakMeasurement:
    """Transient peaks of the measured steps, in bytes.

    Attributes
    ----------
    peak
        The worst step: the most bytes allocated at any time of it, minus those allocated before it.
    peaks
        The peak of every measured step, in order.
    baseline
        Bytes that were allocated before the first measured step: variables, fed inputs, constants.
    """

    peak: int
    peaks: tuple[int, ...]
    baseline: int

    def __str__(self) -> str:
        spread = f", {min(self.peaks) / 2**20:.1f} at best" if len(set(self.peaks)) > 1 else ""
        return f"{self.peak / 2**20:.1f} MiB above {self.baseline / 2**20:.1f} MiB{spread}"


@dataclass(frozen=True)
class TimeRatio:
    """The time of ``a`` as a multiple of the time of ``b``.

    Attributes
    ----------
    ratio
        Median time of ``a`` over median time of ``b``.
    control
        The same ratio of ``b`` to itself: its distance from 1 is the noise of `ratio`.
    seconds_a, seconds_b
        The two medians, in seconds.
    """

    ratio: float
    control: float
    seconds_a: float
    seconds_b: float

    def __str__(self) -> str:
        return (
            f"{self.ratio:.3f} ({self.seconds_a:.4g} s against {self.seconds_b:.4g} s, "
            f"control {self.control:.3f})"
        )


def measure_peak(
    fn: Callable[[], object], *, device: str = "CPU:0", warmup: int = 2, steps: int = 5
) -> PeakMeasurement:
    """Measure the most memory that one call of `fn` takes on `device`.

    Parameters
    ----------
    fn
        A step: it calls a ``tf.function`` or runs a session. Its result is kept until the step is
        over and released before the next.
    device
        As ``tf.config.experimental.get_memory_info`` names devices.
    warmup
        Calls before the first measured one. The first call of a ``tf.function`` traces, and the
        first run of a graph allocates its constants.
    steps
        Measured calls.

    Raises
    ------
    MeasurementError
        The allocator of `device` keeps no statistics, or the device does not exist.
    ValueError
        `warmup` is negative, or `steps` is not positive.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = tf.ones([2**18])
    >>> step = tf.function(lambda x: tf.reduce_sum(tf.sort(x)))
    >>> measure_peak(lambda: step(x)).peak >= 2**20
    True
    """
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    import tensorflow as tf

    _allocated(device)  # complain before any work is done
    for _ in range(warmup):
        fn()
    peaks: list[int] = []
    baselines: list[int] = []
    for _ in range(steps):
        tf.test.experimental.sync_devices()
        before, _ = _allocated(device)
        tf.config.experimental.reset_memory_stats(device)
        result = fn()
        tf.test.experimental.sync_devices()
        _, peak = _allocated(device)
        del result
        baselines.append(before)
        peaks.append(peak - before)
    return PeakMeasurement(peak=max(peaks), peaks=tuple(peaks), baseline=baselines[0])


def _allocated(device: str) -> tuple[int, int]:
    """Return the bytes allocated on `device` now, and the most since its statistics were reset."""
    import tensorflow as tf

    try:
        info = tf.config.experimental.get_memory_info(device)
    except ValueError as error:
        if "No matching devices" in str(error):
            names = [d.name.split("/device:")[-1] for d in tf.config.list_logical_devices()]
            raise MeasurementError(
                f"device {device!r} does not exist; use one of {names}"
            ) from error
        raise MeasurementError(
            f"the allocator of {device!r} keeps no statistics ({error}). Set "
            "TF_CPU_ALLOCATOR_USE_BFC=1 in the environment before TensorFlow is imported, or "
            "measure in a process made by in_fresh_process, which sets it."
        ) from error
    return info["current"], info["peak"]


def time_ratio(
    a: Callable[[], object], b: Callable[[], object], *, pairs: int = 15, warmup: int = 1
) -> TimeRatio:
    """Measure the time of `a` as a multiple of the time of `b`, with `b` against itself as control.

    Every round times `b`, `a` and `b` again, so a slow drift of the machine affects both alike.
    The two runs of `b` swap their places in the control from round to round.

    Parameters
    ----------
    a, b
        Steps that return when their work is done: fetch a value, do not only start it.
    pairs
        Rounds that count.
    warmup
        Rounds before the rounds that count.

    Raises
    ------
    ValueError
        `pairs` is not positive, or `warmup` is negative.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    for _ in range(warmup):
        for step in (b, a, b):
            step()
    times_a: list[float] = []
    times_b: tuple[list[float], list[float]] = ([], [])
    for round_ in range(pairs):
        times_b[round_ % 2].append(_seconds(b))
        times_a.append(_seconds(a))
        times_b[(round_ + 1) % 2].append(_seconds(b))
    seconds_a = statistics.median(times_a)
    seconds_b = statistics.median(times_b[0] + times_b[1])
    return TimeRatio(
        ratio=seconds_a / seconds_b,
        control=statistics.median(times_b[0]) / statistics.median(times_b[1]),
        seconds_a=seconds_a,
        seconds_b=seconds_b,
    )


def _seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def in_fresh_process(
    target: str,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """Call a function in a new Python process that counts memory on the CPU.

    The child has this process' environment, with ``TF_CPU_ALLOCATOR_USE_BFC=1`` and TensorFlow's
    log off, its ``sys.path`` and its working directory. The function's standard output goes to this
    process' standard error.

    Parameters
    ----------
    target
        ``"package.module:function"``.
    kwargs
        Its arguments: anything that JSON can carry.
    env
        More environment variables for the child; ``None`` as a value removes one.
    timeout
        Seconds after which the child is ended.

    Returns
    -------
    object
        The function's result, as JSON carries it: a dataclass comes back as a dict, a tuple as a
        list.

    Raises
    ------
    MeasurementError
        The child failed (its traceback is in the message) or did not finish in time. Or a signal
        ended it (`EndedBySignalError`), as happens when memory runs out.
    ValueError
        `target` is not of the form above.
    """
    module, colon, function = target.partition(":")
    if not (module and colon and function):
        raise ValueError(f"target must have the form 'package.module:function', got {target!r}")
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        answer = Path(folder, "answer.json")
        request = json.dumps(
            {
                "path": sys.path,
                "module": module,
                "function": function,
                "kwargs": dict(kwargs or {}),
                "answer": str(answer),
            }
        )
        try:
            child = subprocess.run(
                [sys.executable, "-c", _CHILD],
                input=request,
                text=True,
                env=environment,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{target} did not finish within {timeout} seconds") from error
        if child.returncode < 0:
            name = signal.Signals(-child.returncode).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            raise EndedBySignalError(f"{target} was ended by {name}{hint}\n{child.stderr[-4000:]}")
        if not answer.exists():
            raise MeasurementError(
                f"{target} exited with code {child.returncode} and returned no result\n"
                f"{child.stderr[-4000:]}"
            )
        reply = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in reply:
        raise MeasurementError(f"{target} raised an error in its own process\n{reply['error']}")
    return reply["result"]


# The path comes first: without it the child could not find this module when tests run from source.
_CHILD = """\
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
from graph_tools.memory.measure import _answer
_answer(request)
"""


def _answer(request: dict[str, Any]) -> None:
    """Call the function in the child, and write its result or traceback to the requested file."""
    import traceback

    reply: dict[str, Any]
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        reply = {"result": function(**request["kwargs"])}
        text = json.dumps(reply, default=_plain)
    except Exception:
        text = json.dumps({"error": traceback.format_exc()})
    Path(request["answer"]).write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a form of `value` that JSON can carry: fields of dataclasses, items of arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return value.tolist()
    if hasattr(value, "numpy"):  # eager tensors
        return value.numpy().tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent back from a process: {value!r}")


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
