"""A plan within a budget by prices of memory: Lagrangian relaxation of the limit at each event.

Each event has a price for a byte, in seconds. For fixed prices, a minimum cut
(:mod:`~memsaving_gradients.planners.prices.closure`) finds the cheapest decisions, which are
simulated exactly. Prices rise where the profile is above the budget, and fall where it is below (a
subgradient step; Everett 1963, Operations Research 11). The first price is for the event of the
plain peak alone; bisection finds it.

The cut depends on the times at which the last decisions recompute values. So each step takes only a
part of the changes that the cut proposes; with all of them, the iteration oscillates at small
budgets. Where it strays, it returns to the closest decisions so far. Decisions near the budget are
rounded to meet it (:mod:`~memsaving_gradients.planners.prices.rounding`; where that fails, by a
short local search, with which ResNet-50 takes 13.5 % extra time at 28 % instead of 19.0); the
fastest are the plan.

No plan is guaranteed to be the fastest, since times are linearized. On networks of
``keras.applications`` plans are within a point of the lower bound, in less than two seconds for
26,000 ops. Near the least memory, prices fail, and a search has to continue from the closest
decisions. The iteration is deterministic: its random numbers have a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from memsaving_gradients.planners.prices.closure import Closure
from memsaving_gradients.planners.prices.gaps import Gaps
from memsaving_gradients.planners.prices.rounding import fill, profile, repair
from memsaving_gradients.planners.proposal import SMALLER
from memsaving_gradients.planners.retention.local_search import RUNS_OF_A_STRETCH, Search
from memsaving_gradients.planners.retention.problem import NEAR, Problem
from memsaving_gradients.planners.retention.simulate import Run, run
from memsaving_gradients.schedules.arrays import FloatArray
from memsaving_gradients.schedules.simulate import TIE

__all__ = ["GENTLE", "Pace", "Priced", "Pricing"]


@dataclass(frozen=True)
class Pace:
    """The step sizes of an iteration.

    Attributes
    ----------
    taken
        The share of the proposed changes that a step takes, before cooling; the first takes all.
    rate
        The largest share of the sum of all prices by which the first step raises them.
    steps
        The most steps.
    cooling
        How fast ``taken`` falls: to a half after ``1 / cooling`` steps (0: never).
    """

    taken: float = 0.5
    rate: float = 0.5
    steps: int = 40
    cooling: float = 0.0


#: Smaller and smaller steps, for problems where the usual ones stray. (1,001 layers at a tenth of
#: their memory: 16.2 % extra time instead of no plan that fits; ResNet-101 at 20 %: 16.6 % instead
#: of 27.7.)
GENTLE = (Pace(0.5, 0.5, 60, 0.2), Pace(0.25, 0.2, 60, 0.05))

#: The most bisections for the first price; they end when the ratio of its bounds exceeds `SMALLER`.
BISECTIONS = 14
#: The share of the usual steps for an iteration that continues from another one.
GOING_ON = 0.3
#: An iteration ends after this many steps in a row that found nothing better.
IN_VAIN = 16
#: An iteration is astray after `ASTRAY` steps that are no closer, the last `WORSE` times as far.
ASTRAY, WORSE = 6, 4.0
#: The most runs of all short local searches of an iteration, as a multiple of one's most runs.
SEARCHES = 4
#: Up to this many changes, a step takes all of them at once.
FEW = 4


@dataclass(frozen=True, eq=False)
class Priced:
    """The fastest decisions within the budget that an iteration found, or else the lowest.

    Attributes
    ----------
    decisions, run
        The decisions and their simulation.
    closest
        The decisions, before rounding, that were above the budget by least.
    prices
        The prices of ``closest``, from which an iteration for another budget can start.
    near
        The least extra seconds of decisions, before rounding, that nearly met the budget; 0 if none
        did.
    """

    decisions: list[int]
    run: Run
    closest: list[int]
    prices: FloatArray
    near: float = 0.0


class Pricing:
    """A planner by prices for one problem.

    Parameters
    ----------
    problem
        The problem.
    tick
        Called before each simulation; it may raise to end planning.
    """

    def __init__(self, problem: Problem, tick: Callable[[], None] | None = None) -> None:
        self.problem, self.tick = problem, tick
        self.gaps = Gaps(problem)
        self.closure = Closure(self.gaps)
        self.plain = problem.plain()
        self.plain_run = run(problem, self.plain)
        self.runs = 0

    def simulate(self, decisions: list[int]) -> Run:
        """Simulate decisions, and count the run."""
        self.runs += 1
        if self.tick is not None:
            self.tick()
        return run(self.problem, decisions)

    def plan(
        self, budget: int, pace: Pace = Pace(), enough: float = 0.0, start: Priced | None = None
    ) -> Priced:
        """Return the fastest decisions found within ``budget`` bytes.

        Parameters
        ----------
        budget
            Bytes.
        pace
            The step sizes.
        enough
            Extra seconds at which the search ends.
        start
            The result for another budget, from which to continue.
        """
        if self.plain_run.peak <= budget:
            return Priced(self.plain, self.plain_run, self.plain, np.zeros(self.gaps.events))
        if start is not None and not start.prices.any():
            start = None
        return _Iteration(self, budget, pace, start).run(enough)

    def first_price(self, budget: int) -> tuple[FloatArray, list[int], Run]:
        """Return the least price, of the plain peak's event alone, at which that event fits."""
        gaps = self.gaps
        peak = int(np.argmax(profile(gaps, self.plain_run)))
        times = gaps.times(self.plain_run, self.plain)
        price = np.zeros(gaps.events)
        inner = gaps.inner
        rate = float(np.median(gaps.seconds[inner] / gaps.size[inner])) if len(inner) else 1.0
        low, high = 0.0, np.inf
        now, found, best = rate or 1e-12, self.plain, self.plain_run
        for _ in range(BISECTIONS):
            price[peak] = now
            decisions = self.closure.decide(price, times, self.plain, linear=False)
            result = self.simulate(decisions)
            if profile(gaps, result)[peak] > budget:
                low = now
            else:
                high, found, best = now, decisions, result
            if low > high * SMALLER:
                break
            now = 3 * now if high == np.inf else (low * high) ** 0.5 if low else high / 2
        price[peak] = low if high == np.inf else high
        return price, found, best


class _Iteration:
    """One iteration of prices, for one budget."""

    def __init__(
        self, pricing: Pricing, budget: int, pace: Pace, start: Priced | None = None
    ) -> None:
        self.pricing, self.budget = pricing, budget
        self.gaps = pricing.gaps
        self.random = np.random.default_rng(0)
        if start is None:
            self.pace = pace
            self.prices, self.decisions, self.now = pricing.first_price(budget)
        else:
            self.pace = replace(pace, steps=max(1, int(pace.steps * GOING_ON)))
            self.prices, self.decisions = start.prices, start.closest
            self.now = pricing.simulate(self.decisions)
        self.best: tuple[list[int], Run] | None = None
        self.lowest = self.decisions, self.now
        self.near = np.inf

    @cached_property
    def search(self) -> Search:
        """The local search that rounds decisions; it counts the runs of the whole iteration."""
        return Search(self.pricing.problem, self.budget, tick=self.pricing.tick)

    def run(self, enough: float) -> Priced:
        closest: tuple[float, list[int], Run, FloatArray] | None = None
        astray = vain = 0
        pace = self.pace
        for step in range(pace.steps):
            taken = pace.taken / (1 + step * pace.cooling)
            self._decide(taken if step else 1.0)
            if self.now.peak < self.lowest[1].peak:
                self.lowest = self.decisions, self.now
            over, rate = self._over(), pace.rate / (1 + step / 4) ** 0.5
            bad = float((np.maximum(over, 0.0) ** 2).sum())
            astray += 1
            if closest is None or bad < closest[0]:
                closest, astray = (bad, self.decisions, self.now, self.prices), 0
            before = self.best
            self._round()
            vain = 0 if self.best is not before or self.best is None else vain + 1
            if vain == IN_VAIN or (self.best and self.best[1].extra_seconds <= enough):
                break
            if self.best is None and astray >= ASTRAY and bad > WORSE * closest[0]:
                _, self.decisions, self.now, self.prices = closest
                over, rate, astray = self._over(), rate / 2, 0
            self._move_prices(over, rate)
        if self.best is None:
            self.best = self._rounded(*self.lowest)
        assert closest is not None
        near = 0.0 if self.near == np.inf else self.near
        return Priced(*self.best, closest[1], closest[3], near)

    def _over(self) -> FloatArray:
        """Return how far each event is above the budget, as a share of the budget."""
        return (profile(self.gaps, self.now) - self.budget) / max(self.budget, 1)

    def _decide(self, taken: float) -> None:
        """Take a share of the changes to the cheapest decisions."""
        times = self.gaps.times(self.now, self.decisions)
        wanted = self.pricing.closure.decide(self.prices, times, self.decisions)
        if taken < 1:
            pairs = zip(self.decisions, wanted, strict=True)
            changes = [gap for gap, (old, new) in enumerate(pairs) if old != new]
            if len(changes) > FEW:
                left = self.random.random(len(changes)) > taken
                for gap in np.array(changes)[left].tolist():
                    wanted[gap] = self.decisions[gap]
        self.decisions, self.now = wanted, self.pricing.simulate(wanted)

    def _round(self) -> None:
        """Round the decisions, and remember the result if it fits and is faster."""
        if self.now.peak > NEAR * self.budget:
            return
        self.near = min(self.near, self.now.extra_seconds)
        rounded = self._rounded(self.decisions, self.now)
        fits = rounded[1].peak <= self.budget
        if fits and (self.best is None or rounded[1].extra_seconds < self.best[1].extra_seconds):
            self.best = rounded

    def _rounded(self, decisions: list[int], now: Run) -> tuple[list[int], Run]:
        simulate, budget = self.pricing.simulate, self.budget
        decisions, now = repair(self.gaps, simulate, decisions, now, budget, RUNS_OF_A_STRETCH)
        if budget < now.peak <= NEAR * budget:
            runs = min(RUNS_OF_A_STRETCH, SEARCHES * RUNS_OF_A_STRETCH - self.search.runs)
            if runs > 0:
                most = np.inf if self.best is None else self.best[1].extra_seconds
                decisions, now = self.search.descend(decisions, runs, limit=most)
        if now.peak > budget:
            return decisions, now
        return fill(self.gaps, simulate, decisions, now, budget)

    def _move_prices(self, over: FloatArray, rate: float) -> None:
        """Raise prices where bytes are above the budget, and lower them where there is room."""
        above = np.maximum(over, 0.0)
        unit = float(self.prices.sum())
        prices = self.prices
        if most := float(above.max()):
            prices = prices + unit * rate * min(1.0, 4 * most) * above / above.sum()
        below = -np.minimum(over + TIE, 0.0)
        self.prices = prices * (1 - np.minimum(1.0, rate * np.minimum(1.0, 4 * below)))
