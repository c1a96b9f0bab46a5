"""The executions that take the least time within a budget, proven by OR-Tools' CP-SAT.

*Executions* are the other form of a plan for a retention problem: the recipes that are run again,
each with the event before which it runs. They determine the plan, since each reader of a value
reads the latest copy, and each copy is freed after its last reader. A search can change decisions
on gaps one by one; a solver can find executions (its model is in
:mod:`memsaving_gradients.planners.retention._cp_sat`).

CP-SAT runs in another process, which also answers later requests. With a limit on *effort*, in its
own measure of work (a unit takes some seconds), it finds the same in every process, on every
machine. With a limit on seconds, it does not.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memsaving_gradients.errors import ArgumentError, SolverError
from memsaving_gradients.planners.retention.problem import Execution, Problem

__all__ = ["Solution", "check_installed", "is_installed", "solve"]


@dataclass(frozen=True)
class Solution:
    """The answer of CP-SAT.

    Attributes
    ----------
    executions
        The best known executions, in order; ``None``: none fit.
    bound
        Lower bound on the seconds of any executions within the limits on copies and bytes.
    proven
        Whether no better executions exist, or none at all.
    """

    executions: tuple[Execution, ...] | None
    bound: float
    proven: bool


def is_installed() -> bool:
    """Return whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def check_installed() -> None:
    """Raise `ArgumentError` if OR-Tools is not installed."""
    if not is_installed():
        raise ArgumentError(
            "planner", "exact", "needs OR-Tools; pip install 'memsaving-gradients[exact]'"
        )


def solve(
    problem: Problem,
    budget: int,
    *,
    copies: Sequence[int],
    rounds: int = 1,
    hint: Sequence[Execution] = (),
    bound: float = 0.0,
    effort: float | None = None,
    seconds: float | None = None,
    tick: Callable[[], None] | None = None,
) -> Solution:
    """Return the executions that take the least time.

    Parameters
    ----------
    problem
        The problem; each value must be made by an event.
    budget
        The most bytes alive.
    copies
        For each recipe, how many times it may be run again.
    rounds
        Passes through the order of the originals that are allowed between two events.
    hint
        Executions to begin with. They need not fit.
    bound
        Known lower bound on the time of executions, seconds.
    effort, seconds
        Limits at which to stop with the best so far; ``None``: no limit.
    tick
        Called ten times a second. An exception from it ends the search, and is passed on.

    Examples
    --------
    A chain of three values of a byte each, which the backward pass reads last one first; two fit:

    >>> chain = Problem(
    ...     reads=[(), (0,), (1,), (2,), (3, 1), (4, 0)],
    ...     writes=[(0,), (1,), (2,), (3,), (4,), (5,)], size=[1] * 6,
    ...     recipe=[0, 1, 2, -1, -1, -1], inputs=[(), (0,), (1,)], outputs=[(0,), (1,), (2,)],
    ...     seconds=[1.0, 1.0, 1.0],
    ...     scratch=[0, 0, 0], during=[0] * 6, between=[0] * 6)
    >>> solve(chain, 3, copies=[3, 3, 3]) if is_installed() else Solution(((5, 0),), 1.0, True)
    Solution(executions=((5, 0),), bound=1.0, proven=True)
    """
    check_installed()
    request = {
        "problem": asdict(problem),
        "budget": int(budget),
        "copies": list(copies),
        "rounds": rounds,
        "hint": list(hint),
        "bound": bound,
        "effort": effort,
        "seconds": seconds,
        # One worker for each core; but a single one with a limit on effort, so that the result does
        # not depend on chance.
        "workers": os.cpu_count() if effort is None else 1,
    }
    executions: tuple[Execution, ...] | None = None
    for answer in _Solver.running().ask(request, tick or (lambda: None)):
        bound = max(bound, answer["bound"])
        if "executions" in answer:
            executions = tuple((event, recipe) for event, recipe in answer["executions"])
    least = answer["status"]
    if least == "optimal" and executions is not None:
        bound = sum(problem.seconds[recipe] for _, recipe in executions)
    return Solution(executions, bound, least in ("optimal", "infeasible"))


class _Solver:
    """The process of CP-SAT."""

    _one: _Solver | None = None

    @classmethod
    def running(cls) -> _Solver:
        """Return the running process; start one if there is none or it has ended."""
        if cls._one is not None and cls._one.process.poll() is not None:
            cls._end()
        if cls._one is None:
            cls._one = cls()
            atexit.register(cls._end)
        return cls._one

    @classmethod
    def _end(cls) -> None:
        if cls._one is not None:
            cls._one.process.kill()
            cls._one.process.communicate()
            cls._one = None
            atexit.unregister(cls._end)

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_cp_sat.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self._errors = threading.Thread(target=self._listen_to_errors, daemon=True)
        self._errors.start()

    def ask(self, request: dict[str, Any], tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Return all answers to a request, the status last. An interruption ends the process."""
        answers: list[dict[str, Any]] = []
        done = False
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            while not answers or "status" not in answers[-1]:
                tick()
                try:
                    line = self._lines.get(timeout=0.1)
                except queue.Empty:
                    continue
                if not line.endswith("\n"):
                    raise BrokenPipeError
                answers.append(json.loads(line))
            done = True
        except BrokenPipeError:
            raise self._ended() from None
        finally:
            if not done:
                self._end()
        return answers

    def _ended(self) -> SolverError:
        status = self.process.wait()
        # Its error output may not have been read yet.
        self._errors.join(timeout=1)
        why = (
            "".join(self._said).strip().rpartition("\n")[2]
            or "it was killed, possibly because memory ran out"
        )
        return SolverError(f"OR-Tools ended early, with exit status {status}: {why}")

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _listen_to_errors(self) -> None:
        assert self.process.stderr is not None
        self._said.extend(self.process.stderr)
