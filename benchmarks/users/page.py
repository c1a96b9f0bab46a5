"""The table of all cells in Markdown, for ``docs/``."""

from __future__ import annotations

from benchmarks.experiment import Results
from benchmarks.users.verdicts import cells, figures_of, misses

HEADINGS = {
    "program": "name of a program in `benchmarks/users`",
    "mode": (
        "*default*: `ms.patched()`. *70 %* and *50 %*: the same with `budget=0.7` and `budget=0.5`."
        " Programs that Keras' `fit` trains use the Keras callback instead"
    ),
    "plain MB": (
        "measured transient peak of plain training, in 10⁶ bytes, from TensorFlow's allocator. A"
        " fresh process runs two steps first; the figure is the worst of the next five"
    ),
    "peak MB": "measured transient peak in this mode",
    "simulated MB": (
        "peak that the plan promises. With a budget, the rest of the step is included. If a step"
        " has several plans, the largest promise counts"
    ),
    "sim/real": "simulated over measured peak; below 1, the step took more than the plan promised",
    "budget MB": (
        "budget in bytes, a share of the simulated peak of plain training. If a step calls for"
        " gradients several times, the largest budget counts"
    ),
    "kept": (
        "*yes*: the worst step kept the budget. *said*: it did not, and a warning named at least as"
        " many bytes. *no*: it did not, and no warning named as many bytes. *least …*: the budget"
        " was refused, and the row measures the least budget that the error named. *plain*: no plan"
        " was made"
    ),
    "results": (
        "*same*: under op determinism, all gradients, losses and variables have the bits of"
        " TensorFlow's own step. Programs with `fit` are compared after two steps"
    ),
    "time": (
        "median time of a step over the plain step's; rough, because the two run in different"
        " processes"
    ),
}


def page(results: Results) -> str:
    """Return the page."""
    made = list(cells(results))
    missed = [(*cell[:2], text) for cell in made for text in misses(cell[2], cell[1])]
    lines = [
        "# Programs of many kinds",
        "",
        "<!-- Do not edit: `python -m benchmarks --only users` writes this page. -->",
        "",
        "These programs are small training steps as users write them, with tapes, loops and updates"
        " of their own. Does each step keep its budget? Does it take the simulated bytes, and no"
        " more? Are its results TensorFlow's?",
        "",
        *(f"- **{name}**: {text}." for name, text in HEADINGS.items()),
        "",
        *_stamp(results),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---|---|" + "---:|" * 5 + "---|---|---:|",
    ]
    for name, mode, result, plain in made:
        lines.append("| " + " | ".join([name, mode, *figures_of(result, plain, mode)]) + " |")
    if missed:
        lines += ["", "## Cells that miss a bar", ""]
        lines += [f"- **{name}**, {mode}: {_escaped(text)}" for name, mode, text in missed]
    return "\n".join([*lines, ""])


def _stamp(results: Results) -> list[str]:
    """Return versions, machine and day of the newest cell."""
    if not results:
        return []
    newest = max(results.values(), key=lambda one: one.get("when", ""))
    names = ("tensorflow", "keras", "python", "machine")
    if any(name not in newest for name in names):
        return []
    return [
        f"TensorFlow {newest['tensorflow']}, Keras {newest['keras']}, Python {newest['python']},"
        f" {newest['machine']}, {newest['when'][:10]}."
    ]


def _escaped(text: str) -> str:
    """Return the text as Markdown code in one line."""
    return "`" + text.replace("`", "'").replace("|", "/").replace("\n", " ") + "`"
