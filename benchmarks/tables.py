"""Prints tables of results, and figures with their bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.experiment import Columns, Experiment, Figure, Judged, Results


def mark(passed: bool) -> str:
    """Return the verdict as a colored word."""
    return "[green]pass[/green]" if passed else "[red]miss[/red]"


def print_results(
    experiment: Experiment, results: Results, figures: Sequence[Judged], console: Console
) -> None:
    """Print the tables of an experiment, its notes, and its bars."""
    for columns in experiment.columns:
        _print_columns(columns, results, console)
    for note in experiment.notes(results):
        console.print(note, highlight=False, soft_wrap=True)
    if not experiment.bars_in_columns:
        print_figures([one for one in figures if isinstance(one, Figure)], console)


def _print_columns(columns: Columns, results: Results, console: Console) -> None:
    lines = list(columns.lines(results))
    if not lines:
        return
    table = Table(title=columns.title, header_style="bold")
    for number, heading in enumerate(columns.headings.split(" | ")):
        left = number == 0 or heading in columns.text
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def print_figures(figures: Iterable[Figure], console: Console) -> None:
    """Print one line for each figure."""
    table = Table(title="bars", header_style="bold")
    table.add_column("figure")
    for heading in ("value", "bar", "of", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        shown = "{:.2%}" if figure.percent else "{:.4g}"
        bars = [("≥", figure.least), ("≤", figure.limit)]
        bar = " ".join(f"{sign} {shown.format(most)}" for sign, most in bars if most is not None)
        value = shown.format(figure.value)
        table.add_row(escape(figure.what), value, bar, str(figure.count), mark(figure.passed))
    if table.row_count:
        console.print(table)
