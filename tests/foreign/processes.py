"""One process for each file of tests and mode, forked from a process that has imported TensorFlow
and computed nothing (see `tests.helpers.fresh`).

If a process dies, or hangs in a test for longer than `SECONDS`, another one runs the remaining
tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.foreign import results
from tests.foreign.results import Result
from tests.helpers.fresh import context

__all__ = ["run_tests"]

#: Seconds before a test that hangs is ended: ten times the longest on a quiet machine.
SECONDS = 600.0

#: No other settings and plugins, so that tests run the same in every folder, and begin soon: an
#: import of plugins takes a second, and a search of discarded objects for exceptions takes another
#: one.
_CONFIGURATION = (
    *("-c", os.devnull, "-q", "--tb=long", "-rfE", "--disable-plugin-autoload"),
    *("-p", "no:cacheprovider", "-p", "no:unraisableexception"),
)


def run_tests(
    tests: Sequence[str], root: Path, mode: str, written: Path, seconds: float = SECONDS
) -> None:
    """Run the tests (files, or pytest's names) that have no results in ``written``."""
    arguments = [*_CONFIGURATION, "--rootdir", str(root), "-p", "tests.foreign.plugin"]
    arguments += ["--foreign", mode, "--foreign-results", str(written)]
    # If an argument is a function, pytest's name has its address: run the test with all arguments.
    chosen = (test.partition("[")[0] if "0x" in test else test for test in tests)
    arguments += [str(root / test) for test in dict.fromkeys(chosen)]
    while True:
        before = len(results.read(written))
        process = context.Process(
            target=_pytest, args=(arguments, str(written.with_suffix(".log")))
        )
        process.start()
        died = _wait(process, written, seconds)
        found = results.read(written)
        for test, result in found.items():
            if result.outcome == "began":
                results.note(written, test, Result("failed", error=died))
        if not died or len(found) == before:
            return


def _wait(process: BaseProcess, written: Path, seconds: float) -> str:
    """Return how the process died; ``""`` if it ended normally."""
    while process.is_alive():
        process.join(0.1)
        if process.is_alive() and time.time() - written.stat().st_mtime > seconds:
            process.kill()
            process.join()
            return f"did not end within {seconds:g} seconds"
    code = process.exitcode or 0
    # Other exit codes of pytest mean an error of its own, or of a plugin.
    return "" if code in (0, 1, 5) else f"the process ended early, with exit code {code}"


def _pytest(arguments: list[str], log: str) -> None:
    """Run pytest, in a process of its own."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    # Skip Python's cleanup at exit, which may wait for threads of TensorFlow.
    os._exit(pytest.main(arguments))
