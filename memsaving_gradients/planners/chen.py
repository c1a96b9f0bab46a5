"""Segments of about b bytes each, and a search for b (Chen, Xu, Zhang and Guestrin 2016,
Algorithm 3).

The algorithm walks over the forward ops and adds up the bytes that backward will read. It cuts at
the first place fit for a cut where the sum exceeds b. The plan keeps the values that cross a cut,
and recomputes the values before it when backward returns (arXiv 1604.06174). The parameter b alone
determines the plan: 0 keeps all, √(xy) balances the bytes kept (x) against the largest segment (y).
On a chain of n equal ops, √(xy) makes √n segments: about 2√n units at one extra forward pass.

Three things differ from the paper. Places for cuts are not marked by hand: any place that cuts no
fused pair of ops is fit, and a cut keeps all tensors that cross it
(:mod:`~memsaving_gradients.planners.chains.frontiers`). The planner tries b on all these places,
and on narrow ones only, where no more bytes cross than just before and just after. Only bytes of
residuals count, not of all outputs. The last segment counts in y: it is kept, not recomputed.

The planner simulates every plan. Without a budget, it tries b around √(xy) and returns the plan
with the least peak, as in the paper's appendix. With a budget, b goes from 0 to everything, and the
walk may stop early. Results of expensive ops may be kept behind some place ("to keep time consuming
operations when possible"). Recursive plans are tried as well
(:mod:`~memsaving_gradients.planners.chains.mirror_counts`). The fastest plan that fits is returned.
The plans tried depend on the graph alone, so a larger budget never costs more time. Plans are
optimal only by luck: they are the baseline that other planners have to beat. Each plan tried takes
O(n); `TRIALS` bounds their number.
"""

from __future__ import annotations

import math
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
    Deadline,
    Interrupted,
    Limits,
    Proposal,
    TrialCount,
    checkpoints,
)
from memsaving_gradients.schedules.arrays import IntArray
from memsaving_gradients.schedules.schedule import Schedule, recompute_lazily
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Division", "divide", "plan"]


#: Plans to simulate. Chosen by judgement.
TRIALS = TrialCount(executions=2_000_000, fewest=12, most=120)
#: Values of b for each kind of cut places, as multiples of √(xy); the paper has 6, from 1/√2 to √2.
AROUND = (1.0, *np.geomspace(0.5, 2.0, 8))
#: With a budget, for b from √(xy) to everything: shares of the bytes at which the walk stops. Plans
#: keep everything behind the last cut before that place, or all expensive results behind the place.
STOPS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.825, 0.9, 0.95)
#: Cuts at each level of the recursive plans.
SECTIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Division:
    """The cuts of Algorithm 3 for one b.

    Attributes
    ----------
    cuts
        Forward positions behind which the algorithm cuts.
    kept
        Approximate bytes that the cuts keep (x of the paper).
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
        For each position, the bytes made up to there that backward will read.
    width
        For each position, the bytes that a cut behind it keeps.
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
    """Return the best plan of Algorithm 3: the one with the least peak or, with ``limits.budget``,
    with the least extra time within it.

    ``limits.mirror`` overrides the decisions of the algorithm.
    """
    checked(limits.mirror)
    trials = TRIALS.of(graph)
    deadline = Deadline.of(limits.seconds)
    best: Proposal | None = None
    complete = True
    for number, (schedule, kept) in enumerate(_trials(graph, limits, trials)):
        if best is not None and deadline.is_over:
            complete = False
        try:
            if limits.progress is not None:
                limits.progress(min(number / trials, 1.0), "segments")
        except Interrupted:
            complete = False
        if best is not None and not complete:
            break
        if _cannot_win(graph, limits, schedule, best):
            continue
        trial = Proposal(schedule, kept, simulate(graph, schedule))
        if best is None or trial.rank(limits.budget) < best.rank(limits.budget):
            best = trial
    assert best is not None, "keeping everything is always tried"
    met = limits.budget is not None and best.peak <= limits.budget
    return replace(best, complete=complete, optimal=met and not best.schedule.clones)


def _cannot_win(
    graph: TrainingGraph, limits: Limits, schedule: Schedule, best: Proposal | None
) -> bool:
    """Return whether a schedule cannot be better than the best plan, known without simulation."""
    if best is None or limits.budget is None or best.peak > limits.budget:
        return False
    extra = sum(graph.seconds[[step.op for step in schedule.steps if step.copy]])
    return bool(extra > best.extra_seconds * (1 + ROUNDING))


def _trials(
    graph: TrainingGraph, limits: Limits, most: int
) -> Iterator[tuple[Schedule, dict[int, str]]]:
    """Yield schedules to try, with the storages that they keep and the reasons. The choice does not
    depend on the budget's size."""
    segments, chained = measure_segments(graph, limits.keep), limits.sums(graph)
    once = dict.fromkeys(np.unique(graph.storage[graph.losable]).tolist(), 1)

    def counted(counts: dict[int, int]) -> tuple[Schedule, dict[int, str]]:
        known = {**counts, **limits.mirror, **dict.fromkeys(limits.keep, 0)}
        schedule = scheduled(graph, known, chained)
        return schedule, checkpoints(graph, limits, schedule)

    def keeping(reasons: dict[int, str]) -> tuple[Schedule, dict[int, str]]:
        if limits.mirror:
            return counted(once | dict.fromkeys(reasons, 0))
        kept = {**reasons, **limits.keep}
        return recompute_lazily(graph, set(kept), chained), kept

    yield keeping(dict.fromkeys(graph.residuals, "kept"))
    dear = np.array(expensive_storages(graph), np.int64)
    for cuts, behind in _choices(segments, most, wide=limits.budget is not None):
        late = dear[graph.producer[dear] > behind].tolist()
        yield keeping(segments.kept_by(list(cuts)) | dict.fromkeys(late, "expensive to recompute"))
    if limits.budget is not None:
        for k in SECTIONS:
            yield counted(sectioned(graph, limits, k))


def _choices(segments: Segments, most: int, *, wide: bool) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield up to ``most`` pairs of cuts and the position behind which expensive results are kept.

    For b around √(xy) and b = 0; if ``wide``, also for b up to everything and for shorter walks.
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
    """Return √(xy), iterated until a value repeats: the b at which the kept bytes and the largest
    segment are about the same."""
    b, seen = 0.0, set[float]()
    while b not in seen:
        seen.add(b)
        division = divide(held, width, places, b)
        b = math.sqrt(division.kept * division.largest)
    return b


def _places(segments: Segments, width: IntArray) -> list[IntArray]:
    """Return the narrow places fit for a cut and, if they are more, all places."""
    fit = np.flatnonzero(segments.cuttable[:-1])
    narrow = narrow_cuts(fit, width)
    return [narrow] if len(narrow) == len(fit) else [narrow, fit]
