"""The start of the command line: ``python -m memsaving_gradients`` imports the package, and with it
TensorFlow, before it runs ``__main__``. This module runs before that.

TensorFlow writes to the file descriptor of standard error, in part before its log level has effect.
So that descriptor is pointed to the null device. Python goes on writing to the old one, so messages
of this package and of imported programs are seen.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from memsaving_gradients.cli.arguments import parse

__all__ = ["INTERRUPTED", "be_quiet", "if_command"]

#: Fact: the exit status after Ctrl-C, as in shells: 128 plus the number of the signal.
INTERRUPTED = 130
#: The name of the program, as in ``python -m``.
_MODULE = "memsaving_gradients"

_quiet: list[bool] = []


def if_command() -> None:
    """Parse the command line and silence TensorFlow, if this process is the command. Call this
    before TensorFlow is imported."""
    if not _is_command(sys.argv, sys.orig_argv):
        return
    signal.signal(signal.SIGINT, _interrupted)
    options = parse(sys.argv[1:])
    if not options.debug:
        be_quiet()


def be_quiet() -> None:
    """Drop output to the descriptor of standard error, except Python's. Later calls do nothing."""
    if _quiet:
        return
    _quiet.append(True)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        seen = os.dup(2)
    except OSError:
        # There is no standard error.
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stderr = os.fdopen(seen, "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def _is_command(arguments: list[str], original: list[str]) -> bool:
    """Return whether Python was started with ``-m`` and our name, and is still looking that up.

    Examples
    --------
    >>> _is_command(["-m", "explain"], ["python", "-m", "memsaving_gradients", "explain"])
    True
    >>> _is_command(["-m"], ["python", "-m", "program_that_imports_us"])
    False
    """
    if arguments[:1] != ["-m"] or "-m" not in original:
        return False
    return original[original.index("-m") + 1 :][:1] == [_MODULE]


def _interrupted(*_: Any) -> None:
    """End the process at once: planning would go on with the best plan so far."""
    if sys.stderr is not None and sys.stderr.isatty():
        # A bar may have hidden the cursor.
        sys.stderr.write("\x1b[?25h\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)
