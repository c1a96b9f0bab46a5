"""A program that finds the best executions of a retention problem with OR-Tools' CP-SAT. It reads
one request a line, and prints its answers, one a line.

It runs in a process of its own, and imports nothing of this package: OR-Tools and TensorFlow bring
libraries of their own for protocol buffers, and crash where both are loaded (OR-Tools 9.15,
TensorFlow 2.21). :mod:`memsaving_gradients.planners.retention.constraint_program` starts it, makes
the requests and reads the answers.

The model is Moccasin's (Bartan et al. 2023, arXiv 2304.14463) in its staged form. Events are
numbered, and so are the recipes, in the order of their originals. Before each event, each recipe
has a position in each of one or more rounds; the event itself comes last. So recipes are run again
between two events in the order of the originals, at most once a round. A value has an interval for
each time that it is computed, from there to its last reader; the sizes of overlapping intervals fit
into the budget (one cumulative constraint). Each reader of a value chooses an interval that covers
it, by a Boolean each, which CP-SAT propagates far better than a reservoir that counts readers. The
request gives the number of times that each recipe may be run again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

if "tensorflow" in sys.modules:
    raise ImportError("OR-Tools crashes in a process with TensorFlow; run this file as a program")

from ortools.sat.python import cp_model

#: Fact: the cost of all recipes together, in the integers that CP-SAT counts in.
UNITS = 10**9


class _Made(NamedTuple):
    """One execution of a recipe: the original (``present`` is None), or another one."""

    start: Any
    present: Any
    ends: dict[int, Any]


class _Model:
    """A request as a model of CP-SAT."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.problem: dict[str, Any] = request["problem"]
        self.copies: list[int] = request["copies"]
        self.recipes: int = len(self.problem["inputs"])
        self.rounds: int = request["rounds"]
        self.stage = self.rounds * self.recipes + 1
        self.events: int = len(self.problem["reads"])
        self.model = cp_model.CpModel()
        self.born = {v: t for t, made in enumerate(self.problem["writes"]) for v in made}
        self.birth = [self.born[outputs[0]] for outputs in self.problem["outputs"]]
        self.order = sorted(range(self.recipes), key=lambda r: (self.birth[r], r))
        self.rank = {recipe: k for k, recipe in enumerate(self.order)}
        self.until = self._until()
        self.originals = [
            _Made(self.at(self.born[v]), None, {v: self._end(v, self.at(self.born[v]))})
            for v in range(len(self.problem["size"]))
        ]
        self.again = [self._copies(recipe) for recipe in range(self.recipes)]
        self._read_what_is_there()
        self._fit(request["budget"])
        self.scale = UNITS / max(sum(self.problem["seconds"]), 1e-300)
        self.cost = [max(1, round(s * self.scale)) for s in self.problem["seconds"]]
        total = sum(
            self.cost[r] * made.present for r in range(self.recipes) for made in self.again[r]
        )
        # Rounding may have raised each cost by half a unit.
        rounding = sum(map(len, self.again)) + 1
        least = min(math.floor(request["bound"] * self.scale), UNITS * 1000) - rounding
        if least > 0:
            self.model.add(total >= least)
        self.model.minimize(total)
        self._hint(request["hint"])

    def at(self, event: int, recipe: int | None = None, turn: int = 0) -> int:
        """Return the position of an event, or of a recipe that is run again before it."""
        within = self.stage - 1 if recipe is None else turn * self.recipes + self.rank[recipe]
        return event * self.stage + within

    def executions(self, value: Callable[[Any], int]) -> list[tuple[int, int]]:
        """Return the recipes that are run again, in order, as pairs of an event and a recipe before
        it; ``value`` returns the value of a variable."""
        positions = sorted(
            value(made.start) for copies in self.again for made in copies if value(made.present)
        )
        return [(at // self.stage, self.order[at % self.stage % self.recipes]) for at in positions]

    def _until(self) -> list[int]:
        """Return, for each value, the last event that reads it or anything computed from it."""
        until = [self.born[v] for v in range(len(self.problem["size"]))]
        for event, read in enumerate(self.problem["reads"]):
            for v in read:
                until[v] = max(until[v], event)
        for recipe in reversed(self.order):
            last = max(until[v] for v in self.problem["outputs"][recipe])
            for v in self.problem["inputs"][recipe]:
                until[v] = max(until[v], last)
        return until

    def _end(self, value: int, first: int) -> Any:
        """Return a variable for the end of an interval: one position after its last reader."""
        last = self.at(self.until[value]) + 1
        return self.model.new_int_var(first + 1, max(last, first + 1), "")

    def _copies(self, recipe: int) -> list[_Made]:
        """Return the further executions that a recipe may have, the earliest first."""
        outputs = self.problem["outputs"][recipe]
        last = max(self.until[v] for v in outputs)
        # Just after its original, a recipe need not be run again.
        first = max(self.problem["border"], self.birth[recipe] + 2)
        positions = [
            self.at(event, recipe, turn)
            for event in range(first, last + 1)
            for turn in range(self.rounds)
        ]
        copies: list[_Made] = []
        domain = cp_model.Domain.from_values(positions)
        for number in range(min(self.copies[recipe], len(positions))):
            start = self.model.new_int_var_from_domain(domain, "")
            present = self.model.new_bool_var("")
            ends = {v: self._end(v, positions[0]) for v in outputs}
            if number:
                before = copies[-1]
                self.model.add_implication(present, before.present)
                self.model.add(before.start < start).only_enforce_if(present)
            copies.append(_Made(start, present, ends))
        return copies

    def _supplies(self, value: int) -> Iterator[_Made]:
        yield self.originals[value]
        if self.problem["recipe"][value] >= 0:
            yield from self.again[self.problem["recipe"][value]]

    def _read_what_is_there(self) -> None:
        for event, read in enumerate(self.problem["reads"]):
            for value in read:
                self._cover(value, self.at(event), None)
        for recipe in range(self.recipes):
            for made in self.again[recipe]:
                for value in self.problem["inputs"][recipe]:
                    self._cover(value, made.start, made.present)

    def _cover(self, value: int, reader: Any, present: Any) -> None:
        """Require that an interval of a value covers the position that reads it."""
        model = self.model
        covers = [] if present is None else [present.negated()]
        supplies = list(self._supplies(value))
        if len(supplies) == 1:
            constraint = model.add(supplies[0].ends[value] > reader)
            if present is not None:
                constraint.only_enforce_if(present)
            return
        for made in supplies:
            covered = model.new_bool_var("")
            model.add(made.ends[value] > reader).only_enforce_if(covered)
            if made.present is not None:
                model.add_implication(covered, made.present)
                model.add(made.start < reader).only_enforce_if(covered)
            covers.append(covered)
        model.add_bool_or(covers)

    def _fit(self, budget: int) -> None:
        """Require that all that is in memory at the same time fits into the budget."""
        problem, model = self.problem, self.model
        intervals: list[Any] = []
        demands: list[int] = []

        def take(interval: Any, demand: int) -> None:
            intervals.append(interval)
            demands.append(demand)

        for value, size in enumerate(problem["size"]):
            for made in self._supplies(value) if size else ():
                end = made.ends[value]
                if made.present is None:
                    take(model.new_interval_var(made.start, end - made.start, end, ""), size)
                else:
                    length = model.new_int_var(1, self.at(self.events), "")
                    take(
                        model.new_optional_interval_var(made.start, length, end, made.present, ""),
                        size,
                    )
        for recipe, size in enumerate(problem["scratch"]):
            for made in self.again[recipe] if size else ():
                take(
                    model.new_optional_fixed_size_interval_var(made.start, 1, made.present, ""),
                    size,
                )
        for event in range(self.events):
            at = self.at(event)
            if problem["during"][event]:
                take(model.new_fixed_size_interval_var(at, 1, ""), problem["during"][event])
            if problem["between"][event] and self.recipes:
                first = at - self.stage + 1
                take(
                    model.new_fixed_size_interval_var(first, self.stage - 1, ""),
                    problem["between"][event],
                )
        unit = math.gcd(*demands) or 1
        model.add_cumulative(intervals, [demand // unit for demand in demands], budget // unit)

    def _hint(self, executions: Sequence[tuple[int, int]]) -> None:
        """Let the search begin with ``executions``, if they are valid."""
        model = self.model
        wanted: list[list[int]] = [[] for _ in range(self.recipes)]
        before, turn = (-1, -1), 0
        for event, recipe in executions:
            # Another round begins where an execution is out of the order of the originals.
            here = (event, self.rank[recipe])
            turn = 0 if event != before[0] else turn + (here <= before)
            before = here
            wanted[recipe].append(self.at(event, recipe, min(turn, self.rounds - 1)))
        by_position: dict[int, tuple[int, _Made]] = {}
        for recipe, copies in enumerate(self.again):
            for k, made in enumerate(copies):
                there = k < len(wanted[recipe])
                model.add_hint(made.present, there)
                if there:
                    at = wanted[recipe][k]
                    model.add_hint(made.start, at)
                    by_position[at] = recipe, made
        ends: dict[int, tuple[Any, int]] = {}
        latest: dict[int, Any] = {}

        def read(value: int, at: int) -> None:
            ends[latest[value].index] = latest[value], at + 1

        for event in range(self.events):
            for at in range(self.at(event) - self.stage + 1, self.at(event)):
                if at in by_position:
                    recipe, made = by_position[at]
                    for value in self.problem["inputs"][recipe]:
                        read(value, at)
                    for value in self.problem["outputs"][recipe]:
                        latest[value] = made.ends[value]
                        read(value, at)
            for value in self.problem["reads"][event]:
                read(value, self.at(event))
            for value in self.problem["writes"][event]:
                latest[value] = self.originals[value].ends[value]
                read(value, self.at(event))
        for end, at in ends.values():
            model.add_hint(end, at)


class _Telling(cp_model.CpSolverSolutionCallback):
    """A callback that prints each better solution as it is found."""

    def __init__(self, model: _Model) -> None:
        super().__init__()
        self._model = model

    def on_solution_callback(self) -> None:
        executions = self._model.executions(self.value)
        _say({"executions": executions, "bound": self.best_objective_bound / self._model.scale})


def answer(request: dict[str, Any]) -> None:
    """Solve a request, and print its status and bound."""
    model = _Model(request)
    solver = _solver(request)
    status = solver.solve(model.model, _Telling(model))
    rounding = (sum(map(len, model.again)) + 1) / model.scale
    bound = solver.best_objective_bound / model.scale - rounding
    _say({"status": solver.status_name(status).lower(), "bound": max(bound, 0.0)})


def _solver(request: dict[str, Any]) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = request["workers"]
    solver.parameters.random_seed = 0
    if request["effort"] is not None:
        solver.parameters.max_deterministic_time = request["effort"]
    if request["seconds"] is not None:
        solver.parameters.max_time_in_seconds = request["seconds"]
    return solver


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        answer(json.loads(line))
