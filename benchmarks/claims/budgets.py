"""``python -m benchmarks.claims.budgets``: the fastest plans within budgets, measured.

Each model is planned for several shares of what plain training takes, and run: the worst of five steps against the budget, the
simulated peak against the measured one, the time of a step against the plain one's, the predicted extra time
against the measured one. Where no plan fits, the least budget that the error names is planned for and measured.

Every peak and every ratio of times has a process of its own. The plan is made in the first one, saved, and applied in
the second one. ``--pairs 0`` leaves out times.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import shares as parse_shares
from benchmarks.bars import Figure, mark, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.errors import GraphToolsError
from graph_tools.memory.measure import in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "budgets.json"

#: What is trained: builder and options for `benchmarks.networks.build`.
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

#: Shares of the plain transient peak, and the extra step time that they may cost in the median over models.
EXTRA = {0.80: 0.03, 0.60: 0.06, 0.45: 0.09, 0.35: 0.14}
#: Simulated against measured peak: the median error, and the most that may be promised too low.
MEDIAN_ERROR, MOST_UNDER = 0.02, 0.03
#: Predicted against measured extra time, where that is at least so much: the median error, in shares of the extra time.
PREDICTED_FROM, PREDICTED_ERROR = 0.10, 0.20
#: A control farther from 1 than this says that the machine was busy.
NOISE = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; 1 if a bar is missed or a case fails."""
    options = _parse(arguments)
    models = [name for name in MODELS if fnmatch.fnmatch(name, options.only)]
    if not models:
        print(f"--only {options.only!r} matches no model of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    if options.optimizer and options.json == RESULTS:
        options.json = RESULTS.with_stem(f"{RESULTS.stem}-{options.optimizer}")
    results: dict[str, Any] = {}
    console = Console(stderr=True)
    for name in models:
        model, sizes = MODELS[name]
        if options.optimizer:
            sizes = {**sizes, "optimizer": options.optimizer}
        for case, result in measure(name, model, sizes, options, console):
            results[case] = result
            write(options.json, results)
    figures = judge(results)
    if options.optimizer:
        # Plain training is simulated without.
        figures = [figure for figure in figures if "simulated" not in figure.what]
    write(options.json, results, figures)
    print_results(results, figures, Console(width=180))
    failed = [case for case, result in results.items() if "failed" in result]
    return int(bool(failed) or not all(figure.passed for figure in figures))


def measure(
    name: str, model: str, sizes: dict[str, Any], options: argparse.Namespace, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases of one model, with their names; ``options`` as from `parser`."""
    what = {"model": model, "options": sizes}
    refusals: dict[int, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for share in options.budgets:
        case = f"{name}-{100 * share:.3g}"
        start = time.perf_counter()
        try:
            if not plain:
                plain = in_fresh_process(
                    "benchmarks.probes:peak",
                    {**what, "ours": False, "requested": True},
                    ENVIRONMENT,
                )
            result = _case(what, share, plain, options, refusals)
        except GraphToolsError as error:
            result = {"failed": str(error)}
        seconds = time.perf_counter() - start
        console.print(f"{case} {seconds:.0f} s", markup=False, highlight=False)
        yield case, {"model": name, "share": share, **result}


def _case(
    what: dict[str, Any],
    share: float,
    plain: Mapping[str, Any],
    options: argparse.Namespace,
    refusals: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    """One model within one budget. Refused budgets come to the same least one: it is measured once."""
    allowed = int(share * plain["peak"])
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        saved = str(Path(folder, "plan.json"))
        asked = allowed if options.bytes else share
        settings = {"planner": options.planner, "profile": options.profile}
        ours, refused = planned(what, asked, settings, saved, known=refusals)
        if refused is not None and refused["least"] in refusals:
            return {**refusals[refused["least"]], "refused": refused, "allowed": allowed}
        if refused is not None and "refused" in ours:
            return {
                "failed": f"the least budget named, {refused['least']:,} bytes, is refused: "
                f"{ours['refused']['least']:,} bytes are named then"
            }
        timed = None
        if options.pairs:
            timed = in_fresh_process(
                "benchmarks.probes:budget_ratio",
                {**what, "plan": saved, "pairs": options.pairs, "profile": not options.profile},
                ENVIRONMENT,
            )
    result = {
        "plain": dict(plain),
        "ours": ours,
        "refused": refused,
        "allowed": allowed,
        "time": timed,
        "predicted": _predicted(ours["plan"]["extra_time"], timed, options.profile),
        "planning": ours["seconds"]["gradients"] - ours["seconds"]["tensorflow"],
    }
    if refused is not None:
        refusals[refused["least"]] = result
    return result


def planned(
    what: Mapping[str, Any],
    budget: float | int,
    settings: Mapping[str, Any],
    save: str,
    *,
    known: Container[int] = (),
    requested: bool = True,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A step within a budget, or within the least one that the error names; and that refusal, if there was one.

    ``what``: model and options; ``settings``: others of ``gradients``; the plan is saved as ``save``. A least budget that is ``known`` is not tried: the
    first answer is the refusal then, as it is if the least budget is refused as well.
    """

    def within(budget: float | int) -> dict[str, Any]:
        found: dict[str, Any] = in_fresh_process(
            "benchmarks.probes:budget_peak",
            {
                **what,
                "save": save,
                "settings": {**settings, "budget": budget},
                "requested": requested,
            },
            ENVIRONMENT,
        )
        return found

    ours = within(budget)
    refused = ours.get("refused")
    if refused is None:
        return ours, None
    return (ours if refused["least"] in known else within(refused["least"])), refused


def _predicted(
    planned: float, timed: Mapping[str, Any] | None, profile: bool
) -> dict[str, float | None]:
    """The extra time of the plan by static and by measured costs."""
    other = None if timed is None else timed["predicted"]
    first, second = ("profiled", "static") if profile else ("static", "profiled")
    return {first: planned, second: other}


def errors(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """How far the simulated peaks are from the measured ones, as shares of these; negative: too low."""
    plan = result["ours"]["plan"]
    found = []
    for side, suffix in (("plain", "_plain"), ("ours", "")):
        measured = result[side]
        found.append((f"{side}, chunks", plan["allocated" + suffix] / measured["peak"] - 1))
        if measured.get("requested"):
            found.append((f"{side}, requested", plan["peak" + suffix] / measured["requested"] - 1))
    return found


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """All bars that ``results`` have figures for."""
    made = [result for result in results.values() if "failed" not in result]
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
    """Every measured peak once: the plain one of a model, and that of a least budget, stand in several cases."""
    seen = set()
    for result in made:
        for what, error in errors(result):
            key = (result["model"], what, error)
            if what.endswith(unit) and key not in seen:
                seen.add(key)
                yield error


def print_results(
    results: Mapping[str, Mapping[str, Any]], figures: Sequence[Figure], console: Console
) -> None:
    """Print a row for each case, and the bars below."""
    table = Table(title="plans within budgets (MB: 10^6 bytes of chunks)", header_style="bold")
    table.add_column("case", no_wrap=True)
    headings = ("plain", "allowed", "budget", "worst step", "/ allowed", "/ budget", "")
    more = ("sim plain", "sim ours", "asked for", "static", "profiled", "time", "control")
    for heading in (*headings, *more, "plan s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, result in results.items():
        if "failed" in result:
            table.add_row(case, *[""] * 6, "[red]failed[/red]")
        else:
            table.add_row(case, *_row(result))
    console.print(table)
    for case, result in results.items():
        if "failed" in result:
            console.print(f"{case} failed: {result['failed']}", highlight=False, markup=False)
        elif result["refused"]:
            console.print(
                f"{case}: refused; the least budget named, {result['refused']['fraction']:.1%} of plain, was "
                "planned for and measured",
                highlight=False,
            )
    print_figures(figures, console)


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


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("budgets", __doc__, RESULTS, list(EXTRA))
    options.add_argument(
        "--only", default="*", metavar="GLOB", help="names of models, with * and ?"
    )
    options.add_argument(
        "--optimizer",
        choices=["sgd", "adam", "adamw"],
        help="train: steps, plain and ours, update the variables",
    )
    return options.parse_args(arguments)


def parser(
    name: str, what: str | None, results: Path, shares: Sequence[float]
) -> argparse.ArgumentParser:
    """What can be said to a benchmark that measures budgets."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=what)
    parser.add_argument(
        "--budgets",
        default=list(shares),
        type=parse_shares,
        metavar="SHARES",
        help="of what plain training takes, such as 0.8,0.45",
    )
    parser.add_argument(
        "--bytes", action="store_true", help="budgets in bytes: shares of the measured plain peak"
    )
    parser.add_argument("--pairs", type=int, default=15, help="of steps for times; 0: no times")
    parser.add_argument("--planner", default="auto", help="who plans")
    parser.add_argument("--profile", action="store_true", help="plan with measured costs")
    parser.add_argument("--json", type=Path, default=results, metavar="PATH", help="results file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
