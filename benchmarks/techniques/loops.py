"""``python -m benchmarks.techniques.loops``: long recurrences, kept and replayed.

An LSTM of 1024 units reads a sequence of T vectors of 64 numbers, and its last output is classified; as the loop that Keras makes of it, and up
to T = 256 unrolled. Then the setting in which Chen, Xu, Zhang and Guestrin ("Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174)
measure recurrent networks: four LSTM cells of 1024 units in one recurrence, a batch of 64, inputs of 50 numbers, 5000 classes at the last step.

Peaks are measured in a process each, times as ratios of medians in one process. Steps of the longest sequences take a minute; all of it takes some
hours, so that every figure is written to the results as soon as it is there, and what is there is not measured again (``--again``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Figure, measure_missing, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "loops.json"

#: Of the founding paper's recurrence.
STACKED = {"cells": 4, "batch": 64, "features": 50, "classes": 5000}
PAIRS = 15


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes
    ----------
    name
        For ``--only`` and the results.
    options
        For `benchmarks.networks.sequence.recurrence`.
    settings
        Arguments of ``memsaving_gradients.gradients``; ``None``: plain TensorFlow.
    pairs
        Pairs of steps for a ratio of times; 0: the peak is measured.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    pairs: int = 0


def _rows() -> list[Row]:
    ways: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "segments": {"loops": "segments"},
        "treeverse": {"loops": "treeverse"},
    }
    rows = [
        Row(f"lstm-{length}-{way}", {"length": length}, settings)
        for length in (64, 256, 1024, 4096)
        for way, settings in ways.items()
    ]
    rows += [
        Row(f"unrolled-{length}-{way}", {"length": length, "unroll": True}, settings)
        for length in (64, 128, 256)
        for way, settings in (("plain", None), ("memory", {"checkpoints": "memory"}))
    ]
    rows += [
        Row(f"stacked-{length}-{way}", {"length": length, **STACKED}, settings)
        for length in (64, 1000)
        for way, settings in ways.items()
    ]
    rows += [
        Row(f"time-{length}-{way}", {"length": length}, settings, PAIRS)
        for length in (256, 1024)
        for way, settings in ways.items()
        if settings is not None
    ]
    return rows


ROWS = _rows()


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, print it beside the bars; 1 if a bar is missed."""
    options = _parse(arguments)
    rows = {row.name: row for row in ROWS}
    results = measure_missing(rows, options, lambda name: measure(rows[name]), _shown)
    figures = judge(results)
    write(options.json, {}, figures)
    _print(results, Console())
    print_figures(figures, Console())
    return int(not all(figure.passed for figure in figures))


def measure(row: Row) -> dict[str, Any]:
    """A row's peak, or its ratio of times."""
    what: dict[str, Any] = {"model": "recurrence", "options": row.options}
    if row.pairs:
        what |= {"settings": row.settings, "pairs": row.pairs}
        found: dict[str, Any] = in_fresh_process("benchmarks.probes:ratio", what, ENVIRONMENT)
        return found
    what |= {"settings": row.settings or {}, "ours": row.settings is not None}
    found = in_fresh_process("benchmarks.probes:peak", what, ENVIRONMENT)
    return found


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The bars, as far as there are figures."""
    figures = []

    def compare(what: str, one: str, other: str, most: float) -> None:
        if one in results and other in results:
            share = results[one]["peak"] / results[other]["peak"]
            figures.append(Figure(what, share, most))

    for length in (1024, 4096):
        compare(
            f"segments, peak at T = {length} / at T = 256",
            f"lstm-{length}-segments",
            "lstm-256-segments",
            (length / 256) ** 0.5,
        )
    compare("segments, peak / plain, T = 1024", "lstm-1024-segments", "lstm-1024-plain", 1 / 8)
    compare(
        "treeverse, peak at T = 4096 / at T = 256", "lstm-4096-treeverse", "lstm-256-treeverse", 2
    )
    compare("unrolled, peak at T = 256 / at T = 64", "unrolled-256-memory", "unrolled-64-memory", 2)
    for length, share in ((64, 1 / 4), (1000, 1 / 10)):
        ways = [way for way in ("segments", "treeverse") if f"stacked-{length}-{way}" in results]
        if ways:
            best = min(ways, key=lambda way: results[f"stacked-{length}-{way}"]["peak"])
            what = f"four cells, peak / plain, T = {length}, {best}"
            compare(what, f"stacked-{length}-{best}", f"stacked-{length}-plain", share)
    for length in (256, 1024):
        for way, most in (("segments", 1.40), ("treeverse", 2.5)):
            if f"time-{length}-{way}" in results:
                found = results[f"time-{length}-{way}"]
                what = f"{way}, step time / plain, T = {length} (control {found['control']:.3f})"
                figures.append(Figure(what, found["ratio"], most))
    return figures


def _print(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table(title="recurrences", header_style="bold")
    for heading in ("what", "measured", "planned"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in ROWS:
        if row.name in results:
            plan = results[row.name].get("plan")
            planned = f"{plan['allocated'] / 2**20:.1f} MiB" if plan else ""
            table.add_row(row.name, _shown(results[row.name]), planned)
    console.print(table)


def _shown(result: Mapping[str, Any]) -> str:
    if "ratio" in result:
        return (
            f"{result['ratio']:.3f} of {result['seconds_b']:.3g} s, control {result['control']:.3f}"
        )
    return f"{result['peak'] / 2**20:.1f} MiB"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    options = options_for("loops", __doc__, RESULTS, "names of rows, with * and ?")
    options.add_argument("--again", action="store_true", help="measure also what has a figure")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
