"""What a row of `benchmarks.zoo.compatibility` must show; the page and the table of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from benchmarks.experiment import Columns, Results
from benchmarks.tables import mark

Result = Mapping[str, Any]

HEADINGS = {
    "network": "as its library names it",
    "parameters": "trainable numbers, in millions",
    "inputs": "shapes of one batch, labels not shown",
    "gradients": (
        "*equal*: with the default plan and with that of the next columns all gradients, the loss"
        " and all variables after the step have the bits that TensorFlow's own step gives them,"
        " under op determinism with grappler's arithmetic rewriting off (and, for TensorFlow's own"
        " step alone, its memory optimizer, which lets sums of large graphs be added in whatever"
        " order addends come); *within*: they differ, but under default settings by no more than"
        " 1e-6 of the largest gradient or twice the spread of five plain runs"
    ),
    "plain": (
        "measured transient peak of plain training, 10⁶ bytes: the worst of five steps after two,"
        " in a fresh process, by TensorFlow's allocator"
    ),
    "default": "measured peak with the default plan, as a share of *plain*",
    "45 %": (
        "measured peak with `budget=0.45`, as a share of that budget in bytes. Where no plan fits,"
        " the least budget that the error names is planned for instead, and stands in front of the"
        " arrow as a share of what plain training takes. Planning may take a minute"
        " (`planning_seconds=60`)"
    ),
    "+ time": "extra time of that plan, estimated (and measured, where it was: `--set pairs=15`)",
    "40 %": "the same with `budget=0.4`; not asked for where 45 % is refused",
    "passed": (
        "gradients are equal (or within), and no measured peak exceeds its budget or that share of"
        " *plain*"
    ),
}


def failures(result: Result) -> list[str]:
    """What a row misses, in words."""
    found = [
        f"{part}: {text.splitlines()[-1][:200] if text else 'failed'}"
        for part, text in result["failed"].items()
    ]
    if result.get("gradients") is not None and _gradients(result) == "differ":
        worst = max(result["gradients"], key=lambda one: (not one["equal"], one["error"]))
        names = ", ".join(worst["differ"]) or "the loss or the state"
        found.append(
            f"gradients differ by {worst['error']:.1e} of the largest ({names}, …), count"
            f" {worst['count']}"
        )
    for name, budget in result["budgets"].items():
        peak, planned = budget["ours"]["peak"], budget["ours"]["plan"]["budget"]
        if peak > planned:
            found.append(f"{name}: {peak:,} bytes were taken of {planned:,}")
        elif budget["refused"] is None and peak > budget["allowed"]:
            found.append(
                f"{name}: {peak:,} bytes are more than that of {result['plain']['peak']:,}"
            )
    return found


def _gradients(result: Result) -> str:
    """``"equal"``, ``"within"`` the promise for default settings, or ``"differ"``."""
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
    """Yield what rows miss, and how many pass."""
    missed = {row: failures(results[row]) for row in _ordered(results)}
    for row, texts in missed.items():
        yield from (escape(f"{row}: {text}") for text in texts)
    yield f"{sum(not texts for texts in missed.values())} of {len(results)} rows pass"


def page(results: Results, rows: Sequence[str] = ()) -> str:
    """Return the page in Markdown; those of ``rows`` that have no results are named."""
    lacking = [row for row in rows if row not in results]
    lines = [
        "# Networks of other libraries",
        "",
        (
            "<!-- Made by `python -m benchmarks --only compatibility` (or `make bench-models`); do"
            " not edit. -->"
        ),
        "",
        (
            "Made by `python -m benchmarks --only compatibility`. Networks that were not written"
            " for this library, with random weights, at small sizes: is each"
        ),
        (
            "gradient TensorFlow's own, and is each budget kept? The step computes loss and"
            " gradients, and consumes each gradient at once."
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
    """All versions that results were made with."""
    found: dict[str, set[str]] = {}
    for result in results.values():
        for name, number in result.get("libraries", {}).items():
            found.setdefault(name, set()).add(number)
    said = [f"{name} {' and '.join(sorted(numbers))}" for name, numbers in sorted(found.items())]
    codes = {result.get("code", "unknown") for result in results.values()}
    when = sorted(result["when"][:10] for result in results.values() if "when" in result)
    dates = f"; measured from {when[0]} to {when[-1]}" if when else ""
    return (
        f"Versions: {', '.join(said)}; sources of this library {', '.join(sorted(codes))}{dates}."
    )


def _cells(result: Result) -> Iterator[str]:
    """All cells between the name and the verdict."""
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
