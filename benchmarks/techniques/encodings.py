"""``python -m benchmarks.techniques.encodings``: what it saves to keep residuals in fewer bytes, and what it costs.

*Lossless.* Four networks: the plans of least memory that may take a twentieth more time (``max_slowdown``), and 15 % more, with lossless encodings and
without any; transient peaks, each in a fresh process, the worst of five steps after two. (That gradients are the same is for the tests.)

*Lossy.* ResNet-50 and a Transformer with nothing recomputed and ``encode="bfloat16"``, beside plain training: peaks, the ratio of times, and how far
gradients are apart, as a share of the largest one of each variable.
As many residuals are encoded as it takes to come to `LOSSY_BUDGET`.

Rows that are in the results file are not measured again, but with ``--again``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Figure, measure_missing, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "encodings.json"

TRANSFORMER = {"layers": 12, "batch": 8, "length": 128, "width": 256, "heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("application", {"name": "VGG16", "batch": 32}),
    "transformer": ("transformer", {**TRANSFORMER, "dropout": 0.1, "rectified": True}),
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "mobilenetv2": ("application", {"name": "MobileNetV2", "batch": 8}),
}
#: What plans of lossless rows may take of a plain step's time.
SLOWDOWNS = (1.05, 1.15)
#: The most that lossless encodings may leave of the peak, at the last of these; at the others they must do no harm.
LOSSLESS = {"vgg16": 0.85, "transformer": 0.85, "resnet50": 1.0, "mobilenetv2": 1.0}
#: Peaks of the same step differ by so much from process to process.
NOISE = 0.02
LOSSY = ("resnet50", "transformer")
#: The budget for lossy rows, as a share of the simulated plain peak, that leaves some room below the bar.
LOSSY_BUDGET = 0.62
LOSSY_PEAK, LOSSY_TIME = 0.65, 1.10
PAIRS = 15
KEEP = {"planner": "keep"}


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, print it beside the bars; 1 if one is missed."""
    parser = options_for("encodings", __doc__, RESULTS, "names of rows")
    parser.add_argument("--again", action="store_true", help="measure what has results, too")
    options = parser.parse_args(arguments)
    rows: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in LOSSLESS:
        for slowdown in SLOWDOWNS:
            row = f"lossless-{name}-{slowdown}"
            rows[row] = functools.partial(lossless, *MODELS[name], slowdown)
    for name in LOSSY:
        rows[f"bfloat16-{name}"] = functools.partial(lossy, *MODELS[name])
    results = measure_missing(rows, options, lambda row: rows[row]())
    figures = judge(results)
    write(options.json, {}, figures)
    _print(results)
    print_figures(figures, Console())
    return int(not all(figure.passed for figure in figures))


def lossless(model: str, options: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Peaks of the best plans within a slowdown, with lossless encodings and without, and of plain training."""
    ours = _peak(model, options, {"max_slowdown": slowdown})
    without = _peak(model, options, {"max_slowdown": slowdown, "encode": None})
    return {
        "plain": _peak(model, options, None)["peak"],
        "without": without["peak"],
        "ours": ours["peak"],
        "extra": [(found["plan"] or {}).get("extra_time", 0.0) for found in (without, ours)],
    }


def lossy(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Peaks, times and gradients with bfloat16 residuals, beside plain training."""
    settings = {**KEEP, "encode": "bfloat16", "budget": LOSSY_BUDGET}
    what = {"model": model, "options": options, "settings": settings}
    return {
        "plain": _peak(model, options, None)["peak"],
        "ours": _peak(model, options, settings)["peak"],
        "time": in_fresh_process("benchmarks.probes:ratio", {**what, "pairs": PAIRS}, ENVIRONMENT),
        "error": in_fresh_process("benchmarks.techniques.encodings:errors", what, ENVIRONMENT),
    }


def _peak(model: str, options: dict[str, Any], settings: dict[str, Any] | None) -> dict[str, Any]:
    what = {"model": model, "options": options, "ours": settings is not None, "settings": settings}
    found: dict[str, Any] = in_fresh_process("benchmarks.probes:peak", what, ENVIRONMENT)
    return found


def errors(model: str, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """How far gradients are from plain ones, as shares of the largest number of each: the worst and the median variable.

    Without dropout: stateful masks differ from step to step.
    """
    import memsaving_gradients as ms
    from benchmarks.networks import build

    network = build(model, **{k: v for k, v in options.items() if k != "dropout"})
    found = ms.gradient_error(network.loss, list(network.variables), *network.batch, **settings)
    return {"worst": found.worst, "median": found.median, "control": found.control}


def judge(results: dict[str, Any]) -> list[Figure]:
    """The bars of all that was measured."""
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


def _print(results: dict[str, Any]) -> None:
    table = Table(title="encodings", header_style="bold")
    for heading in ("row", "plain", "without", "ours", "what else"):
        table.add_column(heading, justify="left" if heading in ("row", "what else") else "right")
    for name, row in results.items():
        if "without" in row:
            more = "estimated extra time {:.1%} without, {:.1%} with".format(*row["extra"])
            cells = (row["plain"], row["without"], row["ours"])
        else:
            far = row["error"]
            more = f"gradients off by {far['median']:.1e} (median), {far['worst']:.1e} (worst variable)"
            cells = (row["plain"], None, row["ours"])
        table.add_row(name, *("" if c is None else f"{c / 1e6:.1f} MB" for c in cells), more)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
