"""Segments of about b bytes each, and a search for the b (Chen, Xu, Zhang and Guestrin 2016,
Algorithm 3).

The algorithm walks over the forward ops and adds up the bytes that backward will read. At the first
place fit for a cut where they exceed b it cuts: what crosses the cut is kept, what lies before it
is recomputed when backward comes back (arXiv 1604.06174). One parameter b stands for the whole
plan: 0 keeps all, √(xy) balances the bytes kept (x) against the largest segment (y), which on a
chain of n equal ops makes √n segments and a peak of about 2√n units at one extra forward pass.

Three things differ from the paper. A place fit for a cut is not marked by hand: it is any that cuts
no fused pair of ops, and a cut keeps several tensors if several cross it
(:mod:`~memsaving_gradients.planners.chains.frontiers`); b is tried on all those places and on the
narrow ones only, those where fewer bytes cross than just before and just after. Bytes are those of
residuals, not of all outputs. The last segment, which is kept and not recomputed, counts in y.

Every plan is simulated. Without a budget those for b around √(xy) are tried, and the one with the
least peak is returned, as in the paper's appendix. With a budget, b goes from 0 to everything, the
walk may stop early, results of expensive ops may be kept behind some place ("to keep time consuming
operations when possible"), plans that recompute recursively
(:mod:`~memsaving_gradients.planners.chains.mirror_counts`) are tried too, and the one with the
least extra time that fits is returned. What is tried depends on the graph alone, so a larger budget
never costs more time. Never optimal but by luck: the baseline that other planners have to beat.
O(n) for each plan tried; `TRIALS` bounds their number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memsaving_gradients.planners.chains.frontiers import (
    Segments,
    expensive_storages,
    measure_segments,
    narrow_cuts,
)
from memsaving_gradients.planners.chains.mirror_counts import checked, scheduled, sectioned
from memsaving_gradients.planners.proposal import (
    ROUNDING,
    Interrupted,
    Limits,
    Proposal,
    Trials,
    proposed,
)
from memsaving_gradients.schedules.schedule import recompute_lazily
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import IntArray, TrainingGraph

__all__ = ["Division", "divide", "plan"]


#: Plans to simulate. Chosen by judgement.
TRIALS = Trials(executions=2_000_000, fewest=12, most=120)
#: Values of b for each kind of places, as multiples of √(xy); the paper has 6, from 1/√2 to √2.
AROUND = (1.0, *np.geomspace(0.5, 2.0, 8))
#: With a budget: behind these parts of the bytes the walk stops, and the rest is kept, or what is
#: expensive of it, for b from √(xy) to everything.
STOPS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.825, 0.9, 0.95)
#: Cuts at a time of the recursive plans.
SECTIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Division:
    """What Algorithm 3 makes of one b.

    Attributes
    ----------
    cuts
        Forward positions behind which the line is cut.
    kept
        About the bytes that the cuts keep (x of the paper).
    largest
        Bytes of the largest segment, the last one included (y of the paper).
    """

    cuts: tuple[int, ...]
    kept: int
    largest: int


def divide(held: IntArray, width: IntArray, places: IntArray, b: float) -> Division:
    """Cut at the first of ``places`` where a segment exceeds ``b`` bytes.

    Parameters
    ----------
    held
        For each position, bytes that backward will read of what was made up to there.
    width
        For each position, bytes that a cut behind it keeps.
    places
        Positions that can be cut, ascending.
    b
        Bytes.

    Examples
    --------
    >>> import numpy as np
    >>> divide(np.arange(1, 10), np.ones(9, int), np.arange(8), b=2)
    Division(cuts=(2, 5), kept=2, largest=3)
    """
    at = held[places]
    cuts: list[int] = []
    begun = largest = 0
    while (k := int(np.searchsorted(at, begun + b, side="right"))) < len(places):
        largest = max(largest, int(at[k]) - begun)
        begun = int(at[k])
        cuts.append(int(places[k]))
    last = int(held[-1]) - begun if len(held) else 0
    return Division(tuple(cuts), int(width[cuts].sum()), max(largest, last))


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """The best plan of Algorithm 3: of the least peak, or with ``limits.budget`` of the least extra
    time within it.

    ``limits.mirror`` goes before what the algorithm decides.
    """
    checked(limits.mirror)
    trials = TRIALS.of(graph)
    begin = time.perf_counter()
    best: Proposal | None = None
    complete = True
    for number, reasons in enumerate(_trials(graph, limits, trials)):
        if best is not None and limits.seconds is not None:
            complete = time.perf_counter() - begin < limits.seconds
        try:
            if limits.progress is not None:
                limits.progress(min(number / trials, 1.0), "segments")
        except Interrupted:
            complete = False
        if best is not None and not complete:
            break
        trial = _tried(graph, limits, reasons, best)
        if trial is not None and (best is None or _key(trial, limits) < _key(best, limits)):
            best = trial
    assert best is not None, "keeping everything is always tried"
    met = limits.budget is not None and best.peak <= limits.budget
    return replace(best, complete=complete, optimal=met and not best.schedule.clones)


def _key(trial: Proposal, limits: Limits) -> tuple[float, ...]:
    """Smaller is better."""
    if limits.budget is None:
        return (trial.peak, trial.extra_seconds)
    if trial.peak <= limits.budget:
        return (0, trial.extra_seconds, trial.peak)
    return (1, trial.peak, trial.extra_seconds)


def _tried(
    graph: TrainingGraph, limits: Limits, what: _Trial, best: Proposal | None
) -> Proposal | None:
    """The proposal of a trial; ``None`` if it is known not to be better without being simulated."""
    chained = limits.sums(graph)
    if what.counts is None:
        kept = {**what.reasons, **limits.keep}
        schedule = recompute_lazily(graph, set(kept), chained)
    else:
        schedule = scheduled(graph, {**what.counts, **dict.fromkeys(limits.keep, 0)}, chained)
    if best is not None and limits.budget is not None and best.peak <= limits.budget:
        extra = sum(graph.seconds[[step.op for step in schedule.steps if step.copy]])
        if extra > best.extra_seconds * (1 + ROUNDING):
            return None
    if what.counts is None:
        return Proposal(schedule, kept, simulate(graph, schedule))
    return proposed(graph, limits, schedule)


@dataclass(frozen=True)
class _Trial:
    """Storages to keep with reasons, all else being recomputed once; or mirror counts of all
    storages."""

    reasons: dict[int, str]
    counts: dict[int, int] | None = None


def _trials(graph: TrainingGraph, limits: Limits, most: int) -> Iterator[_Trial]:
    """Plans to try; which ones does not depend on the budget's size."""
    segments = measure_segments(graph, limits.keep)
    once = dict.fromkeys(np.unique(graph.storage[graph.losable]).tolist(), 1)

    def keeping(reasons: dict[int, str]) -> _Trial:
        if not limits.mirror:
            return _Trial(reasons)
        return _Trial({}, {**once, **dict.fromkeys(reasons, 0), **limits.mirror})

    yield keeping(dict.fromkeys(graph.residuals, "kept"))
    dear = np.array(expensive_storages(graph), np.int64)
    for cuts, behind in _choices(segments, most, wide=limits.budget is not None):
        late = dear[graph.producer[dear] > behind].tolist()
        yield keeping(segments.kept_by(list(cuts)) | dict.fromkeys(late, "expensive to recompute"))
    if limits.budget is not None:
        for k in SECTIONS:
            yield _Trial({}, {**sectioned(graph, limits, k), **limits.mirror})


def _choices(segments: Segments, most: int, *, wide: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Up to ``most`` choices of cuts, and of the position behind which what is expensive is kept.

    For b around √(xy); from b = 0 to everything, and with walks that stop early, if ``wide``.
    """
    held, width = segments.held, segments.frontier_bytes()
    end = segments.length
    found: dict[tuple[tuple[int, ...], int], None] = {}
    kinds = _places(segments, width)
    balanced = [_balance(held, width, places) for places in kinds]
    for factor in AROUND:
        for places, b in zip(kinds, balanced, strict=True):
            found[divide(held, width, places, b * float(factor)).cuts, end] = None
    found[divide(held, width, kinds[0], 0.0).cuts, end] = None
    if wide and len(held) and held[-1]:
        made = np.diff(held, prepend=0)
        smallest = float(made[made > 0].min())
        for places in kinds:
            for b in np.geomspace(smallest, held[-1], max(2, most // 6)):
                found[divide(held, width, places, float(b)).cuts, end] = None
        stops = np.searchsorted(held, (np.array(STOPS) * held[-1]).astype(np.int64)).tolist()
        least = max(balanced[0], smallest)
        for b in np.geomspace(least, max(held[-1], least), max(1, most // (3 * len(STOPS)))):
            cuts = divide(held, width, kinds[0], float(b)).cuts
            for stop in stops:
                found[cuts[: int(np.searchsorted(cuts, stop))], end] = None
                found[cuts, stop - 1] = None
    yield from list(found)[:most]


def _balance(held: IntArray, width: IntArray, places: IntArray) -> float:
    """√(xy), worked out anew until it comes again: the b at which the kept bytes and a segment are
    about the same."""
    b, seen = 0.0, set[float]()
    while b not in seen:
        seen.add(b)
        division = divide(held, width, places, b)
        b = math.sqrt(division.kept * division.largest)
    return b


def _places(segments: Segments, width: IntArray) -> list[IntArray]:
    """All places fit for a cut, and the narrow ones."""
    fit = np.flatnonzero(segments.cuttable[:-1])
    narrow = narrow_cuts(fit, width)
    return [narrow] if len(narrow) == len(fit) else [narrow, fit]
