"""Decisions with the least extra time under a budget, by local search.

While bytes are above the budget, the search takes the values that are idle at the worst step. It
drops the one that costs least time for the bytes that it saves, simulated exactly for the most
promising few. DTR (Kirisame et al. 2021, arXiv 2006.09616) applies this rule while a network runs.
Here the future is known. So the cost of a value includes its inputs that are missing by then. The
value may return early, while its inputs are there, or inputs may be held for it. Far from the
budget, many values are dropped at once. Then the search improves: it takes decisions back in one
stretch of the step, drops others instead, and keeps the result if it takes less time (large
neighborhood search, Shaw 1998). It is deterministic: its random numbers are always the same.

Nothing is guaranteed but the simulated peak. On the public instances of up to 100 ops, the search
reaches the optimum in seconds. The cost is a given number of runs
(:func:`memsaving_gradients.planners.retention.simulate.run`), most of which are simulated only from
the first difference to an earlier one (:mod:`memsaving_gradients.planners.retention.incremental`).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator

import numpy as np

from memsaving_gradients.planners.proposal import SMALLER
from memsaving_gradients.planners.retention.incremental import Base, Change, changed
from memsaving_gradients.planners.retention.problem import (
    DROPPED,
    EARLY,
    KEPT,
    LATE,
    NEAR,
    STRICT,
    Problem,
)
from memsaving_gradients.planners.retention.simulate import Run

__all__ = ["RUNS_OF_A_STRETCH", "Search"]

#: Changes of either kind that are simulated at each step of the descent; and other events above the
#: budget that are tried when nothing helps at the worst one.
PROMISING = 5
#: Gaps that are kept again at once when a stretch is planned anew: one of these numbers.
TAKEN_BACK = (1, 1, 2, 2, 3, 4, 6)
#: Noise of the rates, and power of the excess, when a stretch is planned anew: one of each.
NOISE, POWER = (0.0, 0.3, 0.8), (1, 1, 3)
#: The share of the attempts that decide some gaps anew at random instead.
SHAKEN = 0.3
#: The share by which extra time may rise on the way to less; and after how many stretches in a row
#: without a better plan the search returns to the best one.
WORSE, ASTRAY = 0.03, 60
#: The search ends after this many stretches in a row without a better plan.
PATIENCE = 1500
#: The most runs to plan one stretch anew, or to round the decisions of prices; a search with fewer
#: runs in all improves nothing.
RUNS_OF_A_STRETCH = 400


class Search:
    """A search for decisions of one problem under one budget.

    ``runs`` counts the runs so far, long ones as several; ``tick`` is called before each run, and
    may raise to end the search.
    """

    def __init__(
        self,
        problem: Problem,
        budget: int,
        *,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self.problem, self.budget = problem, budget
        self.runs = 0
        self._tick = tick or (lambda: None)
        self._random = random.Random(0)
        self._begin = [begin for _, begin, _ in problem.gaps]
        self._end = [end for _, _, end in problem.gaps]
        self._events = len(problem.reads)
        self._decided = [
            gap
            for gap, (value, begin, end) in enumerate(problem.gaps)
            if problem.recipe[value] >= 0
            and problem.size[value]
            and end - begin > 1
            and end >= problem.border
        ]
        # For each value, the gaps of the values that are computed from it.
        self._made_of: list[list[int]] = [[] for _ in problem.size]
        for value, number in enumerate(problem.recipe):
            for v in problem.inputs[number] if number >= 0 else ():
                self._made_of[v] += range(problem.first_gap[value], problem.first_gap[value + 1])
        # A least cost, in seconds: of changes that cost nothing, the one that frees most is best.
        self._least = min((s for s in problem.seconds if s > 0), default=1.0) * 1e-3
        # Results of `_missing`, valid as long as decisions do not change.
        self._known: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def _base(self, decisions: list[int]) -> Base:
        """Simulate decisions in full, and count the run."""
        self._tick()
        base = Base(self.problem, decisions)
        self._count(base.run)
        return base

    def _play(self, base: Base, change: Change) -> Run:
        """Simulate the base with a change, and count the run."""
        self._tick()
        result = base.simulate(change)
        self._count(result)
        return result

    def _count(self, result: Run) -> None:
        """Count a run: as several if it has several times the steps of plain training, because it
        takes as long to simulate. (Six Inception blocks near their least memory, where plans take
        ten times as long as a step: 37 s instead of 68 to find that a budget is too small.)"""
        self.runs += len(result.event) // self._events

    def descend(
        self,
        decisions: list[int],
        most: int,
        *,
        fixed: Collection[int] = (),
        limit: float = float("inf"),
        noise: float = 0.0,
        power: int = 1,
        bold: int = 0,
    ) -> tuple[list[int], Run]:
        """Change decisions until they meet the budget.

        Parameters
        ----------
        decisions
            The decisions to begin with.
        most
            Runs after which to give up.
        fixed
            Gaps whose decisions do not change.
        limit
            Extra seconds above which to give up.
        noise
            Standard deviation of the logarithm of a random factor on each rate.
        power
            The power of the excess, as in `Run.excess`.
        bold
            Far from the budget, one in this many of the promising changes is made at once; 0: one
            change at a time.

        Returns
        -------
        tuple
            The decisions and their run; its peak is above the budget if nothing helped.
        """
        base = self._base(decisions.copy())
        decisions, now = base.decisions, base.run
        end = self.runs + most
        while bold and now.peak > NEAR * self.budget and self.runs < end:
            changes, _ = self._changes(now, decisions, fixed, int(np.argmax(now.bytes_alive)))
            many = changed(decisions, *changes[: 1 + len(changes) // bold])
            bolder = self._base(many)
            if bolder.run.excess(self.budget, power) >= now.excess(self.budget, power):
                break
            base, decisions, now = bolder, many, bolder.run
        excess = now.excess(self.budget, power)
        while excess and self.runs < end and now.extra_seconds < limit:
            best: tuple[float, Change, Run, float] | None = None
            for batch in self._batches(now, decisions, fixed):
                for change in batch:
                    trial = self._play(base, change)
                    left = trial.excess(self.budget, power)
                    if left >= excess:
                        continue
                    slower = trial.extra_seconds - now.extra_seconds
                    rate = (slower + self._least) / (excess - left)
                    if noise:
                        rate *= self._random.lognormvariate(0, noise)
                    if best is None or rate < best[0]:
                        best = (rate, change, trial, left)
                if best is not None:
                    break
            if best is None:
                break
            _, change, now, excess = best
            base = Base(self.problem, changed(decisions, change), now)
            decisions = base.decisions
        return decisions, now

    def approach(self, decisions: list[int], found: Run) -> tuple[list[int], Run]:
        """Lower the budget in small steps, from the peak of ``found``, the run of ``decisions``, to
        the search's own.

        A plan for a little more memory is nearly the plan wanted. So each step has few changes to
        make, and their costs are known well. (ResNet-50 at 22 %: 18.9 % extra time instead of 81.7,
        in 0.3 s.)
        """
        wanted, budget = self.budget, found.peak
        try:
            while found.peak > wanted and budget > wanted:
                self.budget = budget = max(wanted, int(budget * SMALLER))
                decisions, found = self.descend(decisions, RUNS_OF_A_STRETCH)
                decisions, found = self.keep_again(decisions, found, range(len(decisions)))
        finally:
            self.budget = wanted
        return decisions, found

    def improve(
        self, decisions: list[int], found: Run, most: int, enough: float = 0.0
    ) -> tuple[list[int], Run]:
        """Plan one stretch after the other anew, and return the best decisions met.

        Ends after ``most`` runs, at ``enough`` extra seconds within the budget, or after `PATIENCE`
        stretches without a better plan.
        """
        end = self.runs + most
        now, result = self.keep_again(decisions, found, self._dropped(decisions))
        worth = result.worth(self.budget)
        best, best_run, best_worth = now, result, worth
        vain = 0
        while self.runs < end and vain < PATIENCE and best_worth > (0.0, enough):
            vain += 1
            if vain % ASTRAY == 0:
                now, worth = best, best_worth
            dropped = self._dropped(now)
            if not self._decided:
                break
            shaken = self._random.random() < SHAKEN or not dropped
            chosen = self._stretch(self._decided if shaken else dropped)
            change = [(gap, self._any(gap) if shaken else KEPT) for gap in chosen]
            bearable = worth[0], worth[1] * (1 + WORSE * self._random.random())
            trial, result = self.descend(
                changed(now, change),
                min(RUNS_OF_A_STRETCH, end - self.runs),
                fixed=frozenset(chosen) if self._random.random() < 0.4 else (),
                limit=float("inf") if worth[0] else bearable[1],
                noise=self._random.choice(NOISE),
                power=self._random.choice(POWER),
            )
            if result.worth(self.budget) > bearable:
                continue
            near = {g for g, (a, b) in enumerate(zip(now, trial, strict=True)) if a != b}
            if result.worth(self.budget) < best_worth:
                trial, result = self.keep_again(trial, result, sorted(near))
            now, worth = trial, result.worth(self.budget)
            if worth < best_worth:
                best, best_run, best_worth, vain = trial, result, worth, 0
        return best, best_run

    def keep_again(
        self, decisions: list[int], found: Run, gaps: Collection[int]
    ) -> tuple[list[int], Run]:
        """Keep the values of ``gaps`` again for which the budget has room, most seconds per byte
        first.

        Many are kept at once as long as they fit, so that few runs are needed where room is large.
        """
        if found.peak > self.budget:
            return decisions, found
        left = [gap for gap in gaps if decisions[gap] and self._end[gap] < self._events]
        left.sort(key=lambda gap: (-self._seconds_a_byte(gap), gap))
        at, many = 0, max(1, len(left) // 4)
        base = None
        while at < len(left):
            batch = left[at : at + many]
            change = [(gap, KEPT) for gap in batch]
            base = base or Base(self.problem, decisions, found)
            result = self._play(base, change)
            if result.peak <= self.budget and result.extra_seconds <= found.extra_seconds:
                decisions, found, base = changed(decisions, change), result, None
                at += len(batch)
                many *= 2
            elif len(batch) == 1:
                at += len(batch)
            else:
                many = max(1, len(batch) // 2)
        return decisions, found

    def _seconds_a_byte(self, gap: int) -> float:
        value = self.problem.owner[gap]
        return self.problem.seconds[self.problem.recipe[value]] / max(self.problem.size[value], 1)

    def _dropped(self, decisions: list[int]) -> list[int]:
        """Return the gaps that have an end and whose values are dropped."""
        return [gap for gap, what in enumerate(decisions) if what and self._end[gap] < self._events]

    def _any(self, gap: int) -> int:
        """Return a random decision on a gap."""
        first = max(self._begin[gap], self.problem.border)
        event = self._random.randint(first, max(first, min(self._end[gap], self._events - 1)))
        inside = self._begin[gap] < event < self._end[gap]
        what = self._random.choice(
            (KEPT, DROPPED, STRICT, EARLY, LATE) if inside else (KEPT, DROPPED, STRICT)
        )
        return what + 2 * event if what >= EARLY else what

    def _stretch(self, dropped: list[int]) -> list[int]:
        """Return a few of the ``dropped`` gaps: any, or some that end close to each other."""
        count = min(self._random.choice(TAKEN_BACK), len(dropped))
        center = self._random.choice(dropped)
        if self._random.random() < 0.3:
            return self._random.sample(dropped, count)
        near = sorted(dropped, key=lambda gap: (abs(self._end[gap] - self._end[center]), gap))
        pool = [gap for gap in near[: 2 * count + 1] if gap != center]
        return [center, *self._random.sample(pool, min(count - 1, len(pool)))]

    def _batches(
        self, now: Run, decisions: list[int], fixed: Collection[int]
    ) -> Iterator[list[Change]]:
        """Yield changes to simulate: the most promising at the worst step, all others there, then
        the most promising at other steps."""
        over = np.flatnonzero(now.bytes_alive > self.budget)
        order = over[np.argsort(-now.bytes_alive[over], kind="stable")].tolist()
        seen: set[int] = set()
        for step in order:
            if now.event[step] in seen:
                continue
            seen.add(now.event[step])
            drops, undone = self._changes(now, decisions, fixed, step)
            yield drops[:PROMISING] + undone[:PROMISING]
            if len(seen) == 1:
                yield drops[PROMISING:] + undone[PROMISING:]
            if len(seen) > PROMISING:
                return

    def _changes(
        self, now: Run, decisions: list[int], fixed: Collection[int], step: int
    ) -> tuple[list[Change], list[Change]]:
        """Return changes that may lower the bytes at ``step``, in two lists, each best first: to
        drop values that are idle there, and not to recompute values there."""
        self._known.clear()
        problem, event = self.problem, now.event[step]
        over = max(int(now.bytes_alive[step]) - self.budget, 1)
        busy = {*problem.reads[event], *problem.writes[event]}
        back: dict[int, int] = {}
        for born, gap in zip(now.born, now.gap, strict=True):
            back.setdefault(gap, now.event[born])
        drops: list[tuple[float, int, Change]] = []
        undone: list[tuple[float, int, Change]] = []
        alive = np.flatnonzero((np.array(now.born) <= step) & (np.array(now.last) >= step))
        # Looking at 16 values takes about as long as a run.
        self.runs += len(alive) // 16
        for k in alive.tolist():
            value = now.value[k]
            size = problem.size[value]
            if problem.recipe[value] < 0 or value in busy or not size:
                continue
            gap = self.problem.gap_at(value, event)
            if gap in fixed or self._end[gap] < problem.border:
                continue
            if decisions[gap] == KEPT:
                drops += self._drops(value, gap, event, decisions, back, over)
            elif decisions[gap] == DROPPED and now.gap[k] == gap:
                cost = self._again(value, self._end[gap], decisions, back)
                drops.append(((cost + self._least) / min(size, over), gap, [(gap, STRICT)]))
        for k, gap in enumerate(now.gap):
            again = now.event[now.born[k]] == event and self._begin[gap] != event
            if not again or not decisions[gap] or gap in fixed:
                continue
            for r in self._early(now.value[k], gap, self._begin[gap], decisions):
                if decisions[gap] != EARLY + 2 * r:
                    undone.append((0.0, gap, [(gap, EARLY + 2 * r)]))
            if self._end[gap] > event and decisions[gap] != LATE + 2 * event:
                undone.append((0.0, gap, [(gap, LATE + 2 * event)]))
            seconds = problem.seconds[problem.recipe[now.value[k]]]
            undone.append((-seconds, gap, [(gap, KEPT)]))
        return [change for *_, change in sorted(drops)], [change for *_, change in sorted(undone)]

    def _drops(
        self,
        value: int,
        gap: int,
        event: int,
        decisions: list[int],
        back: dict[int, int],
        over: int,
    ) -> list[tuple[float, int, Change]]:
        """Return ways to drop a kept value at ``event``, each with about its seconds per byte."""
        problem, end = self.problem, self._end[gap]
        size = problem.size[value]
        late = [back[g] for g in self._made_of[value] if self._begin[gap] < back.get(g, -1) < event]
        if end == self._events:
            code = LATE + 2 * max(late) if late else DROPPED
            return [(self._least / min(size, over), gap, [(gap, code)])]
        ways = [(end, DROPPED)]
        ways += [(r, EARLY + 2 * r) for r in self._early(value, gap, event, decisions)]
        if late:
            ways.append((end, LATE + 2 * max(late)))
        drops = []
        for r, what in ways:
            missing = self._missing(value, r, decisions, back)
            own = problem.seconds[problem.recipe[value]] + self._least
            cost = self._again(value, r, decisions, back) + self._least
            drops.append((cost / min(size, over), gap, [(gap, what)]))
            left = size - sum(problem.size[v] for v, _ in missing)
            if missing and left > 0:
                held = [(g, KEPT) for _, g in missing]
                drops.append((own / min(left, over), gap, [(gap, what), *held]))
        return drops

    def _early(self, value: int, gap: int, after: int, decisions: list[int]) -> list[int]:
        """Return the last two events in a gap, after ``after``, at which inputs are there that are
        gone at its end."""
        problem, end = self.problem, self._end[gap]
        if end == self._events:
            return []
        after = max(after, problem.border - 1)
        found = set()
        for v in problem.inputs[problem.recipe[value]]:
            uses = problem.uses[v]
            k = bisect_right(uses, end - 1) - 1
            if k >= 0 and uses[k] > after and decisions[problem.first_gap[v] + k]:
                found.add(uses[k])
        return sorted(found)[-2:]

    def _missing(
        self, value: int, event: int, decisions: list[int], back: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Return the inputs of a value that are not there at ``event``, with the gaps in which they
        are dropped."""
        found = self._known.get((value, event))
        if found is None:
            found = self._known[value, event] = []
            for v in self.problem.inputs[self.problem.recipe[value]]:
                gap = self.problem.gap_at(v, event)
                there = self._end[gap] == event or back.get(gap, event + 1) <= event
                if decisions[gap] and not there:
                    found.append((v, gap))
        return found

    def _again(self, value: int, event: int, decisions: list[int], back: dict[int, int]) -> float:
        """Estimate the seconds to recompute ``value`` and its missing inputs for ``event``."""
        if event == self._events:
            return 0.0
        cost, seen, stack = 0.0, {value}, [value]
        while stack:
            value = stack.pop()
            cost += self.problem.seconds[self.problem.recipe[value]]
            for v, _ in self._missing(value, event, decisions, back):
                if v not in seen:
                    seen.add(v)
                    stack.append(v)
        return cost
