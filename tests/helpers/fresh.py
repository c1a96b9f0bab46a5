"""Calls in fresh processes, without an import of TensorFlow for each.

`graph_tools.memory.measure.in_fresh_process` starts Python, which takes 3 to 6 seconds before the
first op. Here, a process that has imported TensorFlow and computed nothing
(:mod:`multiprocessing`'s fork server) forks each fresh process in hundredths of a second. This is
safe because TensorFlow starts its threads, devices and allocators with the first op, so that a fork
has its own.

It is for tests only. `in_fresh_process` has tests of its own (`test_measure`), and calls that need
another environment use it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["context", "end_with_parent", "fresh", "processor_seconds", "start"]

#: Seconds before a process that hangs is ended: ten times the longest on a quiet machine.
SECONDS = 600

#: Makes processes that have imported TensorFlow.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.helpers.support", "keras"])


_processor_seconds = [0.0]


def processor_seconds() -> float:
    """Return the processor seconds of all calls so far. (Fresh processes are children of the fork
    server, not of this process.)"""
    return _processor_seconds[0]


def start() -> None:
    """Start the fork server, which imports TensorFlow during collection, so that the first test
    need not wait for it."""
    forkserver.ensure_running()


class FreshProcessError(AssertionError):
    """The error if the function raised in its own process, or the process ended early."""


def fresh(target: str, kwargs: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """Return the result of a function in a process of its own, which counts memory on the CPU.

    ``target``: ``"package.module:function"``; ``kwargs`` and ``more``: its arguments. They and the
    result are pickled.
    """
    receiver, sender = context.Pipe(duplex=False)
    arguments = {**(kwargs or {}), **more}
    process = context.Process(target=_call, args=(sender, target, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            raise TimeoutError(f"{target} did not finish within {SECONDS} seconds")
        succeeded, answer, seconds = receiver.recv()
        _processor_seconds[0] += seconds
    except EOFError:
        process.join()
        raise FreshProcessError(
            f"{target} ended early, with exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not succeeded:
        raise FreshProcessError(f"{target} raised in its own process\n{answer}")
    return answer


def end_with_parent() -> None:
    """End this process as soon as its parent has ended, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _call(sender: Connection, target: str, arguments: dict[str, Any]) -> None:
    """Run in the fresh process."""
    end_with_parent()
    # Output goes to standard error: pytest reads the standard output of its workers.
    os.dup2(sys.stderr.fileno(), 1)
    module, _, function = target.partition(":")
    try:
        answer = True, getattr(importlib.import_module(module), function)(**arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    # User and system, of this process and of its children.
    sender.send((*answer, sum(os.times()[:4])))
    sender.close()
