"""The search for the proposal that a user asks for: the fastest plan that fits a budget, or the
least memory within a slowdown.

A budget limits the bytes in chunks of TensorFlow's allocator. Planners do not know chunks: they
count the bytes that ops request. The search therefore asks a planner for a plan within fewer bytes.
It corrects this limit by the ratio of the budget to the chunks that the last plan needs
(:mod:`~memsaving_gradients.planners.meter`), and takes the fastest plan that fits
(`Search.within`). The ratio differs by up to a tenth from plan to plan. It differs again in the
rewritten graph: the executor's own order and the rest of the step add bytes. So the driver asks for
other plans then (`Search.at`; :mod:`memsaving_gradients.engine.driver`). The search works with any
planner; a planner that ignores budgets is simply tried.

`Search.least` asks a planner for its least memory, and for a little more: because of holes between
chunks, the least peak does not always need the fewest chunks. These attempts do not depend on the
budget, so the least budget that an error names works when a user asks for it.

Deterministic, unless a time limit is set. Cost: at most `ROUNDS` plans for each request, fewer on
large graphs, and `FLOORS` once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memsaving_gradients.budget import chunk_bytes
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Interrupted, Limits, Planner, Proposal
from memsaving_gradients.planners.bounds.integer import bound_within
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.planners.meter import Found, Meter
from memsaving_gradients.planners.proposal import SMALLER, Deadline, TrialCount, checked
from memsaving_gradients.planners.short_sums import left_alone
from memsaving_gradients.schedules.validation import problem_of

__all__ = ["CLOSE", "FLOORS", "ROUNDS", "Search"]

#: Plans to ask for, to find one that fits and uses the budget well. Which holes chunks fall into is
#: chance, and small plans take a tenth of a second. Chosen by judgement.
ROUNDS = TrialCount(80_000, 2, 8)
#: A plan that needs at least this share of the budget uses it well enough. Chosen by judgement.
CLOSE = 0.96
#: Bytes to ask for where nothing fits, as multiples of the lowest peak so far. First, a plan within
#: one byte; then less and less, as long as plans fit; then a little more. (A search for too few
#: bytes loses its way, and may do better with an easier limit.) On large graphs only the first.
#: Chosen by judgement.
FLOORS = (1.0, 0.85, 1.04, 1.1)


def _by_time(found: Found) -> tuple[float, int]:
    return found.proposal.extra_seconds, found.need


def _by_need(found: Found) -> tuple[float, ...]:
    return found.need, *_by_time(found)


def _by_peak(found: Found) -> tuple[float, ...]:
    return found.proposal.peak, *_by_time(found)


@dataclass(eq=False)
class Search:
    """A search for a plan, with one planner on one graph.

    Attributes
    ----------
    meter
        A meter of the bytes that schedules of the graph need.
    planner
        The planner, called repeatedly.
    keep, accumulate, progress
        As in `Limits`.
    seconds
        The most time for all plans together; ``None``: no limit.
    floors
        The bytes to ask for where nothing fits, as in `FLOORS`.
    host, early
        As in `Limits`.
    """

    meter: Meter
    planner: Planner
    keep: Mapping[int, str] = field(default_factory=dict)
    accumulate: bool = True
    seconds: float | None = None
    progress: Callable[[float, str], None] | None = None
    floors: Sequence[float] = FLOORS
    host: int | None = None
    early: float = 1.0

    def __post_init__(self) -> None:
        self._deadline = Deadline.of(self.seconds)
        self._stopped = ""
        self._by_key: KeyboardInterrupt | None = None
        self._tried: list[Found] = []
        self._closed_in: set[int] = set()
        self._by_asked: dict[tuple[int | None, bool], Found] = {}
        self._shown = 0.0
        self._large = self.meter.is_large
        self._rounds = ROUNDS.of(self.meter.graph)
        if self._large:
            self.floors = self.floors[:1]

    def free(self) -> Found:
        """Return the plan that the planner aims at with no limit on bytes."""
        found = self._attempt(None)
        return self._lowest(()) if found is None else self._with_end(found)

    def within(self, most: int) -> Found:
        """Return the fastest plan found that needs at most ``most`` bytes in chunks; if there is
        none, the plan that needs the fewest.

        Raises
        ------
        KeyboardInterrupt
            If planning was interrupted by the user before there was any plan.
        """
        if most not in self._closed_in:
            self._closed_in.add(most)
            self._close_in(most)
        fits = self._fitting(most)
        return self._with_end(min(fits, key=_by_time)) if fits else self._lowest(self._tried)

    def at(self, asked: int, *, quick: bool = True) -> Found:
        """Return the plan with a peak within ``asked`` bytes, or the lowest that the planner found.

        ``quick``: whether a quick plan is enough.

        Raises
        ------
        KeyboardInterrupt
            If planning was interrupted by the user before there was any plan.
        """
        short = self._short_of(asked) if quick else None
        found = short or self._attempt(asked, quick=quick)
        return self._lowest(self._tried) if found is None else self._with_end(found)

    def sketch(self, most: int) -> float:
        """Return the extra seconds of the first plan asked for within ``most`` bytes in chunks;
        infinite if it does not fit."""
        if self._none_fits(most):
            return float("inf")
        asked = self._first_asked(most)
        found = self._attempt(asked, self._rounds, quick=True)
        fits = found is not None and found.proposal.peak <= asked
        return found.proposal.extra_seconds if found is not None and fits else float("inf")

    def least(self) -> Found:
        """Return the plan that needs the fewest bytes in chunks, independent of any budget.

        Raises
        ------
        KeyboardInterrupt
            If planning was interrupted by the user before there was any plan.
        """
        return self._lowest(self._reach_floor())

    def lowest(self) -> Found:
        """Return the plan with the lowest peak among the plans that `least` chooses from.

        The plan of `least` needs the fewest bytes before a rewrite. In the rewritten graph, the
        executor's order and holes between chunks may add less to the plan of the lowest peak.

        Raises
        ------
        KeyboardInterrupt
            If planning was interrupted by the user before there was any plan.
        """
        return self._lowest(self._reach_floor(), _by_peak)

    def within_time(self, seconds: float, *, plain: bool = False) -> Found | None:
        """Return the plan that needs the fewest bytes in chunks of all plans with at most
        ``seconds`` of extra time; ``None`` if there is none.

        ``plain``: whether the plan that recomputes nothing is one of them.
        """
        least = self._attempt(1, self._rounds)
        if least is not None and least.proposal.extra_seconds > seconds:
            low, high = least.proposal.peak, self.meter.plain.peak
            for number in range(self._rounds):
                middle = (low + high) // 2
                if self._stopped or middle <= low:
                    break
                found = self._attempt(middle, self._rounds - number)
                if found is None:
                    break
                if found.proposal.extra_seconds <= seconds:
                    high = max(low, min(middle, found.proposal.peak))
                else:
                    low = middle
        fits = [found for found in self._tried if found.proposal.extra_seconds <= seconds]
        if plain and seconds >= 0:
            fits.append(Found(self.meter.plain, self.meter.need(self.meter.plain), None))
        if not fits:
            self._raise_if_by_key()
            return None
        return self._lowest(fits)

    @property
    def stopped(self) -> str:
        """The reason why planning ended early, or an empty string."""
        return self._stopped

    def _close_in(self, budget: int) -> None:
        """Ask for plans until one fits; if the first one does, ask for one that uses the budget.

        More plans would not help. Which holes chunks fall into is chance, and it is another one in
        the rewritten graph.
        """
        # If nothing fits, the caller will need the least anyway.
        asked = 1 if self._none_fits(budget) else self._first_asked(budget)
        for number in range(ROUNDS.most):
            found = self._attempt(asked, max(self._rounds - number, 1), quick=True)
            # A planner that goes no lower gives the same quick plan for fewer bytes.
            if found is None or self._stopped or found.proposal.peak > asked:
                return
            aimed = int(asked * budget / max(found.need, 1))
            if found.need <= budget:
                if not number and found.need < CLOSE * budget and found.proposal.extra_seconds:
                    self._attempt(min(aimed, budget), quick=True)
                return
            # Holes between chunks need not shrink with the plan, so each step down is larger. A
            # limit of the plan's own peak would give the same plan again.
            asked = min(int(aimed * SMALLER**number), found.proposal.peak - 1)

    def _short_of(self, asked: int) -> Found | None:
        """Return the lowest of the plans above ``asked`` bytes that missed a limit of about as
        many, or more; ``None`` if there is none."""
        short = (
            old
            for old in self._tried
            if old.asked
            and asked * SMALLER <= old.asked
            and max(asked, old.asked) < old.proposal.peak
        )
        return min(short, key=lambda old: old.proposal.peak, default=None)

    def _first_asked(self, budget: int) -> int:
        """Return the bytes to ask for first, such that the chunks may fit a budget."""
        meter = self.meter
        if meter.gating == "data":
            return budget
        chunks = max(chunk_bytes(meter.plain.simulation, meter.gating), 1)
        asked = min(budget, max(1, budget * meter.plain.peak // chunks))
        # A plan has more bytes in holes than plain training, and a plan that does not fit costs
        # seconds.
        return max(1, int(asked * SMALLER)) if self._large else asked

    def _reach_floor(self) -> list[Found]:
        """Return plans of the planner's least memory, from the same attempts for every budget; only
        from one attempt if the time is over.

        Quick plans for fewer and fewer bytes get as low as full plans for fixed numbers of bytes,
        in up to eight times less time.
        """
        first = self._attempt(1, len(self.floors), late=True, quick=True)
        if first is None:
            return []
        floors = [first]
        for number, factor in enumerate(self.floors[1:], 1):
            fits = True
            while fits and not self._stopped:
                asked = int(min(found.proposal.peak for found in floors) * factor)
                if self._is_idle(asked, min(found.need for found in floors)):
                    break
                found = self._attempt(asked, len(self.floors) - number, quick=True)
                if found is None:
                    break
                floors.append(found)
                fits = factor < 1 and found.proposal.peak <= asked
        return floors

    def _is_idle(self, asked: int, need: int) -> bool:
        """Return whether a plan within ``asked`` bytes is not worth a search after a plan that
        needs ``need`` bytes: none exists, or it would need as many."""
        return asked >= need or self._none_fits(asked)

    def _none_fits(self, most: int) -> bool:
        """Return whether the lower bound rules out all plans within ``most`` bytes; the bound does
        not cover plans that store values."""
        graph = self.meter.graph
        if graph.storable:
            return False
        return least_extra_seconds(graph, most, accumulate=self.accumulate) == float("inf")

    def _attempt(
        self, asked: int | None, left: int = 1, late: bool = False, quick: bool = False
    ) -> Found | None:
        """Ask for a plan, and note it.

        ``left``: the most attempts still to come, including this one. ``late``: whether to ask even
        if the time is over or a hook stopped planning; the hook is not called again. ``quick``: as
        in `Limits`.
        """
        for known in dict.fromkeys((False, quick)):
            if (asked, known) in self._by_asked:
                return self._by_asked[asked, known]
        if self._stopped and self._tried and (not late or self._by_key is not None):
            return None
        if self._stopped == "interrupted":
            self.progress = None
        found = self._ask(asked, left, quick)
        if found is not None and not self._stopped:
            self._by_asked[asked, found.proposal.quick] = found
        return found

    def _ask(self, asked: int | None, left: int, quick: bool) -> Found | None:
        """Note and return the plan of the planner; ``None`` if it was interrupted."""
        remaining = self._deadline.left
        if remaining == 0 and self._tried:
            self._stopped = self._stopped or "out of time"
        limits = Limits(
            keep=self.keep,
            budget=asked,
            accumulate=self.accumulate,
            seconds=remaining,
            progress=None if self.progress is None else self._telling(left),
            host=self.host,
            early=self.early,
            quick=quick,
        )
        try:
            proposal = self.planner(self.meter.graph, limits)
        except Interrupted:
            self._stopped = "interrupted"
            return None
        except KeyboardInterrupt as stop:
            self._stopped, self._by_key = "interrupted", stop
            return None
        proposal = self._checked(proposal)
        proposal = left_alone(self.meter.graph, proposal, asked)
        if not proposal.complete:
            self._stopped = self._stopped or ("interrupted" if remaining is None else "out of time")
        found = Found(proposal, self.meter.need(proposal), asked)
        self._tried.append(found)
        return found

    def _telling(self, left: int) -> Callable[[float, str], None]:
        """Return a hook for one of several attempts, which together report one growing share."""
        done = 1 - left / (self._rounds + 1)
        tell = self.progress
        assert tell is not None

        def hook(share: float, what: str) -> None:
            try:
                self._shown = max(
                    self._shown, done + min(max(share, 0.0), 1.0) / (self._rounds + 1)
                )
                tell(self._shown, what)
            except Interrupted:
                self._stopped = "interrupted"
                raise

        return hook

    def _checked(self, proposal: object) -> Proposal:
        proposal = checked(self.planner, proposal)
        problem = problem_of(self.meter.graph, proposal.schedule)
        if problem:
            raise ArgumentError("planner", self.planner, f"returned an invalid schedule: {problem}")
        return proposal

    def _lowest(
        self, among: Sequence[Found], key: Callable[[Found], tuple[float, ...]] = _by_need
    ) -> Found:
        """Return the plan that needs the fewest bytes, or is first by ``key``; plain training, if
        there is none."""
        if among:
            return self._with_end(min(among, key=key))
        self._raise_if_by_key()
        return self._with_end(Found(self.meter.plain, self.meter.need(self.meter.plain), None))

    def _fitting(self, budget: int) -> list[Found]:
        return [found for found in self._tried if found.need <= budget]

    def _with_end(self, found: Found) -> Found:
        proposal = found.proposal
        if found.asked is not None and proposal.lower_bound > proposal.extra_seconds:
            # The plan missed the bytes asked for, so their lower bound does not hold for it. Find
            # the bound for its own peak.
            bound = bound_within(
                self.meter.graph, proposal.peak, accumulate=self.accumulate, deep=False
            )
            proposal = replace(proposal, lower_bound=min(bound.seconds, proposal.extra_seconds))
            found = replace(found, proposal=proposal, asked=proposal.peak)
        if self._stopped:
            proposal = replace(found.proposal, complete=False, optimal=False)
            return replace(found, proposal=proposal, stopped=self._stopped)
        return found

    def _raise_if_by_key(self) -> None:
        if self._by_key is not None:
            raise self._by_key
