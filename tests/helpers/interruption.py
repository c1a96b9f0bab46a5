"""A pytest plugin: an interrupted run leaves no process behind.

Ctrl-C and SIGTERM end the run, its workers, and all processes that they have started: measurements,
clusters, solvers, kernels of notebooks. Processes are found by their parents, so that none needs to
be registered. The library catches Ctrl-C while it plans, and Python ignores it in destructors: if a
test continues after the signal, it is ended with its process.
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
#: Seconds for pytest to end by itself.
PATIENCE = 5.0


def pytest_sessionstart(session: pytest.Session) -> None:
    # Workers of pytest-xdist are ended by the process that started them.
    if hasattr(session.config, "workerinput"):
        return

    def ended(number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        # Before any test gets the signal: if a test ended its own process, the children of that
        # process would be hard to find.
        _kill_children()
        why = f"ended by {signal.Signals(number).name}"
        # The run ends after this test if that catches the exception, or when the timer is over.
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
        # A stopped process starts no more processes.
        _send(new, signal.SIGSTOP)
    _send(found, signal.SIGKILL)


def _send(processes: set[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
