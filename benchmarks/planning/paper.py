"""The setting of Chen et al. 2016 (arXiv 1604.06174), planned from shapes alone.

The network of a thousand layers, batch 32, 224 x 224, is built symbolically, differentiated and
planned. Nothing runs, so that any machine can plan tens of gigabytes. The paper reports 48 GB
before and 7 GB after, at 30 % more time:

- The 48 GB are an estimate for its ``sharing`` strategy, which no card could run, of intermediate
  results alone: compare them with the peak here. MXNet prints 2^20 bytes as MB, so a GB is 2^30
  bytes in this table.
- The 7 GB are the memory of a card while it trained ("using less than 7GB of GPU memory"). They
  include parameters, their gradients and their momentum: compare them with the sublinear plan's
  peak plus three times the parameters.

*Ours* is the fastest plan within 4 GB by the planner that ``--set planner=NAME`` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting
from benchmarks.networks.deep import deep_resnet
from benchmarks.planning.strategies import strategies
from benchmarks.settings import count, planner
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import capture_step
from memsaving_gradients.planners import Limits, find_planner
from memsaving_gradients.schedules.training_graph import TrainingGraph

GB = 2**30
#: The depth and batch that have bars.
DEPTH, BATCH = 1001, 32
#: Bars for the bytes and the extra time of our plan.
OURS, EXTRA = 4 * GB, 0.30


def run(job: Job) -> dict[str, Any]:
    """Plan the network."""
    sizes = {size: job.settings[size] for size in ("depth", "batch")}
    found = planned(**sizes, planner=job.settings["planner"])
    return {**found, **sizes, "planner": job.settings["planner"]}


def planned(
    depth: int, batch: int, planner: str, budget: Callable[[int], int] = lambda parameters: OURS
) -> dict[str, Any]:
    """Return the strategies, and the fastest plan that a planner finds within a budget.

    The budget may depend on the bytes of the parameters.
    """
    clock = time.perf_counter()
    graph, parameters = planned_graph(depth, batch)
    built = time.perf_counter() - clock
    rows = [asdict(row) for row in strategies(graph, parameters=parameters)]
    clock = time.perf_counter()
    ours = find_planner(planner)(graph, Limits(budget=budget(parameters)))
    seconds = time.perf_counter() - clock
    extra = ours.extra_seconds / graph.total_seconds
    rows.append(
        {"name": planner, "peak": ours.peak, "extra": extra, "clones": ours.schedule.clones}
    )
    return {
        "rows": rows,
        "parameters": parameters,
        "ops": graph.length,
        "seconds": {"built": built, "planned": seconds},
    }


def bars(results: Results) -> list[Figure]:
    """Return the bars of the network of 1001 layers, batch 32."""
    figures = []
    for result in results.values():
        if (result.get("depth", DEPTH), result.get("batch", BATCH)) != (DEPTH, BATCH):
            continue
        rows = {row["name"]: row for row in result["rows"]}
        sublinear, ours = rows["sublinear plan"], result["rows"][-1]
        shared = rows["sharing"]["peak"] / GB
        card = (sublinear["peak"] + 3 * result["parameters"]) / GB
        figures += [
            Figure("sharing, GB (paper: 48)", shared, 48 * 1.2, least=48 * 0.8),
            Figure("sublinear plan on the card, GB (paper: 7)", card, 7 * 1.2, least=7 * 0.8),
            Figure("sublinear plan, extra time (paper: 30 %)", sublinear["extra"], 0.36),
            Figure("ours, GB", ours["peak"] / GB, OURS / GB),
            Figure("ours, extra time", ours["extra"], EXTRA),
        ]
    return figures


def planned_graph(depth: int, batch: int) -> tuple[TrainingGraph, int]:
    """Return the training graph of a deep ResNet and its parameters' bytes; allocate nothing."""
    with tf.Graph().as_default():
        loss, weights = deep_resnet(depth, batch)
        border = graphs.creation_index(tf.no_op()) + 1
        grads = tf.gradients(loss, weights)
        step = capture_step(
            border, [loss], grads, batch=batch, hold_gradients=False, may_chain=False
        )
    return step.graph, sum(4 * weight.shape.num_elements() for weight in weights)


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each strategy."""
    for result in results.values():
        for row in result["rows"]:
            sizes = f"{row['peak'] / GB:.2f}", f"{row['extra']:.1%}", f"{row['clones']:,}"
            yield row["name"], *sizes


def notes(results: Results) -> Iterator[str]:
    """Yield the figures that the table does not have."""
    for result in results.values():
        yield f"besides: parameters {result['parameters'] / GB:.2f} GB (1 GB = 2^30 bytes)"
        if seconds := result.get("seconds"):
            built, made = seconds["built"], seconds["planned"]
            yield f"{result['ops']:,} ops; built in {built:.0f} s, planned by ours in {made:.0f} s"


COLUMNS = Columns(
    "a ResNet of a thousand layers", "strategy | peak GB | extra time | ops run again", lines
)
EXPERIMENT = Experiment(
    "paper",
    # Named like the file: `benchmarks.records.read` so names the row of an old file without rows.
    rows=lambda settings: ("paper",),
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    notes=notes,
    settings={
        "depth": Setting(DEPTH, partial(count, 5), f"layers; only {DEPTH} has bars"),
        "batch": Setting(BATCH, partial(count, 1), f"examples; only {BATCH} has bars"),
        "planner": planner("chen"),
    },
)
