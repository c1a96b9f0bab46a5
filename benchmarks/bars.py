"""What the tables of planning share: a figure beside its bar, a table of them, a file of results."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import new_file

__all__ = [
    "Figure",
    "chosen",
    "mark",
    "measure_missing",
    "options_for",
    "print_figures",
    "results_of",
    "stamp",
    "write",
]


@dataclass(frozen=True)
class Figure:
    """One figure and the most that it may be.

    Attributes
    ----------
    what
        Its name.
    value, limit
        Plain numbers; fractions are printed as percentages where `percent` says so.
    count
        How many measurements are behind it.
    """

    what: str
    value: float
    limit: float
    percent: bool = False
    count: int = 1

    @property
    def passed(self) -> bool:
        """Whether it is within the bar."""
        return self.value <= self.limit


def options_for(name: str, what: str | None, results: Path, only: str) -> argparse.ArgumentParser:
    """What can be said to every benchmark of planning: which ones of what (``only``), and where results go."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=what)
    parser.add_argument("--only", default="*", metavar="GLOB", help=only)
    parser.add_argument(
        "--json", type=new_file, default=results, metavar="PATH", help="results file"
    )
    return parser


def chosen(known: Iterable[str], only: str, apart: str = "") -> list[str]:
    """The names that ``--only`` matches, ``apart`` not among all of them; if there are none, that is said."""
    names = list(known)
    found = [name for name in names if fnmatch.fnmatch(name, only) and (only, name) != ("*", apart)]
    if not found:
        print(f"--only {only!r} matches none of {', '.join(names)}", file=sys.stderr)
    return found


def measure_missing(
    rows: Iterable[str],
    options: argparse.Namespace,
    measure: Callable[[str], dict[str, Any]],
    shown: Callable[[dict[str, Any]], str] = lambda _: "",
) -> dict[str, Any]:
    """All results by name of the row; those of ``--only`` that the file does not have yet (with ``--again``, all) are measured and written."""
    results: dict[str, Any] = {}
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    console = Console(stderr=True)
    for row in rows:
        if not fnmatch.fnmatch(row, options.only) or (row in results and not options.again):
            continue
        begun = time.perf_counter()
        results[row] = measure(row)
        took = f"{time.perf_counter() - begun:.0f} s"
        console.print(f"{row}: " + ", ".join(filter(None, (shown(results[row]), took))))
        write(options.json, {row: results[row]})
    return results


def results_of(
    path: Path, rows: Iterable[str], measure: Callable[[str], dict[str, Any]], *, again: bool
) -> dict[str, Any]:
    """Rows of another benchmark, from its file of results: what is not there (``again``: all) is measured and written to it."""
    wanted = list(rows)
    options = argparse.Namespace(only="*", json=path, again=again)
    results = measure_missing(wanted, options, measure)
    return {row: results[row] for row in wanted}


def mark(passed: bool) -> str:
    """A word in color."""
    return "[green]pass[/green]" if passed else "[red]miss[/red]"


def print_figures(figures: Iterable[Figure], console: Console) -> None:
    """One row for each figure."""
    table = Table(title="bars", header_style="bold")
    table.add_column("figure")
    for heading in ("value", "bar", "of", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures:
        if figure.percent:
            shown = (f"{figure.value:.2%}", f"≤ {figure.limit:.2%}")
        else:
            shown = (f"{figure.value:.4g}", f"≤ {figure.limit:.4g}")
        table.add_row(figure.what, *shown, str(figure.count), mark(figure.passed))
    console.print(table)


def stamp() -> dict[str, str]:
    """When and where results were made."""
    return {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tensorflow": version("tensorflow"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def write(path: Path, results: dict[str, Any], figures: Iterable[Any] | None = None) -> None:
    """Put results by name into the file at ``path``; those that were not made again keep their last ones, as do
    figures (dataclasses that say whether they `passed`), unless there are new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {name: {**stamp(), **result} for name, result in results.items()}
    document = {
        "cases": {**old.get("cases", {}), **made},
        "figures": old.get("figures", [])
        if figures is None
        else [{**asdict(figure), "passed": figure.passed} for figure in figures],
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
