"""The fastest plans within budgets, measured.

Each model is planned for several shares of the plain peak, and run. The table compares the worst of
five steps with the budget, and the simulated peak with the measured one. It compares the time of a
step with the plain step's, and the predicted extra time with the measured one. If no plan fits, the
least budget that the error names is measured instead.

Every peak and every ratio of times has a process of its own. The first process makes the plan and
saves it, the second applies it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.settings import flag, one_of, pairs, planner, shares
from benchmarks.tables import mark
from graph_tools.errors import GraphToolsError

#: Networks: builder and options for `benchmarks.networks.build`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "densenet121": ("application", {"name": "DenseNet121", "batch": 8}),
    "mobilenetv2": ("application", {"name": "MobileNetV2", "batch": 8}),
    "unet": ("unet", {}),
    "transformer": (
        "transformer",
        {"layers": 12, "batch": 8, "length": 128, "width": 256, "vocabulary": 1024},
    ),
    "lstm": ("lstm", {}),
}

#: Shares of the plain transient peak, and bars for their extra step time in the median over models.
EXTRA = {0.80: 0.03, 0.60: 0.06, 0.45: 0.09, 0.35: 0.14}
#: Bars for simulated against measured peak: the median error, and the most by which one is too low.
MEDIAN_ERROR, MOST_UNDER = 0.02, 0.03
#: The least measured extra time that is compared with the prediction, and the bar for the median
#: error, as a share of the extra time.
PREDICTED_FROM, PREDICTED_ERROR = 0.10, 0.20
#: A control farther from 1 than this means that the machine was busy.
NOISE = 0.05


def case_of(model: str, share: float) -> str:
    """Return the name of a row."""
    return f"{model}-{100 * share:.3g}"


def rows(settings: Settings) -> list[str]:
    """Return all models within all budgets."""
    return [case_of(model, share) for model in MODELS for share in settings["budgets"]]


def run(job: Job) -> dict[str, Any]:
    """Measure one model within one budget."""
    name = job.row.rpartition("-")[0]
    model, sizes = MODELS[name]
    if optimizer := job.settings["optimizer"]:
        sizes = {**sizes, "optimizer": optimizer}
    return measured(job, name, model, sizes)


def measured(job: Job, name: str, model: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Measure one network within the budget in the name of the row.

    The plain peak is taken from other rows of this run. All refused budgets lead to the same least
    budget, which is measured once.
    """
    what = {"model": model, "options": sizes}
    share = next(one for one in job.settings["budgets"] if case_of(name, one) == job.row)
    others = [one for one in job.made.values() if one.get("model") == name and "plain" in one]
    plain = others[0]["plain"] if others else None
    plain = plain or fresh("probes:peak", **what, ours=False, requested=True)
    refusals = {one["refused"]["least"]: one for one in others if one["refused"]}
    result = _case(what, share, plain, job.settings, refusals)
    return {**result, "model": name, "share": share}


def _case(
    what: dict[str, Any],
    share: float,
    plain: Mapping[str, Any],
    settings: Settings,
    refusals: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    allowed = int(share * plain["peak"])
    profile = settings["profile"]
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        saved = str(Path(folder, "plan.json"))
        asked = allowed if settings["bytes"] else share
        wanted = {"planner": settings["planner"], "profile": profile}
        ours, refused = planned(what, asked, wanted, saved, known=refusals)
        if refused is not None and refused["least"] in refusals:
            return {**refusals[refused["least"]], "refused": refused, "allowed": allowed}
        if refused is not None and "refused" in ours:
            raise LeastRefusedError(refused["least"], ours["refused"]["least"])
        timed = None
        if many := settings["pairs"]:
            more = {"plan": saved, "pairs": many, "profile": not profile}
            timed = fresh("probes:budget_ratio", **what, **more)
    return {
        "plain": dict(plain),
        "ours": ours,
        "refused": refused,
        "allowed": allowed,
        "time": timed,
        "predicted": _predicted(ours["plan"]["extra_time"], timed, profile),
        "planning": ours["seconds"]["gradients"] - ours["seconds"]["tensorflow"],
    }


class LeastRefusedError(GraphToolsError):
    """The error if the least budget that another error names is refused."""

    def __init__(self, least: int, then: int) -> None:
        super().__init__(
            f"the least budget of the first error, {least:,} bytes, is refused;"
            f" the second error names {then:,} bytes"
        )


def planned(
    what: Mapping[str, Any],
    budget: float | int,
    settings: Mapping[str, Any],
    save: str,
    *,
    known: Container[int] = (),
    requested: bool = True,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Measure a step within a budget, or within the least one that the error names.

    Return the figures, and the refusal if there was one. ``what``: model and options; ``settings``:
    other arguments of ``gradients``; ``save``: file for the plan. A least budget that is ``known``
    is not tried. In this case, and if the least budget is refused as well, ``"refused"`` is the
    only figure.
    """

    def within(budget: float | int) -> dict[str, Any]:
        more = {"save": save, "settings": {**settings, "budget": budget}, "requested": requested}
        found: dict[str, Any] = fresh("probes:budget_peak", **what, **more)
        return found

    ours = within(budget)
    refused = ours.get("refused")
    if refused is None:
        return ours, None
    return (ours if refused["least"] in known else within(refused["least"])), refused


def _predicted(
    planned: float, timed: Mapping[str, Any] | None, profile: bool
) -> dict[str, float | None]:
    """Return the predicted extra time of the plan by static and by measured costs."""
    other = None if timed is None else timed["predicted"]
    first, second = ("profiled", "static") if profile else ("static", "profiled")
    return {first: planned, second: other}


def errors(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the relative errors of simulated peaks; negative: too low."""
    plan = result["ours"]["plan"]
    found = []
    for side, suffix in (("plain", "_plain"), ("ours", "")):
        measured = result[side]
        found.append((f"{side}, chunks", plan["allocated" + suffix] / measured["peak"] - 1))
        if measured.get("requested"):
            found.append((f"{side}, requested", plan["peak" + suffix] / measured["requested"] - 1))
    return found


def bars(results: Results) -> list[Figure]:
    """Return all bars that ``results`` have figures for."""
    made = list(results.values())
    feasible = [result for result in made if result["refused"] is None]
    figures = []
    if feasible:
        uses = [result["ours"]["peak"] / result["allowed"] for result in feasible]
        figures.append(Figure("worst step / share of plain peak", max(uses), 1.0, count=len(uses)))
    if made:
        uses = [result["ours"]["peak"] / result["ours"]["plan"]["budget"] for result in made]
        figures.append(Figure("worst step / budget planned for", max(uses), 1.0, count=len(uses)))
    for share in sorted({result["share"] for result in feasible}, reverse=True):
        times = [r["time"]["ratio"] - 1 for r in feasible if r["share"] == share and r["time"]]
        limit = EXTRA.get(share)
        if times and limit is not None:
            name = f"extra step time at {share:.0%}, median over models where it is feasible"
            figures.append(Figure(name, statistics.median(times), limit, True, len(times)))
    for unit in ("chunks", "requested"):
        off = list(_errors_in(unit, made))
        if off:
            name = f"simulated against measured peak in {unit}"
            middle = statistics.median(map(abs, off))
            figures.append(Figure(f"{name}, median error", middle, MEDIAN_ERROR, True, len(off)))
            figures.append(
                Figure(f"{name}, most under", max(0.0, -min(off)), MOST_UNDER, True, len(off))
            )
    wrong = [
        abs(r["predicted"]["profiled"] / (r["time"]["ratio"] - 1) - 1)
        for r in made
        if r["time"] and r["time"]["ratio"] - 1 >= PREDICTED_FROM
    ]
    if wrong:
        name = "predicted against measured extra time, profiled, median error"
        figures.append(Figure(name, statistics.median(wrong), PREDICTED_ERROR, True, len(wrong)))
    return figures


def _errors_in(unit: str, made: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the error of each measured peak once: several cases share plain and least peaks."""
    seen = set()
    for result in made:
        for what, error in errors(result):
            key = (result["model"], what, error)
            if what.endswith(unit) and key not in seen:
                seen.add(key)
                yield error


def bars_of_training(results: Results) -> list[Figure]:
    """Return the bars of steps that update variables, which the simulation of plain excludes."""
    return [figure for figure in bars(results) if "simulated" not in figure.what]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each case."""
    for case, result in results.items():
        yield (case, *_row(result))


def notes(results: Results) -> Iterator[str]:
    """Yield the refusals."""
    for case, result in results.items():
        if result["refused"]:
            yield (
                f"{case}: refused; the figures are for the least budget that the error names,"
                f" {result['refused']['fraction']:.1%} of plain training's peak"
            )


def _row(result: Mapping[str, Any]) -> Iterator[str]:
    plan, peak = result["ours"]["plan"], result["ours"]["peak"]
    feasible = result["refused"] is None
    for size in (result["plain"]["peak"], result["allowed"], plan["budget"], peak):
        yield f"{size / 1e6:,.1f}"
    yield f"{peak / result['allowed']:.3f}" if feasible else "refused"
    yield f"{peak / plan['budget']:.3f}"
    yield mark(peak <= plan["budget"] and (not feasible or peak <= result["allowed"]))
    off = dict(errors(result))
    yield f"{1 + off['plain, chunks']:.3f}"
    yield f"{1 + off['ours, chunks']:.3f}"
    yield f"{1 + off['ours, requested']:.3f}" if "ours, requested" in off else ""
    for estimate in ("static", "profiled"):
        value = result["predicted"][estimate]
        yield "" if value is None else f"{value:.1%}"
    timed = result["time"]
    yield f"{timed['ratio']:.3f}" if timed else ""
    control = timed and f"{timed['control']:.3f}"
    busy = timed and abs(timed["control"] - 1) > NOISE
    yield (f"[red]{control}[/red]" if busy else control) or ""
    yield f"{result['planning']:.1f}"


COLUMNS = Columns(
    "plans within budgets (MB: 10^6 bytes of chunks)",
    "case | plain | allowed | budget | worst step | / allowed | / budget |  | sim plain"
    " | sim ours | asked for | static | profiled | time | control | plan s",
    lines,
)
SETTINGS = {
    "budgets": Setting(list(EXTRA), shares, "shares of plain training's peak: 0.8,0.45"),
    "bytes": Setting(False, flag, "budgets in bytes, shares of the measured peak: yes"),
    "pairs": pairs(15),
    "planner": planner(),
    "profile": Setting(False, flag, "plan with measured costs: yes"),
    "optimizer": Setting("", one_of("sgd", "adam", "adamw"), "optimizer of the step"),
}
EXPERIMENT = Experiment(
    "budgets", rows=rows, run=run, columns=(COLUMNS,), bars=bars, notes=notes, settings=SETTINGS
)
SGD = replace(
    EXPERIMENT,
    name="budgets-sgd",
    bars=bars_of_training,
    settings={**SETTINGS, "optimizer": replace(SETTINGS["optimizer"], default="sgd")},
)
