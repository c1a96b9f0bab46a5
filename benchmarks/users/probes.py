"""Functions that run in fresh processes: measure and compare a program in one mode.  JSON out."""

from __future__ import annotations

import importlib
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from benchmarks.users.base import Program
from graph_tools.memory.measure import PeakMeasurement, measure_peak

#: Steps before the first measured one, and measured steps.
WARMUP, STEPS = 2, 5
#: Steps of ``fit`` to compare with plain ones.
FITTED = 2


def measured(program: str, options: dict[str, Any] | None, *, compare: bool) -> dict[str, Any]:
    """Measure a program, plain (``options=None``) or patched with ``options``.

    ``program`` is ``"module:function"`` of this package. ``compare``: whether to compare its
    results with plain ones, too, to the bit.
    """
    from memsaving_gradients.errors import BudgetError

    made = _build(program)
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            peak, seconds, plans = (_fit if made.step is None else _run)(made, options)
        except BudgetError as error:
            return {"refused": _refusal(error)}
    result = {
        "peak": peak.peak,
        "peaks": peak.peaks,
        "seconds": statistics.median(seconds[WARMUP:]),
        "total": time.perf_counter() - begun,
        "plans": [_said(plan) for plan in plans],
        "warnings": [f"{w.category.__name__}: {w.message}" for w in caught if _is_ours(w.category)],
    }
    if compare:
        result["different"] = _different(program, options or {})
    return result


def _build(program: str) -> Program:
    module, _, function = program.partition(":")
    found: Program = getattr(importlib.import_module(f"benchmarks.users.{module}"), function)()
    return found


def _is_ours(category: type) -> bool:
    return category.__module__.startswith("memsaving_gradients")


def _refusal(error: Any) -> dict[str, Any]:
    return {"budget": error.budget, "least": error.least, "fraction": error.fraction}


def _said(plan: Any) -> dict[str, Any]:
    """Return the promises of a plan, in bytes of chunks."""
    names = ("mode", "allocated_plain", "allocated", "budget", "whole_step", "clones", "loops")
    more = ("extra_time", "assumed_batch")
    margin = 0.0 if plan.simulation is None else plan.simulation.margin
    return {name: getattr(plan, name) for name in (*names, *more)} | {"margin": margin}


def _run(
    made: Program, options: dict[str, Any] | None
) -> tuple[PeakMeasurement, list[float], Sequence[Any]]:
    """Trace a step as a ``tf.function``, and run it."""
    assert made.step is not None
    step = tf.function(made.step)
    plans: Sequence[Any] = ()
    if options is None:
        step.get_concrete_function(*made.batch)
    else:
        import memsaving_gradients as ms

        with ms.patched(**options):
            step.get_concrete_function(*made.batch)
        plans = ms.plans(step)
    seconds: list[float] = []

    def timed() -> Any:
        begun = time.perf_counter()
        found = [loss.numpy() for loss in tf.nest.flatten(step(*made.batch))]
        seconds.append(time.perf_counter() - begun)
        return found

    return measure_peak(timed, warmup=WARMUP, steps=STEPS), seconds, plans


def _fit(
    made: Program, options: dict[str, Any] | None
) -> tuple[PeakMeasurement, list[float], Sequence[Any]]:
    """Train a model by ``fit``."""
    import keras

    class Meter(keras.callbacks.Callback):
        """A meter of the peak and the time of each step."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            before.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
            tf.config.experimental.reset_memory_stats("CPU:0")
            seconds.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds[-1] = time.perf_counter() - seconds[-1]
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before[-1])

    before, seconds, peaks = list[int](), list[float](), list[int]()
    # Tracing and compilation must not count: they happen in the first steps, which warm up.
    saving = _callbacks(options)
    steps = WARMUP + STEPS
    made.model.fit(_endless(made), steps_per_epoch=steps, verbose=0, callbacks=[*saving, Meter()])
    kept = tuple(peaks[WARMUP:])
    plans = saving[0].plans if saving else ()
    return PeakMeasurement(max(kept), kept, before[WARMUP]), seconds, plans


def _callbacks(options: dict[str, Any] | None) -> list[Any]:
    if options is None:
        return []
    import memsaving_gradients as ms

    return [ms.keras.MemorySavingGradients(**options)]


def _endless(made: Program) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(made.batch).repeat()


def _different(program: str, options: dict[str, Any]) -> str:
    """Return how results differ from plain ones under op determinism; ``""``: they do not.

    Under op determinism other ops may run: if it makes a budget refused, the least one is used.
    """
    from memsaving_gradients.errors import BudgetError
    from memsaving_gradients.testing import assert_same_gradients

    def compare(options: dict[str, Any]) -> str:
        made = _build(program)
        if made.step is None:
            return _compare_fits(program, options)
        try:
            assert_same_gradients(made.step, *made.batch, **options)
        except AssertionError as error:
            return str(error)[:600]
        return ""

    try:
        with _quiet():
            return compare(options)
    except BudgetError as error:
        with _quiet():
            return compare({**options, "budget": error.least})
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:600]


def _compare_fits(program: str, options: dict[str, Any]) -> str:
    from graph_tools.tf_private import config

    def trained(options: dict[str, Any] | None) -> tuple[list[float], list[Any]]:
        made = _build(program)
        quiet = config.without_memory_optimizer() if options is None else nullcontext()
        with config.deterministic(), quiet:
            history = made.model.fit(
                _endless(made),
                epochs=FITTED,
                steps_per_epoch=1,
                verbose=0,
                callbacks=_callbacks(options),
            )
        return history.history["loss"], [v.numpy().tobytes() for v in made.model.variables]

    plain, ours = trained(None), trained(options)
    if plain[0] != ours[0]:
        return f"losses are {ours[0]}, and TensorFlow's are {plain[0]}"
    names = [v.path for v in _build(program).model.variables]
    far = [name for name, a, b in zip(names, plain[1], ours[1], strict=True) if a != b]
    return f"after {FITTED} steps, variables differ: {', '.join(far[:5])}" if far else ""


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
