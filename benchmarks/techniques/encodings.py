"""Savings and costs of residuals in fewer bytes.

*Lossless.* Four networks are planned for least memory in 5 % and in 15 % more time
(``max_slowdown``), with lossless encodings and without any. The figures are transient peaks, each
in a fresh process, the worst of five steps after two. (Tests check that gradients are the same.)

*Lossy.* ResNet-50 and a Transformer with nothing recomputed and ``encode="bfloat16"``, against
plain training: peaks, the ratio of times, and differences of gradients, as shares of the largest
number of each variable's. Only the residuals needed to meet `LOSSY_BUDGET` are encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import memsaving_gradients as ms
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh, peak, ratio
from benchmarks.networks import build

TRANSFORMER = {"layers": 12, "batch": 8, "length": 128, "width": 256, "heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("application", {"name": "VGG16", "batch": 32}),
    "transformer": ("transformer", {**TRANSFORMER, "dropout": 0.1, "rectified": True}),
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "mobilenetv2": ("application", {"name": "MobileNetV2", "batch": 8}),
}
#: Limits on the time of lossless rows' plans, as shares of a plain step's time.
SLOWDOWNS = (1.05, 1.15)
#: Bars for the peak with lossless encodings over the peak without, at the last slowdown; at the
#: others it must not be higher.
LOSSLESS = {"vgg16": 0.85, "transformer": 0.85, "resnet50": 1.0, "mobilenetv2": 1.0}
#: The relative difference of one step's peaks between processes.
NOISE = 0.02
LOSSY = ("resnet50", "transformer")
#: The budget for lossy rows, as a share of the simulated plain peak; it is below the bar to leave
#: some room.
LOSSY_BUDGET = 0.62
LOSSY_PEAK, LOSSY_TIME = 0.65, 1.10
PAIRS = 15
KEEP = {"planner": "keep"}
#: The network of each row, and the slowdown of lossless rows.
ROWS: dict[str, tuple[str, float | None]] = {
    f"lossless-{name}-{slowdown}": (name, slowdown) for name in LOSSLESS for slowdown in SLOWDOWNS
} | {f"bfloat16-{name}": (name, None) for name in LOSSY}


def run(job: Job) -> dict[str, Any]:
    """Measure a row."""
    name, slowdown = ROWS[job.row]
    if slowdown is None:
        return lossy(*MODELS[name])
    return lossless(*MODELS[name], slowdown)


def lossless(model: str, options: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Measure the least peaks within a slowdown, with and without lossless encodings, and plain."""
    ours = peak(model, options, {"max_slowdown": slowdown})
    without = peak(model, options, {"max_slowdown": slowdown, "encode": None})
    return {
        "plain": peak(model, options, None)["peak"],
        "without": without["peak"],
        "ours": ours["peak"],
        "extra": [(found["plan"] or {}).get("extra_time", 0.0) for found in (without, ours)],
    }


def lossy(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure peaks, times and gradients with bfloat16 residuals, against plain training."""
    settings = {**KEEP, "encode": "bfloat16", "budget": LOSSY_BUDGET}
    what = {"model": model, "options": options, "settings": settings}
    return {
        "plain": peak(model, options, None)["peak"],
        "ours": peak(model, options, settings)["peak"],
        "time": ratio(model, options, settings, PAIRS),
        "error": fresh("techniques.encodings:errors", **what),
    }


def errors(model: str, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """Return differences of gradients from plain ones, as shares of the largest number of each.

    Dropout is off, because stateful masks differ from step to step.
    """
    network = build(model, **{k: v for k, v in options.items() if k != "dropout"})
    found = ms.gradient_error(network.loss, list(network.variables), *network.batch, **settings)
    return {"worst": found.worst, "median": found.median, "control": found.control}


def bars(results: Results) -> list[Figure]:
    """Return the bars of the rows that have results."""
    figures = []
    for name, most in LOSSLESS.items():
        for slowdown in SLOWDOWNS:
            if row := results.get(f"lossless-{name}-{slowdown}"):
                bar = most if slowdown == SLOWDOWNS[-1] else 1.0
                limit = bar + (NOISE if bar == 1 else 0)
                what = f"{name}, lossless / without, at {slowdown:.2f} x the time"
                figures.append(Figure(what, row["ours"] / row["without"], limit))
    for name in LOSSY:
        if row := results.get(f"bfloat16-{name}"):
            share = row["ours"] / row["plain"]
            figures.append(Figure(f"{name}, bfloat16, peak / plain", share, LOSSY_PEAK))
            took = f"{name}, bfloat16, step time / plain (control {row['time']['control']:.3f})"
            figures.append(Figure(took, row["time"]["ratio"], LOSSY_TIME))
    return figures


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row."""
    for name, row in results.items():
        if "without" in row:
            more = "estimated extra time {:.1%} without, {:.1%} with".format(*row["extra"])
        else:
            far = row["error"]
            more = f"gradients off by {far['median']:.1e} (median), {far['worst']:.1e} (worst)"
        sizes = (row.get(side) for side in ("plain", "without", "ours"))
        yield (name, *("" if size is None else f"{size / 1e6:.1f} MB" for size in sizes), more)


COLUMNS = Columns(
    "encodings", "row | plain | without | ours | what else", lines, text=("what else",)
)
EXPERIMENT = Experiment(
    "encodings", rows=lambda settings: ROWS, run=run, columns=(COLUMNS,), bars=bars
)
