"""A CIFAR ResNet of 1001 layers within a tenth, a twentieth, a fortieth of its memory.

It is measured as in :mod:`benchmarks.claims.budgets`. *Planning* is the time of our call for
gradients without TensorFlow's own function in it: capture, planning, rewriting, and the description
of the plan. Building a graph of 95,000 ops takes minutes, and each budget needs it four times.
``--set blocks=11`` is the same network with 101 layers, for quick trials; only the network of 111
blocks a stage has bars.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.claims import budgets
from benchmarks.experiment import Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.settings import count, shares

#: Bars for the time of a step over the plain step's, by share of the plain transient peak.
TIMES = {1 / 10: 1.17, 1 / 20: 1.25, 1 / 40: 1.60}
#: Bar for the seconds of *planning*.
PLANNING = 20.0
BLOCKS = 111


def name_of(blocks: int) -> str:
    """Return the name of the network: three layers a block in three stages, plus two layers."""
    return f"resnet{9 * blocks + 2}"


NAME = name_of(BLOCKS)


def rows(settings: Settings) -> list[str]:
    """Return the budgets of the network."""
    name = name_of(settings["blocks"])
    return [budgets.case_of(name, share) for share in settings["budgets"]]


def run(job: Job) -> dict[str, Any]:
    """Measure the network within one budget."""
    sizes = {size: job.settings[size] for size in ("blocks", "batch")}
    return budgets.measured(job, name_of(sizes["blocks"]), "cifar_resnet", sizes)


def bars(results: Results) -> list[Figure]:
    """Return the bars; a refused budget misses its bar."""
    figures = []
    for case, result in results.items():
        if result["model"] != NAME:
            continue
        share, used = result["share"], result["ours"]["peak"] / result["allowed"]
        figures.append(Figure(f"{case}: seconds to plan", result["planning"], PLANNING))
        figures.append(Figure(f"{case}: worst step / budget", used, 1.0))
        limit = next((most for of, most in TIMES.items() if abs(of - share) < 1e-9), None)
        if result["time"] and limit is not None:
            figures.append(Figure(f"{case}: step time / plain", result["time"]["ratio"], limit))
    return figures


_OF_BUDGETS = {name: one for name, one in budgets.SETTINGS.items() if name != "optimizer"}
SHARES = Setting(list(TIMES), shares, "shares of plain training's peak")
EXPERIMENT = Experiment(
    "deep",
    rows=rows,
    run=run,
    columns=(budgets.COLUMNS,),
    bars=bars,
    notes=budgets.notes,
    settings={
        **_OF_BUDGETS,
        "budgets": SHARES,
        "blocks": Setting(BLOCKS, partial(count, 1), "blocks a stage, of three layers each"),
        "batch": Setting(8, partial(count, 1), "examples"),
    },
)
