"""A pytest plugin: a run that is ended from outside leaves no process behind.

Ctrl-C and SIGTERM end the run, its workers, and all that they have started: measured processes,
clusters, solvers, kernels of notebooks. Processes are found by their parents, so that none needs to
be registered.
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

import psutil
import pytest

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist are ended by the process that started them.
    if not hasattr(config, "workerinput"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _ended)


def _ended(number: int, frame: FrameType | None) -> None:
    # Before any test hears of it: one that ended its own process would make that process' children
    # hard to find.
    found: set[psutil.Process] = set()
    while new := {*psutil.Process().children(recursive=True)} - found:
        found |= new
        # What is stopped starts no more processes.
        _send(new, signal.SIGSTOP)
    _send(found, signal.SIGKILL)
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")


def _send(processes: set[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
