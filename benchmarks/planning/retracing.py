"""Planning of steps that are traced again, for other batch sizes, over planning of the first trace.

Each row is a network within one budget. One fresh process traces its step for each batch size,
plain and within the budget, and subtracts: what is left of the processor time is planning. The
first plan is remembered, and later traces begin with it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.claims.first_step import trace
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.networks import build
from benchmarks.planning.networks import NETWORKS
from benchmarks.settings import shares

#: The networks; the others fix their batch size.
NAMES = ("ResNet50", "DenseNet121", "MobileNetV2", "Xception", "unet")
#: The first batch size, and later ones (examples).
FIRST, LATER = 8, (6, 12, 5, 16)
#: Bar for the median planning of later traces over the first.
SHARE = 0.2


def rows(settings: Settings) -> list[str]:
    """Return all networks within all budgets."""
    return [f"{name}-{100 * share:g}" for name in NAMES for share in settings["budgets"]]


def run(job: Job) -> dict[str, Any]:
    """Trace a network's step for all batch sizes."""
    name, _, percent = job.row.rpartition("-")
    model, options = NETWORKS[name]
    what = {"model": model, "options": options, "budget": float(percent) / 100}
    return {"traces": fresh("planning.retracing:traces", **what)}


def traces(model: str, options: dict[str, Any], budget: float) -> list[dict[str, Any]]:
    """Trace steps for all batch sizes in this process, and return the figures of each."""
    import memsaving_gradients as ms

    network = build(model, **options)
    variables = list(network.variables)

    def plain(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
        loss = network.loss(*batch)
        return loss, tf.gradients(loss, variables)

    def ours(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
        loss = network.loss(*batch)
        return loss, ms.gradients(loss, variables, budget=budget)

    found = []
    for examples in (FIRST, *LATER):
        batch = [
            tf.constant(np.resize(array, (examples, *array.shape[1:])).astype(array.dtype))
            for array in network.batch
        ]
        without = trace(network, plain, batch).seconds["traced"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = trace(network, ours, batch)
        plan = ms.plans(traced.graph)[-1]
        assert plan.budget is not None
        found.append(
            {
                "batch": examples,
                "plain": without,
                "planning": traced.seconds["traced"] - without,
                "extra": plan.extra_time,
                "used": plan.allocated / plan.budget,
            }
        )
    return found


def _later(result: Mapping[str, Any]) -> float:
    """Return the median planning time of later traces, over that of the first."""
    first, *later = result["traces"]
    return statistics.median(one["planning"] for one in later) / first["planning"]


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    return [Figure(f"{row}: later / first", _later(one), SHARE) for row, one in results.items()]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each trace."""
    for row, result in results.items():
        first = result["traces"][0]
        for one in result["traces"]:
            yield (
                row,
                str(one["batch"]),
                f"{one['plain']:.1f}",
                f"{one['planning']:.1f}",
                f"{one['planning'] / first['planning']:.2f}",
                f"{100 * one['extra']:.2f}",
                f"{one['used']:.2f}",
            )


COLUMNS = Columns(
    "planning of steps traced again, seconds of processor time",
    "row | batch | plain | planning | over first | extra % | used",
    lines,
)
EXPERIMENT = Experiment(
    "retracing",
    rows=rows,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    settings={"budgets": Setting([0.6, 0.45], shares, "shares of plain training's peak: 0.45")},
)
