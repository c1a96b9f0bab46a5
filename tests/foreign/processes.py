"""One process for each file of tests and mode, forked from one that has imported TensorFlow and
computed nothing (see `tests.helpers.fresh`).

A process that dies, or hangs in a test for longer than `SECONDS`, is followed by another one for
the tests after that.
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

#: What ends a test that hangs: ten times what the longest takes on a quiet machine.
SECONDS = 600.0

#: No settings and plugins but what is given, so that tests run the same wherever they lie, and
#: begin soon: plugins take a second to import, and looking for exceptions in what is thrown away
#: takes another one.
_CONFIGURATION = (
    *("-c", os.devnull, "-q", "--tb=long", "-rfE", "--disable-plugin-autoload"),
    *("-p", "no:cacheprovider", "-p", "no:unraisableexception"),
)


def run_tests(
    tests: Sequence[str], root: Path, mode: str, written: Path, seconds: float = SECONDS
) -> None:
    """Run the tests (files, or names as pytest has them) that ``written`` has no results of."""
    arguments = [*_CONFIGURATION, "--rootdir", str(root), "-p", "tests.foreign.plugin"]
    arguments += ["--foreign", mode, "--foreign-results", str(written)]
    # Where an argument is a function, pytest's own name has its address: all of them are run.
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
    """How the process died, if it did; nothing if it came to its end."""
    while process.is_alive():
        process.join(0.1)
        if process.is_alive() and time.time() - written.stat().st_mtime > seconds:
            process.kill()
            process.join()
            return f"did not end within {seconds:g} seconds"
    code = process.exitcode or 0
    # Other codes of pytest's are of errors of its own, or of a plugin.
    return "" if code in (0, 1, 5) else f"the process ended early, with exit code {code}"


def _pytest(arguments: list[str], log: str) -> None:
    """Run in a process of its own."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    # Without what Python does at its end, which may wait for threads of TensorFlow.
    os._exit(pytest.main(arguments))
