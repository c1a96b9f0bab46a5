"""Runs experiments: measures rows without results, and writes each result at once."""

from __future__ import annotations

import contextlib
import fnmatch
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.experiment import Experiment, Job, Results, Settings
from benchmarks.records import RESULTS, read, write
from graph_tools.errors import GraphToolsError


def results_of(experiment: Experiment) -> Path:
    """Return the default file for the results of an experiment."""
    return RESULTS / f"{experiment.file or experiment.name}.json"


def chosen(experiment: Experiment, settings: Settings, glob: str) -> list[str]:
    """Return the rows that a glob matches; ``"*"`` does not match `Experiment.apart`."""
    return [
        row
        for row in experiment.rows(settings)
        if fnmatch.fnmatchcase(row, glob) and not (glob == "*" and row in experiment.apart)
    ]


def measure(
    experiment: Experiment,
    rows: Iterable[str],
    path: Path,
    settings: Settings | None = None,
    *,
    again: bool = False,
    jobs: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Measure the rows that have no result yet; return the messages of rows that failed.

    Each result is written at once. If a row fails with a `GraphToolsError`, the other rows are
    still measured, and the file keeps its old result. ``again``: measure rows with results, too.
    """
    settings = experiment.defaults if settings is None else settings
    known, made, lock = read(path), dict[str, dict[str, Any]](), threading.Lock()
    todo = [row for row in rows if row not in known or experiment.due(known[row], settings, again)]
    failed: dict[str, str] = {}

    def one(row: str) -> None:
        begun = time.perf_counter()

        def save(result: dict[str, Any]) -> None:
            with lock:
                write(path, {row: result})

        job = Job(row, settings, known.get(row, {}), made, again, say, save)
        try:
            made[row] = experiment.run(job)
        except GraphToolsError as error:
            failed[row] = str(error)
        else:
            save(made[row])
        outcome = ": failed" if row in failed else ""
        say(f"{experiment.name}/{row}{outcome}, {time.perf_counter() - begun:.0f} s")

    # A single job runs in this thread, where it can be interrupted.
    with contextlib.ExitStack() as stack:
        each = map if jobs == 1 else stack.enter_context(ThreadPoolExecutor(jobs)).map
        list(each(one, todo))
    if todo and (results := read(path)):
        write(path, {}, experiment.bars(results))
    return failed


def rows_of(experiment: Experiment, rows: Iterable[str], *, again: bool) -> Results:
    """Return rows of an experiment from its file of results, and measure the rows it lacks.

    Raises
    ------
    GraphToolsError
        A row failed.
    """
    wanted, path = list(rows), results_of(experiment)
    for row, message in measure(experiment, wanted, path, again=again).items():
        raise GraphToolsError(f"{experiment.name}/{row}: {message}")
    found = read(path)
    return {row: found[row] for row in wanted}
