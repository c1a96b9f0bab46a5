"""A plugin of pytest that runs any tests of TensorFlow code with gradients that recompute.

    pytest -c /dev/null -p tests.foreign.plugin --foreign recompute FILE ...

Each test runs inside of `tests.foreign.everywhere`, from the same seeds, so that all modes see the
same numbers. With ``--foreign-results`` its outcome is written to a file, and tests with an outcome
there are left out.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import time
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from tests.foreign import results
from tests.foreign.everywhere import everywhere
from tests.foreign.modes import MODES, PLAIN, options_of
from tests.foreign.results import Result
from tests.foreign.tally import Tally

__all__ = ["pytest_addoption", "pytest_runtest_protocol"]

_TALLY = pytest.StashKey[Tally]()
_REPORTS = pytest.StashKey[list[pytest.TestReport]]()
_TOTALS = pytest.StashKey[dict[str, int]]()
#: If arguments of tests are functions, the names of the tests contain their addresses.
_ADDRESS = re.compile("0x[0-9a-f]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foreign", "gradients that recompute")
    group.addoption("--foreign", choices=MODES, default=PLAIN, help=f"one of {', '.join(MODES)}")
    group.addoption("--foreign-results", type=Path, metavar="FILE", help="what became of each test")
    group.addoption(
        "--foreign-planning",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="the most time to plan for a budget (default: 2)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TOTALS] = {}
    # Tests of absl read flags, which its own main function parses.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Keras' tests of trainers import JAX before they check the backend. Tests that use JAX fail in
    # all modes.
    missing = [name for name in ("jax",) if importlib.util.find_spec(name) is None]
    sys.modules.update({name: types.ModuleType(name) for name in missing})
    try:
        return (yield)
    finally:
        for name in missing:
            del sys.modules[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("foreign_results")
    if file is None:
        return
    known = results.read(file)
    config.hook.pytest_deselected(items=[item for item in items if _name(item) in known])
    items[:] = [item for item in items if _name(item) not in known]


def _name(item: pytest.Item) -> str:
    """Return pytest's name of a test, which is the same in every process."""
    return _ADDRESS.sub("0x", item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    file = item.config.getoption("foreign_results")
    mode = item.config.getoption("foreign")
    options = options_of(mode, item.config.getoption("foreign_planning"))
    item.stash[_REPORTS] = []
    if file is not None:
        results.note(file, _name(item), Result("began"))
    began = time.perf_counter()
    with _seeded(), everywhere(options) as tally:
        answer = yield
    totals = item.config.stash[_TOTALS]
    for what, count in tally.counts().items():
        totals[what] = totals.get(what, 0) + count
    if file is not None:
        seconds = time.perf_counter() - began
        results.note(file, _name(item), _result(item.stash[_REPORTS], tally, seconds))
    return answer


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_REPORTS].append(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals = terminalreporter.config.stash[_TOTALS]
    terminalreporter.write_line(
        f"gradient computations: {totals.get('asked', 0)}, {totals.get('planned', 0)} of them"
        f" planned, {totals.get('rewired', 0)} recompute, {totals.get('infeasible', 0)} had too"
        " small a budget"
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw the same numbers in all modes, even in tests that call ``np.random.seed()``."""
    seed = np.random.seed
    random.seed(1)
    seed(1)
    tf.random.set_seed(1)
    fixed = mock.Mock(side_effect=lambda number=None: seed(1 if number is None else number))
    with mock.patch.object(np.random, "seed", fixed):
        yield


def _result(reports: list[pytest.TestReport], tally: Tally, seconds: float) -> Result:
    failed = [report for report in reports if report.failed]
    skipped = any(report.skipped for report in reports)
    outcome = "failed" if failed else "skipped" if skipped else "passed"
    error = "\n".join(report.longreprtext for report in failed)
    return Result(outcome, round(seconds, 3), **tally.counts(), trained=tally.trained, error=error)
