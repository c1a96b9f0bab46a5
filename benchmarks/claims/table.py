"""Prints results beside their bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import mark
from benchmarks.claims.cases import Bar, Case
from benchmarks.claims.runner import verdicts

__all__ = ["missed", "print_results"]

Results = Mapping[str, Mapping[str, Any]]

#: What the simulation is held to, over all cases: the median and the worst error.
SIMULATION = (0.10, 0.25)
#: How far plain against plain may be from 1.
NOISE = 0.05


def print_results(cases: Iterable[Case], results: Results, console: Console | None = None) -> None:
    """Print one row for each bar, and the errors of the simulation below."""
    console = console or Console(width=140)
    table = Table(title="memory and time, ours against plain", header_style="bold")
    table.add_column("case", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for heading in ("plain MB", "ours MB", "figure", "value", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for heading in ("time", "control", "sim/real", "clones"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        result = results.get(case.name)
        if result is None:
            continue
        if "failed" in result:
            table.add_row(case.name, case.checkpoints, "", "", "", "", "", "[red]failed[/red]")
            continue
        for i, row in enumerate(_rows(case, result)):
            table.add_row(*(row if i == 0 else ("", "", "", "", *row[4:8], "", "", "", "")))
    console.print(table)
    for name, result in results.items():
        if "failed" in result:
            console.print(f"[red]{name} failed[/red]: {result['failed']}", highlight=False)
        for warning in result.get("ours", {}).get("warnings", ()):
            console.print(f"[red]{name}[/red]: {warning}", highlight=False)
    _print_errors(results, console)


def missed(cases: Iterable[Case], results: Results) -> list[str]:
    """Names of the cases among `results` that failed or miss a bar."""
    return [
        case.name
        for case in cases
        if (result := results.get(case.name)) is not None
        and ("failed" in result or not all(passed for *_, passed in verdicts(case, result)))
    ]


def _rows(case: Case, result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    errors, plan, ratio = result["errors"], result["ours"]["plan"], result["time"]
    ends = (
        f"{ratio['ratio']:.3f}" if ratio else "",
        _control(ratio["control"]) if ratio else "",
        f"{1 + errors['plain']:.2f} {1 + errors['ours']:.2f}" if errors else "",
        f"{plan['clones']:,}" if plan else "none",
    )
    starts = (
        case.name,
        case.checkpoints,
        f"{result['plain']['peak'] / 1e6:,.1f}",
        f"{result['ours']['peak'] / 1e6:,.1f}",
    )
    return [
        (*starts, _label(case, bar), f"{value:.3g}", _limit(bar), mark(passed), *ends)
        for bar, value, passed in verdicts(case, result)
    ] or [(*starts, "", "", "", "", *ends)]


def _control(value: float) -> str:
    """In red where the machine was too busy for the ratio beside it to mean much."""
    return f"{value:.3f}" if abs(value - 1) <= NOISE else f"[red]{value:.3f}[/red]"


def _label(case: Case, bar: Bar) -> str:
    return f"{bar.figure} ({case.instruction})" if bar.figure == "clones" else bar.figure


def _limit(bar: Bar) -> str:
    return f"{'≥' if bar.figure == 'clones' else '≤'} {bar.limit:.3g}"


def _print_errors(results: Results, console: Console) -> None:
    errors = [
        (abs(error), f"{name} ({side})")
        for name, result in results.items()
        for side, error in result.get("errors", {}).items()
    ]
    if not errors:
        return
    median = statistics.median(error for error, _ in errors)
    worst, where = max(errors)
    limits = f"(bars {SIMULATION[0]:.0%} and {SIMULATION[1]:.0%})"
    style = "green" if median <= SIMULATION[0] and worst <= SIMULATION[1] else "red"
    console.print(
        f"simulated against measured peak: median error [{style}]{median:.1%}[/{style}], worst "
        f"[{style}]{worst:.1%}[/{style}] in {where} {limits}, {len(errors)} peaks",
        highlight=False,
    )
