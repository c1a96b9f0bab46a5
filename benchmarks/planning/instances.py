"""Planners on layer-level training steps, as they are compared in the literature.

Nothing runs: the nodes of a graph are forward and backward layers. A plan may recompute forward
layers (all layers, if the graph does not mark backward ones). A budget is a share of the peak in
the given order. The graphs are made from the shapes of well-known networks
(:mod:`benchmarks.planning.layered`), or read from files (``--set data=FOLDER``,
:mod:`benchmarks.planning.instance_files`).

The table has the best known extra time of an instance, if any. These figures are proven optimal, by
constraint programming (Moccasin, arXiv 2304.14463, up to three retention intervals a value) or by
Checkmate's integer program (arXiv 1910.02653). Figures of random graphs come from the former. A
figure belongs to a graph, not to a name: the numbers of nodes and edges, the peak and the cost of
all nodes must agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.planning.instance_files import read_folder
from benchmarks.planning.layered import NETWORKS, Instance, random_layered
from benchmarks.settings import list_of, planner, shares
from benchmarks.tables import mark
from memsaving_gradients.planners import Limits, find_planner
from memsaving_gradients.schedules.validation import problem_of

BUDGETS = (0.9, 0.8, 0.6, 0.5)
#: Bars: seconds to plan, seconds for proofs and for large graphs, and points (hundredths) above
#: the best known extra time.
SECONDS, SECONDS_LONG, POINTS = 10.0, 300.0, 0.1
#: The nodes of a large random layered graph, and bars for the extra time of these graphs in
#: hundredths of the step's time, by budget.
LARGE, MOST_EXTRA = 500, {0.9: 5.0, 0.8: 10.0}
#: Seconds for a search on these graphs.
SEARCHED = 280.0

#: Published or proven extra time in hundredths of the step's, by share of the peak, for each graph
#: by its nodes, edges, peak and cost.
KNOWN: dict[tuple[int, int, int, int], dict[float, float]] = {
    # VGG16, batch 256, and U-Net on VGG, 416 × 608, batch 32: profiles of a V100
    (45, 87, 15_825_108_992, 15_500): {0.95: 0.77, 0.9: 1.97, 0.85: 1.97},
    (71, 148, 20_959_461_376, 31_005): {0.8: 1.98, 0.6: 4.45, 0.45: 9.32, 0.4: 13.11},
    # FCN8 on VGG, 416 × 608, batch 32: multiplications
    (73, 149, 13_484_795_520, 10_275_337_746_048): {0.9: 0.03, 0.8: 0.15, 0.7: 0.89},
    # random layered graphs of 100 and 250 nodes
    (100, 236, 46_319, 47_769): {0.9: 0.79, 0.8: 2.30},
    (250, 944, 146_840, 125_569): {0.9: 0.90},
}


def instances(settings: Settings) -> list[Instance]:
    """Return the instances that the settings name."""
    if settings["layered"]:
        return [random_layered(nodes) for nodes in settings["layered"]]
    if settings["data"]:
        return read_folder(Path(settings["data"]))
    return [make() for make in NETWORKS]


def cases(settings: Settings) -> dict[str, tuple[Instance, float]]:
    """Return each instance with each budget, by row."""
    return {
        f"{instance.name} {share:g}": (instance, share)
        for instance in instances(settings)
        for share in settings["budgets"]
    }


def run(job: Job) -> dict[str, Any]:
    """Plan an instance within a share of its peak."""
    instance, share = cases(job.settings)[job.row]
    return planned(instance, share, job.settings["planner"])


def planned(instance: Instance, share: float, planner: str) -> dict[str, Any]:
    """Return the figures of a planner's plan for an instance within a share of its peak."""
    graph = instance.graph()
    budget = int(share * instance.peak)
    large = instance.name.startswith("random") and len(instance.reads) >= LARGE
    limits = Limits(budget=budget, seconds=SEARCHED if large else None)
    clock = time.perf_counter()
    proposal = find_planner(planner)(graph, limits)
    seconds = time.perf_counter() - clock
    problem = problem_of(graph, proposal.schedule) if instance.first_backward else None
    graph_key = len(instance.reads), instance.edges, instance.peak, int(sum(instance.seconds))
    known = KNOWN.get(graph_key, {})
    return {
        "instance": instance.name,
        "planner": planner,
        "large": large,
        "nodes": len(instance.reads),
        "edges": instance.edges,
        "peak": instance.peak,
        "share": share,
        "budget": budget,
        "found": proposal.peak,
        "fits": proposal.peak <= budget,
        "possible": instance.least <= budget,
        "least": instance.least / instance.peak,
        "extra": 100 * proposal.extra_seconds / graph.total_seconds,
        "bound": 100 * proposal.lower_bound / graph.total_seconds,
        "optimal": proposal.optimal,
        "known": known.get(share),
        "seconds": seconds,
        "problem": problem or None,
    }


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    rows = list(results.values())
    missed = [row for row in rows if row["known"] is not None and not row["fits"]]
    above = [
        row["extra"] - row["known"] for row in rows if row["known"] is not None and row["fits"]
    ]
    figures = [
        *(
            Figure("seconds to plan", max(seconds), limit, count=len(seconds))
            for limit, seconds in _seconds(rows).items()
        ),
        Figure("schedules that are not valid", sum(bool(row["problem"]) for row in rows), 0),
    ]
    figures += (
        Figure(
            f"{row['instance']} at {row['share']:g}: extra %",
            row["extra"] if row["fits"] else float("inf"),
            MOST_EXTRA[row["share"]],
        )
        for row in rows
        if row.get("large") and row["share"] in MOST_EXTRA
    )
    if above or missed:
        figures.append(Figure("budgets met in the literature, not here", len(missed), 0))
    if above:
        figures.append(
            Figure("points above the best known extra time", max(above), POINTS, count=len(above))
        )
    return figures


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[float, list[float]]:
    """Return the seconds of planning, by the bar that they must clear."""
    found: dict[float, list[float]] = {}
    for row in rows:
        long = row.get("planner") == "exact" or row.get("large")
        found.setdefault(SECONDS_LONG if long else SECONDS, []).append(row["seconds"])
    return found


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each instance and budget."""
    for row in results.values():
        known = row["known"]
        if row["fits"]:
            extra = f"{row['extra']:.2f}" + (" =" if row["optimal"] else "")
        else:
            extra = f"least {row['found'] / row['peak']:.3f}"
        verdict = ""
        if known is not None:
            verdict = mark(row["fits"] and row["extra"] - known <= POINTS)
        elif not row["possible"]:
            verdict = f"from {row['least']:.3f}"
        yield (
            row["instance"],
            str(row["nodes"]),
            f"{row['share']:g}",
            f"{row['found'] / row['budget']:.3f}",
            extra,
            f"{row['bound']:.2f}",
            "" if known is None else f"{known:.2f}",
            verdict,
            f"{row['seconds']:.1f}",
        )


def notes(results: Results) -> Iterator[str]:
    """Yield the meaning of the signs in the table."""
    yield (
        "=: proven to be the least in this order. least: no plan was found that fits, this share is"
        " the lowest found. from: below this share of the peak (the largest inputs + output)"
        " nothing can fit."
    )


COLUMNS = Columns(
    "layer-level training steps: extra time in % of the step",
    "instance | nodes | budget | met | extra % | bound % | best known |  | plan s",
    lines,
)
EXPERIMENT = Experiment(
    "instances",
    rows=cases,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    notes=notes,
    settings={
        "data": Setting("", str, "a folder of instances to read"),
        "layered": Setting([], list_of, "random layered graphs of so many nodes: 500,1000"),
        "budgets": Setting(list(BUDGETS), shares, "shares of the peak: 0.9,0.45"),
        "planner": planner(),
    },
)


def _variant(name: str, **defaults: Any) -> Experiment:
    """Return the experiment with other defaults and a file of results of its own."""
    settings = {
        key: replace(setting, default=defaults.get(key, setting.default))
        for key, setting in EXPERIMENT.settings.items()
    }
    return replace(EXPERIMENT, name=name, settings=settings)


EXACT = _variant("instances-exact", planner="exact")
LAYERED = _variant("instances-layered", layered=[500, 1000], budgets=[0.9, 0.8])
