"""Predictions and time of ``explain``, against the allocator and the clock.

Each network trains with Adam, except the network of 1001 layers, of which ``explain`` gets the
gradients alone. `memsaving_gradients.explain` predicts the parts of the peak without running a
step. Another process measures them as well: variables and slots directly, the others by the
profiler's list of allocations, split by the op that asked for each. The figure is the worst of five
steps, and the median where they tie. The table also has the least budget, the seconds of the whole
curve, and the seconds of tracing among them. For two budgets it has extra time and lower bound of
the plans of ``planner="auto"``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Any

import memsaving_gradients as ms
from benchmarks import at_peak
from benchmarks.allocation_trace import allocation_events, requested_peak
from benchmarks.at_peak import kinds_of, parts_at_peak
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from benchmarks.networks import build
from benchmarks.planning.simulation import NETWORKS
from benchmarks.steps import make_optimizer, make_step
from benchmarks.tables import mark
from memsaving_gradients.analysis.study import Study, asked
from memsaving_gradients.planners import Limits, auto
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import TIE, simulate

#: Two more networks, after Sohoni et al. 2019.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "wide-resnet": ("wide_resnet", {}),
    "dynamic-conv": ("dynamic_conv", {"batch": 32}),
}
#: The 1001-layer network, which is explained but not run.
DEEP = ("cifar_resnet", {"blocks": 111, "batch": 8})
PARTS = ("parameters", "slots", *at_peak.PARTS)
#: Bars: the relative error of a part, the seconds for the curve, and for the deep network's curve.
OFF, SECONDS, SECONDS_DEEP = 0.03, 15.0, 60.0
#: Budgets to plan for, as shares of the peak, and the bar for a plan's extra time above its lower
#: bound, in hundredths of the step's time.
SHARES, GAP = (0.6, 0.45), 3.0
#: Parts below this share of the whole are not judged: they are single buffers.
SMALL = 0.005
CASES = {**NETWORKS, **MORE, "deep": DEEP}


def run(job: Job) -> dict[str, Any]:
    """Explain a network, and measure it unless it is the deep one."""
    model, sizes = CASES[job.row]
    training = {} if job.row == "deep" else {"optimizer": "adam"}
    what = {"model": model, "options": {**sizes, **training}}
    found: dict[str, Any] = fresh("claims.explain:explained", **what)
    if job.row != "deep":
        found["measured"] = fresh("claims.explain:measured", **what)
    return found


def explained(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of ``explain`` for a step, its seconds, and the seconds of tracing."""
    step = make_step(model, options, ours=False)
    start = time.perf_counter()
    found = ms.explain(step.function, *step.batch)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    study = Study(step.function, step.batch, asked({}))
    return {
        "seconds": seconds,
        "tracing": time.perf_counter() - start,
        "gaps": {str(share): _gap(study, share) for share in SHARES},
        "parts": {name: getattr(found.parts, name) for name in PARTS},
        "curve": [
            [point.budget, point.share, point.extra_time, point.lower_bound]
            for point in found.curve
        ],
        "text": str(found),
    }


def _gap(study: Any, share: float) -> list[float]:
    """Return extra time and lower bound of a plan, in hundredths of the step's time."""
    graph = study.graph
    limits = Limits(budget=int(share * simulate(graph, plain(graph)).peak))
    proposal = auto.plan(graph, limits)
    unit = graph.total_seconds / 100
    return [proposal.extra_seconds / unit, proposal.lower_bound / unit]


def measured(model: str, options: dict[str, Any], steps: int = 5) -> dict[str, int]:
    """Measure the parts at the peak of the worst of several steps; medians where they tie."""

    def held(variables: Any) -> int:
        return sum(variable.numpy().nbytes for variable in variables)

    network = build(model, **{key: size for key, size in options.items() if key != "optimizer"})
    optimizer = make_optimizer(options["optimizer"], network)
    model_variables = network.variables if network.layers is None else network.layers.variables
    found = {"parameters": held(model_variables), "slots": held(optimizer.variables)}
    del network
    del optimizer
    step = make_step(model, options, ours=False)
    for _ in range(2):
        step.run()
    runs = [allocation_events(step.run) for _ in range(steps)]
    enough = (1 - TIE) * max(map(requested_peak, runs))
    site = Study(step.function, step.batch, asked({})).site
    parts = [
        parts_at_peak(run, kinds_of(site.call.first_operation, site.grads, run), TIE)
        for run in runs
        if requested_peak(run) >= enough
    ]
    found |= {part: median_low(one[part] for one in parts) for part in PARTS[2:]}
    return found


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    off = [
        (abs(error), f"{name} {part}")
        for name, row in results.items()
        for part, error in _errors(row).items()
    ]
    of_all = [
        (abs(row["parts"][part] - size) / sum(row["measured"].values()), f"{name} {part}")
        for name, row in results.items()
        for part, size in row.get("measured", {}).items()
    ]
    figures = []
    for what, errors in (("a part off by", off), ("the same, of all memory", of_all)):
        if errors:
            worst, where = max(errors)
            count = len(errors)
            figures.append(Figure(f"{what} ({where})", worst, OFF, percent=True, count=count))
    gaps = [
        (extra - bound, f"{name} at {share}")
        for name, row in results.items()
        if name != "deep"
        for share, (extra, bound) in row["gaps"].items()
    ]
    if gaps:
        worst, where = max(gaps)
        figures.append(Figure(f"points above the bound ({where})", worst, GAP, count=len(gaps)))
    plain = [row["seconds"] for name, row in results.items() if name == "resnet50"]
    deep = [row["seconds"] for name, row in results.items() if name == "deep"]
    figures += [Figure("seconds to explain ResNet-50", s, SECONDS) for s in plain]
    figures += [Figure("seconds to explain 1001 layers", s, SECONDS_DEEP) for s in deep]
    return figures


def _errors(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative error of each part that is not `SMALL`."""
    if "measured" not in row:
        return {}
    whole = sum(row["measured"].values())
    return {
        part: row["parts"][part] / row["measured"][part] - 1
        for part in PARTS
        if row["measured"][part] >= SMALL * whole
    }


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network."""
    for name, row in results.items():
        errors = _errors(row)
        cells = [
            f"{row['parts'][part] / 1e6:,.2f}" + (f" {errors[part]:+.1%}" if part in errors else "")
            for part in PARTS
        ]
        good = mark(all(abs(error) <= OFF for error in errors.values())) if errors else ""
        _, share, extra, _ = row["curve"][-1]
        yield (
            name,
            *cells,
            good,
            f"{share:.3f} +{extra:.0%}",
            f"{row['seconds']:.1f}",
            f"{row['tracing']:.1f}",
            *(f"{extra:.1f} {bound:.1f} %" for extra, bound in row["gaps"].values()),
        )


GAPS = (f"at {share:g}: extra, bound" for share in SHARES)
COLUMNS = Columns(
    "parts at the peak, MB: predicted, and off by",
    " | ".join(("network", *PARTS, "", "least", "seconds", "tracing", *GAPS)),
    lines,
)
EXPERIMENT = Experiment(
    "explain", rows=lambda settings: CASES, run=run, columns=(COLUMNS,), bars=bars
)
