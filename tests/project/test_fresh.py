"""Fresh processes of tests: their time is counted, and they end with the process that started
them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import fresh
from tests.helpers.processes import still_running

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os
from tests.helpers import fresh
fresh.context.set_forkserver_preload([])
fresh.fresh("tests.project.test_fresh:waits", folder={folder!r}, asked_by=os.getpid())
"""


def computes(seconds: float) -> int:
    """Use so many seconds of processor time (in a fresh process)."""
    rounds = 0
    while sum(os.times()[:2]) < seconds:
        rounds += 1
    return rounds


def waits(folder: str, asked_by: int) -> None:
    """Note the process id, kill the process ``asked_by``, and hang (in a fresh process)."""
    (Path(folder) / f"{os.getpid()}.waits").touch()
    os.kill(asked_by, 9)
    time.sleep(600)


def test_time_of_fresh_processes_counts() -> None:
    before = fresh.processor_seconds()
    # The clock has ticks of 0.01 s; the process takes a tenth of a second more than the assertion.
    assert fresh.fresh("tests.project.test_fresh:computes", seconds=0.3) > 0
    assert fresh.processor_seconds() - before > 0.2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork server")
def test_a_fresh_process_ends_with_the_one_that_asked_for_it(tmp_path: Path) -> None:
    run = [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path))]
    # With pipes, the call would wait until all processes have closed them.
    ended = subprocess.run(run, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    (waiting,) = (int(path.stem) for path in tmp_path.glob("*.waits"))
    assert ended.returncode == -9
    assert not still_running(p for p in psutil.process_iter() if p.pid == waiting)
