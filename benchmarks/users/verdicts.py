"""Verdicts on cells, from their figures: budgets kept, promises true, results the same."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiment import Figure, Results
from benchmarks.tables import mark

#: Options of ``ms.patched``, or of the callback; ``None``: plain.
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "default": {},
    "70 %": {"budget": 0.7},
    "50 %": {"budget": 0.5},
}
#: Bars on simulated over measured peak: the median error, and the most by which one is too low.
MEDIAN_ERROR, MOST_UNDER = 0.03, 0.04


def budget_of(result: Mapping[str, Any]) -> int | None:
    """Return the budget of a step: the largest budget of its plans."""
    return max((p["budget"] for p in result["plans"] if p["budget"]), default=None)


def announced(result: Mapping[str, Any]) -> int:
    """Return the most bytes that warnings say the step may take."""
    found = [int(n.replace(",", "")) for w in result["warnings"] for n in _MAY_TAKE.findall(w)]
    return max(found, default=0)


_MAY_TAKE = re.compile(r"may take ([\d,]+)")


def simulated(result: Mapping[str, Any]) -> int | None:
    """Return the peak that plans promise for the step; ``None``: none of them covers it.

    With budgets, the promise covers the whole step if that was simulated, else it is the largest
    plan's. Without, a single plan is a promise for its gradients, several plans are none.
    """
    plans = result["plans"]
    alone = len(plans) == 1 and not any("NothingSaved" in w for w in result["warnings"])
    if not alone and not any(plan["budget"] for plan in plans):
        return None
    return int(max(max(p["allocated"], _whole(p)) for p in plans))


def _whole(plan: Mapping[str, Any]) -> float:
    """Return the simulated bytes of a whole step, without the margin for chance."""
    return (plan["whole_step"] or 0) / (1 + plan["margin"])


def kept(result: Mapping[str, Any], plain: Mapping[str, Any] | None, share: float | None) -> str:
    """Return ``"yes"`` if a budget was kept, ``"said"`` if a warning named the excess, or ``"no"``.

    Without a plan, the budget is the share of the measured plain peak. ``""``: there is no budget.
    """
    budget = budget_of(result)
    if budget is None and share is not None and plain and "peak" in plain:
        budget = int(share * plain["peak"])
    if budget is None or share is None:
        return ""
    if result["peak"] <= budget:
        return "yes"
    return "said" if result["peak"] <= announced(result) else "no"


def _share(mode: str) -> float | None:
    return (MODES[mode] or {}).get("budget")


def cells(results: Results) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield program, mode, result and plain result of each measured cell except plain ones."""
    for name in dict.fromkeys(row.rpartition("/")[0] for row in results):
        for mode in MODES:
            found = results.get(f"{name}/{mode}")
            if found is not None and mode != "plain":
                yield name, mode, found, results.get(f"{name}/plain", {})


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each cell."""
    for name, mode, result, plain in cells(results):
        yield name, mode, *figures_of(result, plain, mode), mark(not misses(result, mode))


def figures_of(result: Mapping[str, Any], plain: Mapping[str, Any], mode: str) -> Iterator[str]:
    """Yield the figures of a cell as text."""
    yield _mb(plain.get("peak"))
    if "peak" not in result:
        yield from ("",) * 4
        yield "failed"
        yield from ("",) * 2
        return
    promise, budget = simulated(result), budget_of(result)
    yield _mb(result["peak"])
    yield _mb(promise)
    yield f"{promise / result['peak']:.3f}" if promise else ""
    yield _mb(budget)
    least = "".join(f"least {one['fraction']:.0%}, " for one in result["refused"])
    yield least + (kept(result, plain, _share(mode)) or ("" if result["plans"] else "plain"))
    yield {None: "", "": "same"}.get(result.get("different"), "differ")
    yield f"{result['seconds'] / plain['seconds']:.2f}" if "seconds" in plain else ""


def _mb(value: float | None) -> str:
    return f"{value / 1e6:,.1f}" if value else ""


def misses(result: Mapping[str, Any], mode: str) -> list[str]:
    """Return the failures of a cell, in words."""
    if "peak" not in result:
        return [result["failed"]["error"].splitlines()[-1][:200]]
    found = [f"results differ: {result['different'][:200]}"] if result.get("different") else []
    if kept(result, None, _share(mode)) == "no":
        found.append(f"the step took {result['peak']:,} bytes of a budget of {budget_of(result):,}")
    promise = simulated(result)
    if promise and _share(mode) and promise / result["peak"] - 1 < -MOST_UNDER:
        found.append(f"{promise:,} bytes were simulated; the step took {result['peak']:,}")
    return found


def notes(results: Results) -> Iterator[str]:
    """Yield the failures of cells."""
    for name, mode, result, _ in cells(results):
        yield from (f"{name}, {mode}: {text}" for text in misses(result, mode))


def bars(results: Results) -> list[Figure]:
    """Return the bars of all measured cells."""
    made = list(cells(results))
    if not made:
        return []
    good = [(mode, result, plain) for _, mode, result, plain in made if "peak" in result]
    verdicts = [kept(result, plain, _share(mode)) for mode, result, plain in good]
    other = sum(bool(r.get("different")) for _, r, _ in good)
    # Without a budget, the simulation excludes the update of variables.
    off = [s / r["peak"] - 1 for mode, r, _ in good if _share(mode) and (s := simulated(r))]
    figures = [
        Figure("cells that failed", len(made) - len(good), 0, count=len(made)),
        Figure("budgets broken", verdicts.count("no"), 0, count=len(verdicts)),
        Figure("other results", other, 0, count=len(good)),
    ]
    if off:
        name, many = "simulated against measured peak", len(off)
        middle = statistics.median(map(abs, off))
        figures += [
            Figure(f"{name}, median error", middle, MEDIAN_ERROR, True, many),
            Figure(f"{name}, most under", max(0.0, -min(off)), MOST_UNDER, True, many),
        ]
    return figures
