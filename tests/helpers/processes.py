"""Processes that should have ended."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

__all__ = ["still_running"]


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Wait at most ten seconds for processes to end; return those that run."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
