"""Verdicts on rows of `benchmarks.zoo.compatibility`; the page and the table of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from benchmarks.experiment import Columns, Results
from benchmarks.tables import mark

Result = Mapping[str, Any]

HEADINGS = {
    "network": "name of the network in its library",
    "parameters": "trainable numbers, in millions",
    "inputs": "shapes of one batch, without labels",
    "gradients": (
        "*equal*: all gradients, the loss and all variables after the step have the bits of"
        " TensorFlow's own step. The comparison covers the default plan and the plan of column"
        " *45 %*. Both steps run under op determinism, with grappler's arithmetic rewriting off."
        " Only TensorFlow's own step also runs without grappler's memory optimizer, which may add"
        " the terms of large graphs' sums in any order. *within*: the bits differ. Under default"
        " settings, the difference is at most twice the spread of five plain runs, or at most 1e-6"
        " of the largest gradient"
    ),
    "plain": (
        "measured transient peak of plain training, in 10⁶ bytes, from TensorFlow's allocator. A"
        " fresh process runs two steps first; the figure is the worst of the next five"
    ),
    "default": "measured peak with the default plan, as a share of *plain*",
    "45 %": (
        "measured peak with `budget=0.45`, as a share of that budget in bytes. If no plan fits, the"
        " row uses the least budget that the error names. The number before the arrow is this least"
        " budget, as a share of the simulated peak of plain training. Planning may take a minute"
        " (`planning_seconds=60`)"
    ),
    "+ time": (
        "estimated extra time of the plan in column *45 %*. If `--set pairs=15` measured the extra"
        " time, brackets contain the measured one and its control"
    ),
    "40 %": "the same as column *45 %*, with `budget=0.4`; not measured if 45 % is refused",
    "passed": (
        "*yes*: gradients are equal (or within), and no measured peak exceeds its budget or the"
        " budget's share of *plain*"
    ),
}


def failures(result: Result) -> list[str]:
    """Return the failures of a row, in words."""
    found = [
        f"{part}: {text.splitlines()[-1][:200] if text else 'failed'}"
        for part, text in result["failed"].items()
    ]
    if result.get("gradients") is not None and _gradients(result) == "differ":
        worst = max(result["gradients"], key=lambda one: (not one["equal"], one["error"]))
        names = ", ".join(worst["differ"]) or "the loss or the state"
        found.append(
            f"gradients differ by {worst['error']:.1e} of the largest gradient ({names}, …);"
            f" {worst['count']} gradients compared"
        )
    for name, budget in result["budgets"].items():
        peak, planned = budget["ours"]["peak"], budget["ours"]["plan"]["budget"]
        if peak > planned:
            found.append(f"{name}: the step took {peak:,} bytes of a budget of {planned:,}")
        elif budget["refused"] is None and peak > budget["allowed"]:
            plain = result["plain"]["peak"]
            found.append(f"{name}: the step took {peak:,} bytes, more than {name} of {plain:,}")
    return found


def _gradients(result: Result) -> str:
    """Return ``"equal"``, ``"within"`` (the allowed error), ``"differ"`` or ``"failed"``."""
    compared = result.get("gradients")
    if not compared:
        return "failed"
    if all(found["equal"] for found in compared):
        return "equal"
    near = result.get("spread")
    return "within" if near and all(found["equal"] for found in near) else "differ"


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network."""
    for row in _ordered(results):
        yield row, *_cells(results[row]), mark(not failures(results[row]))


def notes(results: Results) -> Iterator[str]:
    """Yield the failures of rows, and the number of rows that pass."""
    missed = {row: failures(results[row]) for row in _ordered(results)}
    for row, texts in missed.items():
        yield from (escape(f"{row}: {text}") for text in texts)
    yield f"{sum(not texts for texts in missed.values())} of {len(results)} rows pass"


def page(results: Results, rows: Sequence[str] = ()) -> str:
    """Return the page in Markdown, with the names of ``rows`` that have no results."""
    lacking = [row for row in rows if row not in results]
    lines = [
        "# Networks of other libraries",
        "",
        "<!-- Do not edit: `python -m benchmarks --only compatibility` writes this page. -->",
        "",
        (
            "`python -m benchmarks --only compatibility` (or `make bench-models`) writes this page."
            " It trains networks that were not written for this library, with random weights and at"
            " small sizes. Is each gradient TensorFlow's own? Does the step keep each budget? A"
            " step computes the loss and the gradients, and consumes each gradient at once."
        ),
        "",
        *(f"- **{name}**: {text}." for name, text in HEADINGS.items()),
        "",
        _versions(results),
        "",
    ]
    if lacking:
        names = ", ".join(f"`{row}`" for row in lacking)
        lines += [f"**Not measured yet** ({len(lacking)}): {names}.", ""]
    for family in dict.fromkeys(row.partition("/")[0] for row in _ordered(results)):
        rows = [row for row in _ordered(results) if row.startswith(family + "/")]
        passed = sum(not failures(results[row]) for row in rows)
        lines += [f"## {_TITLES.get(family, family)}", "", f"{passed} of {len(rows)} pass.", ""]
        lines.append("| " + " | ".join(HEADINGS) + " |")
        lines.append("|---|" + "---:|" * (len(HEADINGS) - 2) + "---|")
        for row in rows:
            missed = failures(results[row])
            last = "yes" if not missed else "**no**: " + _escaped("; ".join(missed))
            cells = [row.partition("/")[2], *_cells(results[row]), last]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


_TITLES = {
    "applications": "`keras.applications`",
    "transformers": "`transformers`, TensorFlow models",
    "tf_keras": "Keras 2 (`tf_keras`)",
    "hub": "KerasHub backbones",
}


def _ordered(results: Results) -> list[str]:
    families = list(_TITLES)

    def place(row: str) -> tuple[int, str]:
        family = row.partition("/")[0]
        return (families.index(family) if family in families else len(families), row)

    return sorted(results, key=place)


def _versions(results: Results) -> str:
    """Return a line with the versions behind the results."""
    found: dict[str, set[str]] = {}
    for result in results.values():
        for name, number in result.get("libraries", {}).items():
            found.setdefault(name, set()).add(number)
    said = [f"{name} {' and '.join(sorted(numbers))}" for name, numbers in sorted(found.items())]
    codes = {result.get("code", "unknown") for result in results.values()}
    when = sorted(result["when"][:10] for result in results.values() if "when" in result)
    dates = f" Measured from {when[0]} to {when[-1]}." if when else ""
    return (
        f"Versions: {', '.join(said)}. Hashes of this library's sources:"
        f" {', '.join(sorted(codes))}.{dates}"
    )


def _cells(result: Result) -> Iterator[str]:
    """Yield all cells between the name and the verdict."""
    compared = (result.get("gradients") or [None])[0]
    yield f"{compared['parameters'] / 1e6:,.2f}" if compared else ""
    yield _inputs(compared["inputs"]) if compared else ""
    yield _gradients(result)
    plain, default = result["plain"], result.get("default")
    yield f"{plain['peak'] / 1e6:,.1f}" if plain else "failed"
    yield f"{default['peak'] / plain['peak']:.0%}" if default else "failed"
    first, *others = ("45%", "40%")
    yield _budget(result, first)
    yield _time(result["budgets"].get(first))
    for name in others:
        yield _budget(result, name)


def _inputs(shapes: list[list[int]]) -> str:
    return ", ".join("×".join(map(str, shape)) for shape in shapes if len(shape) > 1)


def _budget(result: Result, name: str) -> str:
    budget = result["budgets"].get(name)
    if budget is None:
        return "failed" if name in result["failed"] else ""
    used = f"{budget['ours']['peak'] / budget['ours']['plan']['budget']:.0%}"
    refused = budget["refused"]
    return used if refused is None else f"least {refused['fraction']:.1%} → {used}"


def _time(budget: Mapping[str, Any] | None) -> str:
    if budget is None:
        return ""
    said = f"{budget['ours']['plan']['extra_time']:.0%}"
    timed = budget.get("time")
    if not timed:
        return said
    return f"{said} ({timed['ratio'] - 1:.0%}, control {timed['control'] - 1:+.0%})"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


COLUMNS = Columns(
    "networks of other libraries", " | ".join([*list(HEADINGS)[:-1], ""]), lines, text=("inputs",)
)
