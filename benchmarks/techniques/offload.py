"""Residuals on the host.

*Peaks.* In ResNet-50 and a 12-layer Transformer, nothing is recomputed, and everything is offloaded
that lowers the peak. One process is the accelerator, another one the host
(`benchmarks.techniques.cluster`). The transient peak of the accelerator, worst of five steps after
two, is compared with plain training's and with the simulated one. All gradients are compared with
plain ones, to the last bit.

*Timeline.* ResNet-50 and the 200-layer ResNet of Chen et al. 2016 are planned for a card of 6
TFLOP/s and 288 GB/s, with 12 GB/s to the host (the M40 and PCIe 3 of Meng et al. 2017, who report a
loss of less than 10 %). The figure is the least memory at which computations hide nine tenths of
the transfers, and a step takes at most a tenth longer. Nothing runs.

*Hybrid.* Six networks at 35 % of their simulated peak, on the same card: the estimated extra time
of recomputing alone, of offloading alone, and of both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.claims.budgets import MODELS as BUDGETED
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from benchmarks.networks import build
from benchmarks.networks.deep import deep_resnet
from benchmarks.steps import make_step
from benchmarks.techniques.cluster import HOST, host
from graph_tools.costs import estimates
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.capture.offload import Offload
from memsaving_gradients.capture.storable import with_storable
from memsaving_gradients.capture.training_step import capture_step
from memsaving_gradients.planners import Limits, auto, keep
from memsaving_gradients.planners.with_storage import planner_that_stores
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.transfers import transfers

PEAKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "transformer": ("transformer", {"layers": 12, "batch": 8, "length": 128, "width": 256}),
}
MOST_OF_PLAIN = 0.40
#: The number of repeated plain steps that check whether plain training repeats its bits.
AGAIN = 2
#: Speeds of the card: floating point operations and bytes per second, seconds to begin an op; and
#: of the link to the host and back: bytes per second.
CARD: dict[str, Any] = {
    "FLOPS_PER_SECOND": 6e12,
    "BYTES_PER_SECOND": 288e9,
    "START_SECONDS": 5e-6,
}
LINK = 12e9
TIMELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 32}),
    "resnet200": ("deep", {"depth": 200, "batch": 32}),
}
HIDDEN, SLOWER = 0.90, 1.10
#: Shares of the plain peak to try, the largest first.
SHARES = tuple(k / 20 for k in range(19, 1, -1))
HYBRID = 0.35
#: For each row, the function of this module that runs in a process of its own, and its network.
ROWS = (
    {f"peak-{name}": ("peaks", what) for name, what in PEAKS.items()}
    | {f"timeline-{name}": ("timeline", what) for name, what in TIMELINES.items()}
    | {f"hybrid-{name}": ("hybrid", what) for name, what in BUDGETED.items()}
)


def run(job: Job) -> dict[str, Any]:
    """Measure or plan a row."""
    kind, (model, options) = ROWS[job.row]
    found: dict[str, Any] = fresh(f"techniques.offload:{kind}", model=model, options=options)
    return found


def peaks(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure peaks of the accelerator, and compare gradients."""
    settings = {"planner": "keep", "offload": HOST}
    with host():
        found: dict[str, Any] = {}
        for name, wanted in (("plain", None), ("ours", settings)):
            step = make_step(model, options, ours=wanted is not None, settings=wanted)
            found[name] = measure_peak(step.run, warmup=2, steps=5).peak
        plan = ms.plans(step.graph)[-1]
        found |= {"simulated": plan.allocated, "moved": len(plan.stored)}
        # Plain training must repeat its bits from step to step. So grappler's arithmetic rewriting,
        # which depends on other readers of a tensor, is off. And sums have two terms each, because
        # its memory optimizer adds the terms of longer sums in the order in which they arrive.
        pairwise = tf.AggregationMethod.EXPERIMENTAL_TREE
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        tf.config.experimental.enable_op_determinism()
        tf.random.set_seed(1)
        network = build(model, **options)

        def gradients(ours: bool) -> list[bytes]:
            @tf.function
            def all_of_them(*batch: tf.Tensor) -> Any:
                loss, variables = network.loss(*batch), list(network.variables)
                if ours:
                    return ms.gradients(loss, variables, aggregation_method=pairwise, **settings)
                return tf.gradients(loss, variables, aggregation_method=pairwise)

            made = all_of_them(*map(tf.constant, network.batch))
            return [tf.convert_to_tensor(g).numpy().tobytes() for g in made]

        plain = gradients(False)
        found["plain same"] = all(gradients(False) == plain for _ in range(AGAIN))
        found["same"] = gradients(True) == plain
    return found


def captured(model: str, options: dict[str, Any]) -> Any:
    """Return the training graph of a step on the card, with offloading."""
    made = []

    def differentiate(loss: tf.Tensor, variables: Any) -> None:
        first_backward = len(loss.graph.get_operations())
        grads = [g for g in tf.gradients(loss, variables) if g is not None]
        flat = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        made.append(
            capture_step(
                first_backward, [loss], flat, batch=32, hold_gradients=False, may_chain=True
            )
        )

    if model == "deep":
        with tf.Graph().as_default():
            differentiate(*deep_resnet(**options))
    else:
        network = build(model, **options)

        @tf.function
        def step(*batch: tf.Tensor) -> None:
            differentiate(network.loss(*batch), list(network.variables))

        step.get_concrete_function(*map(tf.constant, network.batch))
    (step_,) = made
    with mock.patch.multiple(estimates, **CARD):
        seconds = estimates.op_seconds(step_.source, 32)
    step_ = replace(step_, graph=replace(step_.graph, seconds=seconds))
    offload = Offload("/device:CPU:0", bandwidth=LINK)
    return with_storable(step_, offload=offload).graph


def timeline(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Plan for each share of the plain peak, and return hidden transfers and slowdowns."""
    graph = captured(model, options)
    most = simulate(graph, plain(graph)).peak
    found: dict[str, Any] = {"plain": most, "plain seconds": graph.total_seconds, "tried": []}
    for share in SHARES:
        plan = planner_that_stores(keep.plan)(graph, Limits(budget=int(most * share)))
        if plan.peak > most * share:
            break
        stored = plan.schedule.stored
        moved = [stored[step.op] for step in plan.schedule.steps if step.op in stored]
        moving = sum(way.moving_seconds for way in moved)
        stalled = transfers(graph, plan.schedule).stalled
        slower = 1 + plan.extra_seconds / graph.total_seconds
        found["tried"].append(
            {
                "share": plan.peak / most,
                "hidden": 1 - min(1.0, stalled / moving) if moving else 1.0,
                "slower": slower,
                "moving": moving,
            }
        )
    return found


def hybrid(model: str, options: dict[str, Any], share: float = HYBRID) -> dict[str, Any]:
    """Estimate extra time by recomputing, offloading, and both; ``None``: it does not fit."""
    graph = captured(model, options)
    budget = int(simulate(graph, plain(graph)).peak * share)
    limits = Limits(budget=budget)
    plans = {
        "recompute": auto.plan(graph, limits),
        "offload": planner_that_stores(keep.plan)(graph, limits),
        "both": planner_that_stores(auto.plan)(graph, limits),
    }
    return {
        name: plan.extra_seconds / graph.total_seconds if plan.peak <= budget else None
        for name, plan in plans.items()
    }


def bars(results: Results) -> list[Figure]:
    """Return the bars of the rows that have results."""
    figures = []
    for row, result in results.items():
        kind, _, name = row.partition("-")
        if kind == "peak":
            share = result["ours"] / result["plain"]
            figures.append(Figure(f"{name}, peak / plain, offloaded", share, MOST_OF_PLAIN))
            figures.append(Figure(f"{name}, gradients that differ", float(not result["same"]), 0.0))
        elif kind == "timeline":
            best = _least(result)
            figures.append(Figure(f"{name}, transfers not hidden", 1 - best["hidden"], 1 - HIDDEN))
            figures.append(Figure(f"{name}, step / plain, simulated", best["slower"], SLOWER))
        else:
            alone = [result[way] for way in ("recompute", "offload") if result[way] is not None]
            least = min(alone, default=float("inf"))
            both = float("inf") if result["both"] is None else result["both"]
            # If one way alone takes no extra time, nothing is left to gain.
            ratio = both / least if least else both
            figures.append(Figure(f"{name}, extra time, both / better of one", ratio, 1 - 1e-6))
    return figures


def _least(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan of least memory that meets the bars; if none does, of the most memory."""
    fits = [t for t in result["tried"] if t["hidden"] >= HIDDEN and t["slower"] <= SLOWER]
    return min(fits, key=lambda t: t["share"]) if fits else result["tried"][0]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row."""
    for row, result in results.items():
        if "tried" in result:
            best = _least(result)
            said = (
                f"at {best['share']:.0%} of {result['plain'] / 1e6:,.0f} MB: "
                f"{best['hidden']:.1%} of {best['moving'] * 1e3:.0f} ms hidden, step "
                f"{best['slower']:.3f} x {result['plain seconds'] * 1e3:.0f} ms"
            )
        elif "ours" in result:
            plain, ours, simulated = (result[k] / 1e6 for k in ("plain", "ours", "simulated"))
            same = "the same" if result["same"] else "differ"
            said = (
                f"{plain:.1f} MB -> {ours:.1f} MB (simulated {simulated:.1f}), "
                f"{result['moved']} moved, gradients {same}"
            )
        else:
            extra = {way: result[way] for way in ("recompute", "offload", "both")}
            said = ", ".join(
                f"{way} {'does not fit' if share is None else f'{share:.2%}'}"
                for way, share in extra.items()
            )
        yield row, said


COLUMNS = Columns("offloading", "row | what", lines, text=("what",))
EXPERIMENT = Experiment(
    "offload", rows=lambda settings: ROWS, run=run, columns=(COLUMNS,), bars=bars
)
