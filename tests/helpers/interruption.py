"""A pytest plugin: a run that is ended from outside leaves no process behind.

Ctrl-C and SIGTERM end the run, its workers, and all that they have started: measured processes,
clusters, solvers, kernels of notebooks. Processes are found by their parents, so that none needs to
be registered. The product catches Ctrl-C while it plans, and Python ignores it in destructors: a
test that goes on after the signal is ended with its process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

import psutil
import pytest

__all__ = ["pytest_sessionstart"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that pytest has to end by itself.
PATIENCE = 5.0


def pytest_sessionstart(session: pytest.Session) -> None:
    # Workers of pytest-xdist are ended by the process that started them.
    if hasattr(session.config, "workerinput"):
        return

    def ended(number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        # Before any test hears of it: one that ended its own process would make that process'
        # children hard to find.
        _kill_children()
        why = f"ended by {signal.Signals(number).name}"
        # After this test, if that catches what is raised here; and at the latest when time is over.
        session.shouldstop = why
        timer = threading.Timer(PATIENCE, _exit)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt(why)

    for number in SIGNALS:
        signal.signal(number, ended)


def _exit() -> None:
    _kill_children()
    os._exit(pytest.ExitCode.INTERRUPTED)


def _kill_children() -> None:
    found: set[psutil.Process] = set()
    while new := {*psutil.Process().children(recursive=True)} - found:
        found |= new
        # What is stopped starts no more processes.
        _send(new, signal.SIGSTOP)
    _send(found, signal.SIGKILL)


def _send(processes: set[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
