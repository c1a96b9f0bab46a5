"""A table of published figures and ours for each work, for a terminal and for ``docs/``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from benchmarks.experiment import Columns, Results
from benchmarks.papers.rows import Line, Work
from benchmarks.tables import mark

HEAD = """# Founding figures

The founding works of this library published figures. This page compares them with our own figures.
`make bench-papers` (`python -m benchmarks --only papers`) writes this page and
`benchmarks/results/papers.json`. `--only 'papers/chen*'` measures a part of the figures; `--again`
also measures figures that have results.

*Measured*: a step ran on a CPU, in a process of its own. Its memory is the count of TensorFlow's
allocator. Times are ratios of medians of steps that took turns.

*Planned*: the step is out of reach of a CPU. It was built from shapes, differentiated and planned;
its memory was simulated, and its extra time estimated.

The published figures come from GPUs of 2016 to 2019, so compare ratios. The column before the notes
says whether our figure is at least as good as the published one. For a starting point, such as the
memory before any saving, it says whether ours is within a fifth of the published figure.
"""


def shown(value: float | None, unit: str) -> str:
    """Return a figure with its unit.

    Examples
    --------
    >>> shown(0.1723, "%"), shown(6.7, "x"), shown(1234.5, "MB"), shown(None, "x")
    ('17.2 %', '6.70 ×', '1,234 MB', '–')
    """
    if value is None:
        return "–"
    match unit:
        case "%":
            return f"{100 * value:.1f} %"
        case "x":
            return f"{value:.2f} ×"
        case "MB":
            return f"{value:,.0f} MB"
        case "GB":
            return f"{value:.2f} GB"
        case _:
            return f"{value:.1f}"


def columns(work: Work) -> Columns:
    """Return the table of a work's lines."""
    headings = "figure | published | ours |  |  | note"
    return Columns(f"{work.title} ({work.source})", headings, partial(_cells, work), text=("note",))


def _cells(work: Work, results: Results) -> Iterator[tuple[str, ...]]:
    for line in work.lines(results):
        verdict = mark(line.passed) if _judged(line) else ""
        yield line.what, *_figures(line), verdict, line.note


def _figures(line: Line) -> tuple[str, str, str]:
    """Return the published figure, ours, and ``"measured"`` or ``"planned"``."""
    how = line.how if line.ours is not None else ""
    return shown(line.published, line.unit), shown(line.ours, line.unit), how


def page(works: Iterable[tuple[Work, Sequence[Line]]], results: Results) -> str:
    """Return the page of the documentation."""
    works = list(works)
    sections = [_section(work, lines) for work, lines in works if lines]
    missing = [name for work, _ in works for name in work.jobs if name not in results]
    return "\n".join([HEAD, *sections, _not_made(missing) + _stamp(results)])


def _section(work: Work, lines: Sequence[Line]) -> str:
    rows = [
        f"## {work.title}",
        "",
        f"{work.about}",
        "",
        f"Source: {work.source}.",
        "",
        "| figure | published | ours | how | | note |",
        "|---|---:|---:|---|---|---|",
    ]
    for line in lines:
        cells = (
            line.what,
            *_figures(line),
            ("yes" if line.passed else "**no**") if _judged(line) else "",
            line.note,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def _judged(line: Line) -> bool:
    return line.failed or (line.published is not None and line.ours is not None)


def _not_made(missing: Sequence[str]) -> str:
    names = ", ".join(f"`{name}`" for name in missing)
    return f"Without results yet, and not in these tables: {names}.\n\n" if missing else ""


def _stamp(results: Results) -> str:
    made = {(row["tensorflow"], row["machine"]) for row in results.values() if "machine" in row}
    where = "; ".join(f"TensorFlow {version}, {machine}" for version, machine in sorted(made))
    return f"Made with {where}.\n" if where else ""
