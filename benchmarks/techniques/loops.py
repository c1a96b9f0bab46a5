"""Long recurrences, kept and replayed.

An LSTM of 1024 units reads a sequence of T vectors of 64 numbers, and a classifier reads its last
output. The LSTM is a loop, as by default in Keras, and up to T = 256 also unrolled. Other rows have
the setting of Chen, Xu, Zhang and Guestrin for recurrent networks ("Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174): four LSTM cells of 1024 units in one recurrence, a batch
of 64, inputs of 50 numbers, 5000 classes at the last step.

Each peak has a process of its own; times are ratios of medians in one process. Steps of the longest
sequences take a minute; all rows take some hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import peak, ratio

#: Options of the founding paper's recurrence.
STACKED = {"cells": 4, "batch": 64, "features": 50, "classes": 5000}
PAIRS = 15


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes
    ----------
    name
        Name for ``--only`` and the results.
    options
        Arguments of `benchmarks.networks.sequence.recurrence`.
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


ROWS = {row.name: row for row in _rows()}


def run(job: Job) -> dict[str, Any]:
    """Measure a row's peak, or its ratio of times."""
    row = ROWS[job.row]
    if row.pairs:
        return ratio("recurrence", row.options, row.settings or {}, row.pairs)
    return peak("recurrence", row.options, row.settings)


def bars(results: Results) -> list[Figure]:
    """Return the bars of the rows that have results."""
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


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row."""
    for name in (name for name in ROWS if name in results):
        plan = results[name].get("plan")
        yield name, _shown(results[name]), f"{plan['allocated'] / 2**20:.1f} MiB" if plan else ""


def _shown(result: Mapping[str, Any]) -> str:
    if "ratio" in result:
        return (
            f"{result['ratio']:.3f} of {result['seconds_b']:.3g} s, control {result['control']:.3f}"
        )
    return f"{result['peak'] / 2**20:.1f} MiB"


COLUMNS = Columns("recurrences", "what | measured | planned", lines)
EXPERIMENT = Experiment("loops", rows=lambda settings: ROWS, run=run, columns=(COLUMNS,), bars=bars)
