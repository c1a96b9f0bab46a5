"""What runs in the fresh processes: one peak, or one ratio of times.  JSON in, JSON out."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

from benchmarks import xla
from benchmarks.steps import Step, make_step
from graph_tools.measure import measure_peak, time_ratio

__all__ = ["peak", "ratio"]

# By name: a plain step does not import the package that it is compared with.
_WARNING = "NothingSavedWarning"


def peak(
    model: str,
    options: dict[str, Any],
    checkpoints: Any = None,
    *,
    ours: bool,
    how: str = "function",
    dump: str | None = None,
    warmup: int = 2,
    steps: int = 5,
) -> dict[str, Any]:
    """The transient peak of one step, with what the plan promised and what building it cost.

    `dump` is the folder that XLA was told to write to, if any.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make_step(model, options, checkpoints, ours=ours, how=how)
    start = time.perf_counter()
    sums = step.run()
    first = time.perf_counter() - start
    measured = measure_peak(step.run, warmup=warmup - 1, steps=steps)
    result: dict[str, Any] = {
        "peak": measured.peak,
        "peaks": measured.peaks,
        "baseline": measured.baseline,
        "ops": len(step.graph.get_operations()),
        "seconds": {**step.seconds, "first_step": first},
        "squares": float(sum(sums)),
        "plan": _plan(step) if ours else None,
        "warnings": [str(w.message) for w in caught if w.category.__name__ == _WARNING],
    }
    if dump is not None:
        result["xla"] = {
            "largest": xla.largest_allocation(dump),
            "instructions": xla.instruction_counts(dump),
        }
    return result


def ratio(
    model: str,
    options: dict[str, Any],
    checkpoints: Any = None,
    *,
    how: str = "function",
    pairs: int = 15,
) -> dict[str, Any]:
    """Time of our step over time of the plain one, in one process."""
    plain = make_step(model, options, ours=False, how=how)
    ours = make_step(model, options, checkpoints, ours=True, how=how)
    return dataclasses.asdict(time_ratio(ours.run, plain.run, pairs=pairs))


def _plan(step: Step) -> dict[str, Any] | None:
    import memsaving_gradients as ms

    plans = ms.plans(step.graph)
    if not plans:
        return None
    newest = plans[-1]
    return {
        name: getattr(newest, name)
        for name in (
            "mode",
            "peak",
            "peak_plain",
            "allocated",
            "allocated_plain",
            "extra_time",
            "clones",
            "gating",
        )
    }
