"""Peaks and times of our steps and plain ones: the table of `benchmarks.claims.cases`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims.cases import CASES, CLONES, Case
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from benchmarks.tables import mark

#: Bars for the simulation over all cases: the median and the worst error.
SIMULATION = (0.10, 0.25)
#: A control (plain against plain) farther from 1 than this means that the machine was busy.
NOISE = 0.05
_CASES = {case.name: case for case in CASES}


def run(job: Job) -> dict[str, Any]:
    """Measure a case: the plain peak, ours, and the ratio of times if it has one.

    Returns
    -------
    dict
        ``"plain"`` and ``"ours"`` from `benchmarks.probes.peak`, ``"time"`` from
        `benchmarks.probes.ratio` or ``None``, ``"figures"`` and ``"errors"``.
    """
    case = _CASES[job.row]
    what = {"model": case.model, "options": case.options, "how": case.how}
    ours = {**what, "checkpoints": case.checkpoints}
    result: dict[str, Any] = {
        "plain": _peak(what, False),
        "ours": _peak(ours, True),
        "time": fresh("probes:ratio", **ours, pairs=case.pairs) if case.pairs else None,
    }
    result["figures"] = figures(case, result)
    result["errors"] = simulation_errors(result)
    return result


def _peak(what: dict[str, Any], ours: bool) -> dict[str, Any]:
    result: dict[str, Any] = fresh("probes:peak", **what, ours=ours)
    return result


def figures(case: Case, result: Mapping[str, Any]) -> dict[str, float]:
    """Return every figure of this case that may have a bar."""
    plain, ours = result["plain"], result["ours"]
    added = ours["seconds"]["gradients"] - ours["seconds"]["tensorflow"]
    values: dict[str, float] = {
        "MB": ours["peak"] / 1e6,
        "peak": ours["peak"] / plain["peak"],
        "planning": added / ours["seconds"]["tensorflow"],
    }
    if case.model.endswith("_chain"):
        values["units"] = ours["peak"] / (4 * case.options.get("size", 2**18))
    if result["time"]:
        values["time"] = result["time"]["ratio"]
    if case.how == "xla":
        values["XLA's largest"] = ours["xla"]["largest"] / plain["xla"]["largest"]
    if case.instruction:
        counts = [side["xla"]["instructions"].get(case.instruction, 0) for side in (ours, plain)]
        values[CLONES] = float(counts[0] - counts[1])
    return values


def simulation_errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the errors of simulated peaks, as fractions of the measured ones.

    Negative: the simulation promised too little. Both figures count the allocator's chunks. Under
    XLA the measured figure is its largest allocation, which the allocator has not rounded.
    """
    plan = result["ours"]["plan"]
    if plan is None:
        return {}
    errors = {}
    for side, suffix in (("plain", "_plain"), ("ours", "")):
        if largest := result[side].get("xla", {}).get("largest"):
            errors[side] = plan["peak" + suffix] / largest - 1
        else:
            errors[side] = plan["allocated" + suffix] / result[side]["peak"] - 1
    return errors


def judged(case: Case, result: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a case that have bars."""
    return [
        (
            Figure(figure, result["figures"][figure], None, least=bar)
            if figure == CLONES
            else Figure(figure, result["figures"][figure], bar)
        )
        for figure, bar in case.bars.items()
    ]


def bars(results: Results) -> list[Figure]:
    """Return the figures of all cases that have bars."""
    return [
        replace(figure, what=f"{row}: {figure.what}")
        for row, result in results.items()
        for figure in judged(_CASES[row], result)
    ]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each bar, and for each case without bars."""
    for case in CASES:
        if case.name not in results:
            continue
        result = results[case.name]
        sizes = (f"{result[side]['peak'] / 1e6:,.1f}" for side in ("plain", "ours"))
        starts: tuple[str, ...] = (case.name, case.checkpoints, *sizes)
        ends = tuple(_ends(result))
        for bar in [tuple(_bar(case, one)) for one in judged(case, result)] or [("",) * 4]:
            yield (*starts, *bar, *ends)
            starts = ends = ("",) * 4


def _bar(case: Case, figure: Figure) -> Iterator[str]:
    clones = figure.what == CLONES
    yield f"{CLONES} ({case.instruction})" if clones else figure.what
    yield f"{figure.value:.3g}"
    yield f"≥ {figure.least:.3g}" if clones else f"≤ {figure.limit:.3g}"
    yield mark(figure.passed)


def _ends(result: Mapping[str, Any]) -> Iterator[str]:
    ratio, errors, plan = result["time"], result["errors"], result["ours"]["plan"]
    yield f"{ratio['ratio']:.3f}" if ratio else ""
    yield _control(ratio["control"]) if ratio else ""
    yield f"{1 + errors['plain']:.2f} {1 + errors['ours']:.2f}" if errors else ""
    yield f"{plan['clones']:,}" if plan else "none"


def _control(value: float) -> str:
    """Return the control as text, in red if the machine was too busy for a reliable ratio."""
    return f"{value:.3f}" if abs(value - 1) <= NOISE else f"[red]{value:.3f}[/red]"


def notes(results: Results) -> Iterator[str]:
    """Yield warnings of steps, and the errors of the simulation."""
    for name, result in results.items():
        for warning in result["ours"].get("warnings", ()):
            yield f"[red]{name}[/red]: {warning}"
    errors = [
        (abs(error), f"{name} ({side})")
        for name, result in results.items()
        for side, error in result["errors"].items()
    ]
    if not errors:
        return
    median = statistics.median(error for error, _ in errors)
    worst, where = max(errors)
    style = "green" if median <= SIMULATION[0] and worst <= SIMULATION[1] else "red"
    yield (
        f"simulated against measured peak: median error [{style}]{median:.1%}[/{style}], worst "
        f"[{style}]{worst:.1%}[/{style}] in {where} "
        f"(bars {SIMULATION[0]:.0%} and {SIMULATION[1]:.0%}), {len(errors)} peaks"
    )


COLUMNS = Columns(
    "memory and time, ours against plain",
    "case | mode | plain MB | ours MB | figure | value | bar |  | time | control | sim/real |"
    " clones",
    lines,
    text=("mode",),
)
EXPERIMENT = Experiment(
    "claims",
    rows=lambda settings: _CASES,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    bars_in_columns=True,
    notes=notes,
    file="latest",
)
