"""A benchmark: rows to measure, tables of their results, and bars that figures must clear.

Every benchmark is one `Experiment`. `Experiment.run` measures a row and returns JSON. Tables, bars
and pages are computed from the results of all rows, so that they can be printed from the file of
results without measuring anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from benchmarks.markdown import wrapped

#: The result of each row, by name of the row.
Results = Mapping[str, Mapping[str, Any]]
#: Values of an experiment's settings, by name.
Settings = Mapping[str, Any]


class Judged(Protocol):
    """A dataclass that knows whether it clears its bar."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether it clears its bar."""


@dataclass(frozen=True)
class Figure:
    """One figure and its bar.

    Attributes
    ----------
    what
        Name of the figure.
    value, limit, least
        The figure, its upper and its lower bar; ``None``: no bar on that side.
    percent
        Whether to print percentages.
    count
        The number of measurements that it summarizes.
    """

    what: str
    value: float
    limit: float | None
    percent: bool = False
    count: int = 1
    least: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the figure is within its bars."""
        low = self.least is None or self.value >= self.least
        return low and (self.limit is None or self.value <= self.limit)


@dataclass(frozen=True)
class Columns:
    """A table of results.

    Attributes
    ----------
    title
        Text above the table.
    headings
        Headings of the columns, separated by ``" | "``. The first column and the columns named in
        `text` are aligned left.
    lines
        Cells of all lines, computed from the results.
    text
        Headings of columns that hold text.
    """

    title: str
    headings: str
    lines: Callable[[Results], Iterable[Sequence[str]]]
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A value that ``--set`` changes; `parse` raises ``ValueError`` or ``ArgumentTypeError``."""

    default: Any
    parse: Callable[[str], Any]
    help: str


@dataclass(frozen=True)
class Page:
    """A page of ``docs/`` that is written from the results.

    Attributes
    ----------
    file
        Name of the file.
    text
        Returns the page in Markdown, with lines of any length.
    """

    file: str
    text: Callable[[Results], str]

    def written(self, results: Results) -> str:
        """Return the page with wrapped prose."""
        return wrapped(self.text(results))


@dataclass(frozen=True)
class Job:
    """One row to measure.

    Attributes
    ----------
    row
        Name of the row.
    settings
        Settings of the experiment.
    known
        The stored result of this row.
    made
        Rows that this run has measured so far.
    again
        Whether to measure a row that has a result already.
    say
        Prints a line on standard error.
    save
        Writes a part of the result, so that an interrupted run keeps it.
    """

    row: str
    settings: Settings = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    made: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    again: bool = False
    say: Callable[[str], None] = lambda text: None
    save: Callable[[dict[str, Any]], None] = lambda result: None


@dataclass(frozen=True)
class Experiment:
    """A benchmark.

    Attributes
    ----------
    name
        Name that ``--only`` matches.
    rows
        Names of the rows, which may depend on settings.
    run
        Measures one row and returns JSON.
    columns
        Tables of the results.
    bars
        Figures with their bars, computed from the results that exist.
    bars_in_columns
        Whether the tables already print the bars.
    settings
        Settings that ``--set`` can change.
    file
        Stem of the file in ``benchmarks/results``; the name by default.
    due
        Whether to measure a row although it has a result; takes the result, the settings, and
        whether ``--again`` was given.
    apart
        Rows that run only if ``--only`` names them.
    missing
        Returns what this machine lacks for the rows that a glob matches, or ``None``.
    notes
        Lines to print below the tables.
    page
        Page that each run writes, if any.
    """

    name: str
    rows: Callable[[Settings], Iterable[str]]
    run: Callable[[Job], dict[str, Any]]
    columns: tuple[Columns, ...]
    bars: Callable[[Results], Sequence[Judged]]
    bars_in_columns: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    file: str = ""
    due: Callable[[Mapping[str, Any], Settings, bool], bool] = lambda result, settings, again: again
    apart: tuple[str, ...] = ()
    missing: Callable[[Settings, str], str | None] = lambda settings, glob: None
    notes: Callable[[Results], Iterable[str]] = lambda results: ()
    page: Page | None = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of the settings without ``--set``."""
        return {name: setting.default for name, setting in self.settings.items()}
