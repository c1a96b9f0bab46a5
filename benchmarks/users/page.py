"""The table of all cells in Markdown, for ``docs/``."""

from __future__ import annotations

from benchmarks.experiment import Results
from benchmarks.users.verdicts import cells, figures_of, misses

HEADINGS = {
    "program": "see `benchmarks/users`",
    "mode": "`ms.patched()`, or with `budget=0.7` and `budget=0.5`; the callback where Keras fits",
    "plain MB": (
        "measured transient peak of plain training, 10⁶ bytes: the worst of five steps after two,"
        " in a fresh process, by TensorFlow's allocator"
    ),
    "peak MB": "the same in this mode",
    "simulated MB": (
        "what the plan promises, with the rest of the step where there is a budget; of several"
        " plans in a step, the largest"
    ),
    "sim/real": "simulated over measured peak; below 1 the simulation promised too little",
    "budget MB": (
        "the budget in bytes: a share of plain training as it is simulated; of several calls for"
        " gradients in a step, the largest"
    ),
    "kept": (
        "*yes*: the worst step kept the budget; *said*: it did not, and a warning named at least"
        " these bytes; *least …*: the budget was refused, and the least one that the error named"
        " is measured instead; *plain*: no plan was made"
    ),
    "results": (
        "*same*: under op determinism, all gradients, losses and variables have the bits of"
        " TensorFlow's own step (after two steps of `fit`)"
    ),
    "time": "median time of a step over the plain one's, in different processes: rough",
}


def page(results: Results) -> str:
    """Return the page."""
    made = list(cells(results))
    missed = [(*cell[:2], text) for cell in made for text in misses(cell[2], cell[1])]
    lines = [
        "# Programs of many kinds",
        "",
        "<!-- Made by `python -m benchmarks --only users`; do not edit. -->",
        "",
        "Small training steps as their users write them, with tapes, loops and updates of their"
        " own: are budgets kept, are promises true, are results TensorFlow's?",
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
        lines += ["", "## What is missed", ""]
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
    """Return text in which Markdown sees nothing."""
    return "`" + text.replace("`", "'").replace("|", "/").replace("\n", " ") + "`"
