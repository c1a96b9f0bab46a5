"""Cost of a budget up to the first step, and quality of its plan.

Each row is a network within one budget. Two fresh processes take one first step each, plain and
within the budget: tracing, planning, rewiring, grappler and the run. They measure seconds of
processor time, which other processes on the machine change less than wall time. The final plan of
the graph is compared with the lower bound for the budget, in points (hundredths of a step's time).
The bound for the bytes that the plan was asked for ("its own") is higher: holes between the
allocator's chunks take the rest of the budget. If the budget is below the least one, the row uses
the least budget, and says so.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.claims.first_step import take
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.networks import Model, build
from benchmarks.settings import count, shares

SHARES = (0.8, 0.6, 0.45, 0.35)
#: Bars for the first step within a budget over the plain one: of each, and of the median.
TIMES, MEDIAN_TIMES = 2.0, 1.6
#: Bars for the points of extra time over the lower bound: of each, and of the median.
POINTS, MEDIAN_POINTS = 1.5, 0.6
#: The least share of a budget that a plan must use, if its extra time is above the second figure.
USED, SLOW = 0.90, 0.01

_APPLICATIONS = (
    "ResNet50 ResNet101 ResNet152V2 DenseNet121 EfficientNetB7 EfficientNetV2L InceptionResNetV2"
    " MobileNetV2 NASNetLarge VGG16 Xception"
)
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("application", {"name": name, "batch": 8}) for name in _APPLICATIONS.split()},
    "transformer": (
        "transformer",
        {"layers": 12, "batch": 8, "length": 128, "width": 256, "vocabulary": 1024},
    ),
    "lstm": ("lstm", {}),
    "unet": ("unet", {}),
    "resnet1001": ("cifar_resnet", {"blocks": 166, "batch": 2, "image": 16, "width": 8}),
}


def rows(settings: Settings) -> list[str]:
    """Return all networks within all budgets."""
    return [f"{name}-{100 * share:g}" for name in NETWORKS for share in settings["budgets"]]


def run(job: Job) -> dict[str, Any]:
    """Measure first steps of a network, plain and within a budget."""
    name, _, percent = job.row.rpartition("-")
    model, options = NETWORKS[name]
    what = {"model": model, "options": options}
    known = [one["plain"] for one in job.made.values() if one["network"] == name]

    def median(function: str, **more: Any) -> dict[str, Any]:
        found = [fresh(function, **what, **more) for _ in range(job.settings["repeats"])]
        middle = {c: statistics.median(one[c] for one in found) for c in ("processor", "traced")}
        return {**found[0], **middle}

    plain = known[0] if known else median("claims.first_step:first_step", way="plain")
    return {
        "network": name,
        "share": float(percent) / 100,
        "plain": plain,
        "ours": median("planning.networks:first_step", budget=float(percent) / 100),
    }


def first_step(model: str, options: dict[str, Any], budget: float) -> dict[str, Any]:
    """Take one first step within a budget in this process, and return the figures of its plan.

    If the budget is refused, take the step within the least budget that the error names.
    """
    import memsaving_gradients as ms
    from memsaving_gradients.errors import BudgetError

    network = build(model, **options)
    variables = list(network.variables)

    def within(most: int | float) -> Callable[..., Any]:
        def differentiate(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
            loss = network.loss(*batch)
            return loss, ms.gradients(loss, variables, budget=most)

        return differentiate

    refused = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            taken = take(network, within(budget))
        except BudgetError as error:
            refused = error.least
            taken = take(network, within(refused))
    plan = ms.plans(taken.graph)[-1]
    assert plan.budget is not None
    return {
        **taken.seconds,
        "refused": refused,
        "budget": plan.budget,
        "extra": plan.extra_time,
        "bound": _bound(network, within(plan.budget), plan.budget),
        "own_bound": plan.lower_bound,
        "used": plan.allocated / plan.budget,
        "stored": len(plan.stored),
    }


def _bound(network: Model, differentiate: Callable[..., Any], budget: int) -> float:
    """Return the lower bound of extra time for a budget, as a share of a plain step."""
    from memsaving_gradients.engine.rewire import observing
    from memsaving_gradients.planners.bounds.integer import tightest_bound

    found: list[float] = []

    def look(site: Any) -> None:
        graph = site.capture().graph
        found.append(tightest_bound(graph, budget) / graph.total_seconds)

    with observing(look):
        batch = [tf.constant(array) for array in network.batch]
        tf.function(differentiate).get_concrete_function(*batch)
    return found[0]


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    figures = []
    ratios = [_ratio(one) for one in results.values()]
    points = [_points(one) for one in results.values()]
    for row, one in results.items():
        figures.append(Figure(f"{row}: first step / plain", _ratio(one), TIMES))
        figures.append(Figure(f"{row}: points over the bound", _points(one), POINTS))
        if one["ours"]["extra"] > SLOW:
            figures.append(
                Figure(f"{row}: share of the budget used", one["ours"]["used"], None, least=USED)
            )
    if results:
        median = statistics.median
        figures.append(Figure("first step / plain, median", median(ratios), MEDIAN_TIMES))
        figures.append(Figure("points over the bound, median", median(points), MEDIAN_POINTS))
    return figures


def _ratio(result: Mapping[str, Any]) -> float:
    return result["ours"]["processor"] / result["plain"]["processor"]


def _points(result: Mapping[str, Any]) -> float:
    return 100 * (result["ours"]["extra"] - result["ours"]["bound"])


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network and budget."""
    for row, one in results.items():
        ours, plain = one["ours"], one["plain"]
        yield (
            row,
            f"{plain['processor']:.1f}",
            f"{ours['processor']:.1f}",
            f"{_ratio(one):.2f}",
            f"{100 * ours['extra']:.2f}",
            f"{100 * ours['bound']:.2f}",
            f"{100 * ours['own_bound']:.2f}",
            f"{ours['used']:.2f}",
            "least" if ours["refused"] else "",
        )


COLUMNS = Columns(
    "first steps within budgets, seconds of processor time",
    "row | plain | ours | × plain | extra % | bound % | its own | used | budget",
    lines,
    text=("budget",),
)
EXPERIMENT = Experiment(
    "planning",
    rows=rows,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    settings={
        "budgets": Setting(list(SHARES), shares, "shares of plain training's peak: 0.45"),
        "repeats": Setting(1, partial(count, 1), "processes of each kind; medians"),
    },
)
