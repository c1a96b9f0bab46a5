"""Functions that run in fresh processes: one peak, or one ratio of times.  JSON in, JSON out."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.allocation_trace import allocation_events, requested_peak
from benchmarks.steps import Step, make_step
from graph_tools.memory.measure import measure_peak, time_ratio
from graph_tools.xla.program import compiled

# A name, not the class: a plain step does not import the package that it is compared with.
_WARNING = "NothingSavedWarning"


def peak(
    model: str,
    options: dict[str, Any],
    checkpoints: Any = None,
    *,
    ours: bool,
    how: str = "function",
    warmup: int = 2,
    steps: int = 5,
    settings: dict[str, Any] | None = None,
    save: str | None = None,
    requested: bool = False,
) -> dict[str, Any]:
    """Return the transient peak of one step, the figures of its plan, and the seconds to build it.

    `settings` are for `make_step`; `save`: file for the plan; `requested`: whether to measure the
    peak of requested bytes, too.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make_step(model, options, checkpoints, ours=ours, how=how, settings=settings)
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
        "plan": plan_of(step) if ours else None,
        "warnings": [str(w.message) for w in caught if w.category.__name__ == _WARNING],
    }
    if how == "xla":
        program = compiled(step.graph, batch=1)
        result["xla"] = {
            "largest": program.assignment.largest,
            "instructions": program.module.counts(),
        }
    if requested:
        result["requested"] = _requested(step.run)
    if save is not None:
        import memsaving_gradients as ms

        ms.plans(step.graph)[-1].save(save)
    return result


def ratio(
    model: str,
    options: dict[str, Any],
    checkpoints: Any = None,
    *,
    how: str = "function",
    pairs: int = 15,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ratio of the time of our step to the plain step's, in one process."""
    plain = make_step(model, options, ours=False, how=how)
    ours = make_step(model, options, checkpoints, ours=True, how=how, settings=settings)
    return dataclasses.asdict(time_ratio(ours.run, plain.run, pairs=pairs))


def budget_peak(
    model: str,
    options: dict[str, Any],
    *,
    save: str,
    settings: dict[str, Any],
    requested: bool = True,
) -> dict[str, Any]:
    """Return the `peak` within a budget, or as ``"refused"`` the least budget if no plan fits."""
    from memsaving_gradients.errors import BudgetError

    start = time.perf_counter()
    try:
        return peak(model, options, ours=True, settings=settings, save=save, requested=requested)
    except BudgetError as error:
        return {
            "refused": {
                "budget": error.budget,
                "least": error.least,
                "fraction": error.fraction,
                "seconds": time.perf_counter() - start,
            }
        }


def budget_ratio(
    model: str, options: dict[str, Any], *, plan: str, pairs: int, profile: bool
) -> dict[str, Any]:
    """Return the time of a step with a saved plan over the plain step's, and its estimate.

    `profile`: whether the estimate uses measured costs.
    """
    import memsaving_gradients as ms

    plain = make_step(model, options, ours=False)
    ours = make_step(model, options, ours=True, settings={"plan": plan, "profile": profile})
    result = dataclasses.asdict(time_ratio(ours.run, plain.run, pairs=pairs))
    result["predicted"] = ms.plans(ours.graph)[-1].extra_time
    return result


def _requested(run: Callable[[], object]) -> int:
    """Return the peak of requested bytes: the worst of two steps."""
    return max(requested_peak(allocation_events(run)) for _ in range(2))


def plan_of(step: Step) -> dict[str, Any] | None:
    """Return the figures of the newest plan of a step; ``None`` if it has none."""
    import memsaving_gradients as ms
    from memsaving_gradients.budget import chunk_bytes

    plans = ms.plans(step.graph)
    if not plans:
        return None
    newest = plans[-1]
    found = {
        name: getattr(newest, name)
        for name in (
            "mode",
            "peak",
            "peak_plain",
            "allocated",
            "extra_time",
            "clones",
            "gating",
            "planner",
            "budget",
            "planned_for",
            "lower_bound",
            "optimal",
        )
    }
    # It is compared with the worst of several measured steps, so it must not be the least that
    # plain training may take.
    if newest.simulation_plain is not None:
        found["allocated_plain"] = chunk_bytes(newest.simulation_plain, newest.gating)
    return found
