"""The fastest plan within a budget, for networks that are chains of stages.

The planner cuts the graph into stages (:mod:`~memsaving_gradients.planners.chains.stages`). The
dynamic program for chains (:mod:`~memsaving_gradients.planners.chains.rotor`: Beaumont et al. 2019,
with several options a stage as in Rockmate) decides what each stage keeps and which stages run
again. Its actions become a schedule of the whole graph, which is simulated. One table serves all
budgets, so the whole curve of plans costs little more than one plan: `candidates` walks it from
much memory to little.

The program's promises hold for its model of stages, not for the graph. The planner therefore
chooses the fastest plan whose simulated peak is within the budget. It tries a fixed row of
candidates, then the candidates between the best one and the next faster one. The row does not
depend on the budget, so a larger budget never gets a slower plan. On large graphs, few plans can be
simulated. The planner then enters an endless row at the budget, and searches as if peaks fell along
the row. Optimal for chains in the program's model, where every stage may run any number of times; a
graph that branches wider than a stage gets a good plan. Deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memsaving_gradients.planners.chains.rotor import Action, Table
from memsaving_gradients.planners.chains.stages import Stages, cut_stages
from memsaving_gradients.planners.proposal import (
    SMALLER,
    Deadline,
    Interrupted,
    Limits,
    Proposal,
    TrialCount,
    proposed,
)
from memsaving_gradients.schedules.builder import Recorder
from memsaving_gradients.schedules.schedule import Schedule, ordered
from memsaving_gradients.schedules.simulate import TIE, simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["candidates", "plan", "record"]

#: Slots limit a table's precision: budgets below this share of its top get a table of their own.
FINE = 0.25
#: The most slots of a table, enough that rounding a stage's bytes wastes little; and the most
#: additions to fill it.
MOST_SLOTS, ADDITIONS = 2000, 8e8
#: Plans to simulate: budgets of neighboring candidates differ by `SMALLER`, or more. Chosen by
#: judgement.
TRIALS = TrialCount(executions=500_000, fewest=8, most=64)
#: If fewer plans than this can be simulated, only plans near the budget are. Chosen by
#: judgement.
MANY_TRIALS = 24


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Return the fastest schedule within the budget of ``limits``; the one with the least peak if
    there is no budget or no schedule fits."""
    search = _Search(graph, limits)
    try:
        search.run()
    except Interrupted:
        return replace(proposed(graph, limits, search.best.schedule), complete=False)
    return proposed(graph, limits, search.best.schedule)


def candidates(
    graph: TrainingGraph, limits: Limits = Limits(), budgets: Sequence[float] = ()
) -> Iterator[Schedule]:
    """Yield schedules from the one that keeps everything down to the one with the least memory; the
    budget of ``limits`` does not matter.

    Each is the fastest for some number of bytes in the program's model. If only few schedules can
    be simulated, these numbers are ``budgets``.
    """
    curve = _Curve(graph, limits)
    yield curve.everything()
    few = curve.trials < MANY_TRIALS and len(budgets) > 0
    for budget in budgets if few else curve.row:
        if (schedule := curve.schedule(budget)) is not None:
            yield schedule


def record(
    graph: TrainingGraph, stages: Stages, actions: Iterable[Action], chained: Iterable[int] = ()
) -> Schedule:
    """Return the schedule of the whole graph that follows ``actions``."""
    return _Follower(graph, stages).follow(list(actions)).schedule(chained)


class _Follower:
    """A recorder that knows, at every time, which storages the actions so far keep.

    ``held`` counts the holders of each storage. Recomputed storages without a holder are dropped at
    the end of each action.
    """

    def __init__(self, graph: TrainingGraph, stages: Stages) -> None:
        self.graph, self.stages = graph, stages
        self.recorder = Recorder(graph)
        self.storage: list[int] = graph.storage.tolist()
        self.held: Counter[int] = Counter(dict.fromkeys(stages.always, 1))
        self.inputs: set[int] = set()
        self.outputs: set[int] = set()
        self.seen = 0
        self.first = True

    def follow(self, actions: list[Action]) -> Recorder:
        """Record all of ``actions``."""
        for op in range(self.graph.first_backward):
            self.recorder.run(op)
        self.seen = len(self.recorder.steps)
        for k, (kind, stage, option) in enumerate(actions):
            if kind == "backward":
                self._backward(stage, option)
            elif kind != "drop":
                last = kind == "history" and actions[k + 1].kind == "backward"
                self._forward(stage, option if kind == "history" else None, last)
        return self.recorder

    def _forward(self, stage: int, option: int | None, last: bool) -> None:
        """Keep the input of a stage; with an ``option``, also its history and, if the stage is not
        the ``last`` one of a stretch, its output."""
        if stage not in self.inputs:
            self.inputs.add(stage)
            self._hold(self.stages.inputs[stage])
        if option is not None:
            self._hold(self.stages.histories[stage][option])
            if not last:
                self.outputs.add(stage)
                self._hold(self.stages.inputs[stage + 1])
        self._forget()

    def _backward(self, stage: int, option: int) -> None:
        if self.first:
            self.first = False
            for storage in dict.fromkeys(self.storage):
                if not self.held[storage]:
                    self.recorder.drop(storage)
        if stage in self.outputs:
            self.outputs.remove(stage)
            self._release(self.stages.inputs[stage + 1])
        for op in self.stages.backward[stage]:
            self.recorder.run(op)
        self._release(self.stages.histories[stage][option])
        if stage in self.inputs:
            self.inputs.remove(stage)
            self._release(self.stages.inputs[stage])
        self._forget()

    def _hold(self, storages: tuple[int, ...]) -> None:
        if not self.first:
            self.recorder.make(storages)
        self.held.update(storages)

    def _release(self, storages: tuple[int, ...]) -> None:
        self.held.subtract(storages)
        for storage in storages:
            if not self.held[storage]:
                self.recorder.drop(storage)

    def _forget(self) -> None:
        """Drop storages recomputed since the last call that have no holder."""
        for step in self.recorder.steps[self.seen :]:
            if step.copy:
                for value in self.graph.writes[step.op]:
                    if not self.held[self.storage[value]]:
                        self.recorder.drop(self.storage[value])
        self.seen = len(self.recorder.steps)


class _Curve:
    """Schedules by the budget that the dynamic program gets.

    ``row``: a fixed choice of budgets, from large to small.
    """

    def __init__(self, graph: TrainingGraph, limits: Limits) -> None:
        self.graph = graph
        self.chained = limits.sums(graph)
        self.tables = graph.derived(_Tables, frozenset(limits.keep))
        self.stages = self.tables.stages
        self.trials = TRIALS.of(graph)
        self._seen: set[tuple[Action, ...]] = set()

    def everything(self) -> Schedule:
        """Return the schedule that recomputes nothing."""
        return ordered(self.graph, self.chained)

    def schedule(self, budget: float) -> Schedule | None:
        """Return the schedule for the program's ``budget``; ``None`` if there is none, or it was
        returned before."""
        actions = self.actions(budget)
        if actions is None or actions in self._seen:
            return None
        self._seen.add(actions)
        return self.record(actions)

    def actions(self, budget: float) -> tuple[Action, ...] | None:
        """Return the program's actions for ``budget``; ``None`` if there are none."""
        table = self.tables.finest(budget)
        return None if table.seconds(budget) == float("inf") else tuple(table.actions(budget))

    def record(self, actions: Iterable[Action]) -> Schedule:
        """Return the schedule that follows ``actions``."""
        return record(self.graph, self.stages, actions, self.chained)

    def between(self, low: float, high: float) -> list[float]:
        """Return budgets between two, evenly spaced among budgets with different plans; from small
        to large."""
        inside = [b for b in self.tables.budgets() if low < b < high][::-1]
        return _thinned(inside, self.trials // 2)

    @cached_property
    def row(self) -> list[float]:
        """A fixed choice of budgets, from large to small, as many as can be simulated."""
        found: list[float] = []
        budgets = self.tables.budgets()
        for budget in budgets:
            if not found or budget <= found[-1] * SMALLER or budget == budgets[-1]:
                found.append(budget)
        return _thinned(found, self.trials)

    def step(self, number: int) -> float:
        """Return the budget ``number`` of an endless row from large to small."""
        return self.stages.chain.most * (1 - TIE) ** number


def _thinned(row: list[float], most: int) -> list[float]:
    """Return at most ``most`` of a row, including the first and the last."""
    if len(row) <= most:
        return row
    return [row[round(k * (len(row) - 1) / (most - 1))] for k in range(most)]


class _Tables:
    """The stages of a graph, and tables of several sizes for them: the smaller a budget, the finer
    its slots."""

    def __init__(self, graph: TrainingGraph, keep: frozenset[int]) -> None:
        self.stages = cut_stages(graph, keep)
        length = self.stages.chain.length
        self._slots = int(min(6 * ADDITIONS / length**3, MOST_SLOTS))
        self._made: dict[int, Table] = {}

    def finest(self, budget: float) -> Table:
        """Return the table with the finest slots that is large enough for ``budget``."""
        level = 0
        while self._top(level + 1) >= budget and not self._ends(self._top(level)):
            level += 1
        while level and (self._table(level).top * self._table(level).unit < budget):
            level -= 1
        return self._table(level)

    def budgets(self) -> list[float]:
        """Return all budgets that make a difference, from large to small."""
        found: list[float] = []
        for level in itertools.count():
            table = self._table(level)
            top, least = self._top(level), min(table.budgets, default=float("inf"))
            last = least >= FINE * top or self._ends(top) or table.top < 100
            floor = 0.0
            if not last:
                finer = self._table(level + 1)
                floor = finer.top * finer.unit
            found += [b for b in table.budgets if b > floor]
            if last:
                break
        return found

    def _table(self, level: int) -> Table:
        if level not in self._made:
            self._made[level] = Table(self.stages.chain, self._top(level), self._slots)
        return self._made[level]

    def _top(self, level: int) -> float:
        return float(self.stages.chain.most * FINE**level)

    def _ends(self, top: float) -> bool:
        """Return whether the slots of a table up to ``top`` are as fine as bytes."""
        return top <= self._slots


@dataclass(frozen=True)
class _Trial:
    """A simulated schedule, and the program's budget that led to it."""

    budget: float
    schedule: Schedule
    peak: int
    seconds: float


class _Search:
    """The search for the fastest schedule that fits."""

    def __init__(self, graph: TrainingGraph, limits: Limits) -> None:
        self.graph, self.limits = graph, limits
        self.deadline = Deadline.of(limits.seconds)
        self.trials: list[_Trial] = []
        self._try(float("inf"), ordered(graph, limits.sums(graph)))

    @property
    def best(self) -> _Trial:
        """The fastest trial that fits, or else the one with the least peak."""
        budget = self.limits.budget
        fitting = [t for t in self.trials if budget is not None and t.peak <= budget]
        if fitting:
            return min(fitting, key=lambda t: (t.seconds, t.peak))
        return min(self.trials, key=lambda t: (t.peak, t.seconds))

    def run(self) -> None:
        """Try the row of candidates, then those near the best."""
        budget = self.limits.budget
        if budget is not None and self.trials[0].peak <= budget:
            return
        self._report(0.0, "measuring stages")
        curve = _Curve(self.graph, self.limits)
        if budget is not None and curve.trials < MANY_TRIALS:
            self._walk(curve, budget)
            return
        for k, bytes_ in enumerate(curve.row):
            self._report(0.1 + 0.6 * k / len(curve.row), "simulating plans")
            self._try(bytes_, curve.schedule(bytes_))
        best = self.best
        if budget is None or best.peak > budget:
            return
        # Accept no plan faster than the next faster candidate: a larger budget, for which that one
        # is chosen, would get a slower plan.
        faster = [t for t in self.trials if t.seconds < best.seconds]
        limit = max(t.seconds for t in faster)
        high = min(t.budget for t in faster)
        near = curve.between(best.budget, min(high, curve.row[0]))
        for k, bytes_ in enumerate(near):
            self._report(0.7 + 0.3 * k / len(near), "simulating plans near the budget")
            self._try(bytes_, curve.schedule(bytes_), limit)

    def _walk(self, curve: _Curve, budget: int) -> None:
        """Search the endless row, from the budget on, for the fastest plan that fits: step by the
        error of the peak, or bisect."""

        def steps(bytes_: float) -> float:
            return math.log(bytes_ / curve.step(0), 1 - TIE)

        wanted = steps(max(budget, 1))
        number = max(0, math.ceil(wanted))
        # Plans up to number `over` need too much; from `enough` on they fit, or there is none.
        over, enough = -1, -1
        known: dict[tuple[Action, ...], int] = {}
        while len(known) < curve.trials:
            self._report(0.1 + 0.9 * len(known) / curve.trials, "simulating plans near the budget")
            actions = curve.actions(curve.step(number))
            # The program has no plan below its least budget.
            off = 0.0 if over >= 0 else -1.0
            if actions is not None:
                if actions not in known:
                    self._try(curve.step(number), curve.record(actions))
                    known[actions] = self.trials[-1].peak
                off = wanted - steps(known[actions])
            if off > 0:
                over = number
                number += math.ceil(off)
            else:
                enough = number
                number = max(0, number - int(-off))
            if over >= 0 and enough >= 0 and not over < number < enough:
                number = (over + enough) // 2
            if number in (over, enough):
                return

    def _try(self, budget: float, schedule: Schedule | None, least: float = 0.0) -> None:
        if schedule is None:
            return
        result = simulate(self.graph, schedule)
        if result.extra_seconds >= least:
            self.trials.append(_Trial(budget, schedule, result.peak, result.extra_seconds))

    def _report(self, share: float, what: str) -> None:
        if self.limits.progress is not None:
            self.limits.progress(share, what)
        if self.deadline.is_over:
            raise Interrupted
