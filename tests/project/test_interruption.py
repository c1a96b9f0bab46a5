"""A test run that is ended from outside leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import still_running
from tests.helpers.sampling import covering

ROOT = Path(__file__).parents[2]

#: Each test starts a process in a session of its own, which starts another one, and waits for them.
#: A deaf test goes on when it is interrupted, and starts them again.
TESTS = """
import subprocess, sys
from pathlib import Path
import pytest

INNER = "import os, time; open(f'{os.getpid()}.started', 'w').close(); time.sleep(600)"
OUTER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {INNER!r}])"

def wait():
    subprocess.run([sys.executable, "-c", OUTER], start_new_session=True)

@pytest.mark.parametrize("one", range(2))
def test_waits(one):
    wait()

@pytest.mark.parametrize("one", range(2))
def test_is_deaf(one):
    while True:
        try:
            wait()
        except BaseException:
            pass

@pytest.mark.parametrize("one", range(2))
def test_hears_late(one):
    try:
        wait()
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize(
    ("number", "workers", "test"),
    covering([signal.SIGINT, signal.SIGTERM], [0, 2], ["waits", "is_deaf", "hears_late"]),
)
def test_no_process_is_left(tmp_path: Path, number: int, workers: int, test: str) -> None:
    (tmp_path / "test_waits.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = [sys.executable, "-m", "pytest", "-p", "tests.helpers.interruption", "-n", str(workers)]
    run += ["-k", test]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    with subprocess.Popen(run, cwd=tmp_path, env=env, stdout=-1, stderr=-1) as pytest_:
        started = _until(lambda: [*tmp_path.glob("*.started")], max(workers, 1))
        all_ = psutil.Process(pytest_.pid).children(recursive=True)
        pytest_.send_signal(number)
        assert pytest_.wait(timeout=600) == pytest.ExitCode.INTERRUPTED
    assert {int(path.stem) for path in started} <= {process.pid for process in all_}
    assert not still_running(all_)


def _until(look, count: int) -> list[Path]:
    """Return the paths that ``look`` finds as soon as there are ``count`` of them."""
    while len(found := look()) < count:
        time.sleep(0.05)
    return found
