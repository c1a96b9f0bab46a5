"""A pytest plugin that lists the slowest tests, and tests that are too slow for the fast suite.

A fast test takes at most five seconds on a quiet machine. On a busy machine, wall time says nothing
about a test. Processor time says nothing about a test that waits for a cluster or a solver, whose
time is not counted. So a test is too slow if both times are too long. Nothing fails.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from tests.helpers import fresh

__all__ = ["pytest_runtest_protocol", "pytest_terminal_summary"]

SHOWN = 20
#: The most seconds of a fast test.
MOST = 5.0


def _seconds() -> tuple[float, float]:
    """Return the wall clock, and the processor seconds of this process, its ended children and
    calls in fresh processes."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(used.ru_utime + used.ru_stime for used in both)
    return time.perf_counter(), own + fresh.processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    # Reports carry the user's properties from workers to the process that prints.
    item.user_properties.append(("began", _seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "teardown":
        began = dict(report.user_properties)["began"]
        took = tuple(now - then for now, then in zip(_seconds(), began, strict=True))
        report.user_properties.append(("took", took))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    took = {
        report.nodeid: dict(report.user_properties)["took"]
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
    }
    slowest = sorted(took, key=lambda name: -took[name][0])
    terminalreporter.section(f"slowest {SHOWN} tests: seconds, and of processors")
    for name in slowest[:SHOWN]:
        clock, processors = took[name]
        terminalreporter.write_line(f"{clock:7.1f} {processors:7.1f}  {name}")
    terminalreporter.write_line(f"{sum(clock for clock, _ in took.values()):7.1f}  all")
    long = [name for name in slowest if min(took[name]) > MOST]
    if long and "not slow" in terminalreporter.config.getoption("markexpr"):
        terminalreporter.write_line(
            f"{len(long)} of them are no fast tests, with more than {MOST:g} seconds: "
            "make them smaller, share what they build, or mark them slow"
        )
