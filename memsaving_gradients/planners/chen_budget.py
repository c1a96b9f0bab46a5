"""Segments of about b bytes each, and a search for the b (Chen, Xu, Zhang and Guestrin 2016, Algorithm 3).

The algorithm walks over the forward ops and adds up the bytes that backward will read. At the first place fit for a cut
where they exceed b it cuts: what crosses the cut is kept, what lies before it is recomputed when backward comes back
(arXiv 1604.06174). One parameter b stands for the whole plan: 0 keeps all, √(xy) balances the bytes kept (x) against the largest
segment (y), which on a chain of n equal ops makes √n segments and a peak of about 2√n units at one extra forward pass.

Three things differ from the paper. A place fit for a cut is not marked by hand: it is any that cuts no fused pair of ops, and a cut
keeps several tensors if several cross it (:mod:`~memsaving_gradients.planners.segments`); b is tried on all those places and
on the narrow ones only, those where fewer bytes cross than just before and just after. Bytes are those of residuals, not of all
outputs. The last segment, which is kept and not recomputed, counts in y.

Every plan is simulated. Without a budget those for b around √(xy) are tried, and the one with the least peak is returned, as in the
paper's appendix. With a budget, b goes from 0 to everything, the walk may stop early, plans that recompute recursively
(:mod:`~memsaving_gradients.planners.mirror`) are tried too, and the one with the least extra time that fits is returned. What is
tried depends on the graph alone, so a larger budget never costs more time. Never optimal but by luck: the baseline that other
planners have to beat. O(n) for each plan tried; `SIMULATED_STEPS` bounds their number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memsaving_gradients.planners.mirror import mirrored, sectioned
from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal, propose
from memsaving_gradients.planners.segments import Segments, measure_segments
from memsaving_gradients.training_graph import TrainingGraph

__all__ = ["Division", "divide", "plan"]

IntArray = npt.NDArray[np.int64]

#: Plans to simulate: as many as this many op executions allow, within bounds.
SIMULATED_STEPS = 2_000_000
FEWEST_TRIALS, MOST_TRIALS = 12, 120
#: Values of b around √(xy) for each kind of places; the paper has 6, from 1/√2 to √2 times √(xy).
GRID, SPREAD = 8, 2.0
#: With a budget: the walk stops after so many of this many parts of the bytes, and the rest is kept.
STOPS = 8
#: How often √(xy) is worked out anew.
ROUNDS = 3
#: Cuts at a time of the recursive plans.
SECTIONS = (1, 2, 4)


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
    """The best plan of Algorithm 3: of the least peak, or with ``limits.budget`` of the least extra time within it.

    ``limits.mirror`` goes before what the algorithm decides.
    """
    trials = max(FEWEST_TRIALS, min(MOST_TRIALS, SIMULATED_STEPS // (2 * graph.length + 1)))
    begin = time.perf_counter()
    best: Proposal | None = None
    complete = True
    for number, make in enumerate(_trials(graph, limits, trials)):
        if best is not None and limits.seconds is not None:
            complete = time.perf_counter() - begin < limits.seconds
        try:
            if limits.progress is not None:
                limits.progress(min(number / trials, 1.0), "segments")
        except Interrupted:
            complete = False
        if best is not None and not complete:
            break
        trial = make()
        if best is None or _key(trial, limits.budget) < _key(best, limits.budget):
            best = trial
    assert best is not None, "keeping everything is always tried"
    met = limits.budget is not None and best.peak <= limits.budget
    return replace(best, complete=complete, optimal=met and not best.schedule.clones)


def _key(trial: Proposal, budget: int | None) -> tuple[float, ...]:
    """Smaller is better."""
    if budget is None:
        return (trial.peak, trial.extra_seconds)
    if trial.peak <= budget:
        return (0, trial.extra_seconds, trial.peak)
    return (1, trial.peak, trial.extra_seconds)


def _trials(graph: TrainingGraph, limits: Limits, most: int) -> Iterator[Callable[[], Proposal]]:
    """Plans to try, each one made when it is called for; which ones does not depend on the budget's size."""
    segments = measure_segments(graph, limits.keep)
    yield lambda: _with_mirror(graph, limits, dict.fromkeys(graph.residuals, "kept"))
    for cuts in _divisions(segments, most, wide=limits.budget is not None):
        reasons = segments.kept_by(list(cuts))
        yield lambda reasons=reasons: _with_mirror(graph, limits, reasons)  # type: ignore[misc]
    if limits.budget is not None:
        for k in SECTIONS:
            counts = {**sectioned(graph, limits, k), **limits.mirror}
            yield lambda counts=counts: mirrored(graph, limits, counts)  # type: ignore[misc]


def _divisions(segments: Segments, most: int, *, wide: bool) -> list[tuple[int, ...]]:
    """Up to ``most`` choices of cuts: for b around √(xy); from b = 0 to everything as well if ``wide``."""
    held, width = segments.held, segments.frontier_bytes()
    found: dict[tuple[int, ...], None] = {}
    kinds = _places(segments, width)
    balanced = [_balance(held, width, places) for places in kinds]
    for factor in (1.0, *np.geomspace(1 / SPREAD, SPREAD, GRID)):
        for places, b in zip(kinds, balanced, strict=True):
            found[divide(held, width, places, b * float(factor)).cuts] = None
    found[divide(held, width, kinds[0], 0.0).cuts] = None
    if wide and len(held) and held[-1]:
        made = np.diff(held, prepend=0)
        lengths = range(1, STOPS)
        each = max(1, (most - len(found)) // (len(kinds) * STOPS))
        for places in kinds:
            for b in np.geomspace(made[made > 0].min(), held[-1], each * STOPS // 2):
                found[divide(held, width, places, float(b)).cuts] = None
            for b in np.geomspace(balanced[0] / SPREAD, balanced[0] * SPREAD, max(1, each // 2)):
                cuts = divide(held, width, places, float(b)).cuts
                ends = [held[-1] * k // STOPS for k in lengths]
                for count in np.searchsorted(held[list(cuts)], ends):
                    found[cuts[:count]] = None
    return list(found)[:most]


def _balance(held: IntArray, width: IntArray, places: IntArray) -> float:
    """√(xy), worked out anew a few times: the b at which the kept bytes and a segment are about the same."""
    b = 0.0
    for _ in range(ROUNDS):
        division = divide(held, width, places, b)
        b = math.sqrt(division.kept * division.largest)
    return b


def _places(segments: Segments, width: IntArray) -> list[IntArray]:
    """All places fit for a cut, and the narrow ones."""
    fit = np.flatnonzero(segments.cuttable[:-1])
    endless = np.iinfo(np.int64).max
    around = width[fit]
    before, after = np.append(endless, around[:-1]), np.append(around[1:], endless)
    narrow = fit[(around <= before) & (around <= after)]
    return [narrow] if len(narrow) == len(fit) else [narrow, fit]


def _with_mirror(graph: TrainingGraph, limits: Limits, reasons: dict[int, str]) -> Proposal:
    """Keep ``reasons`` and recompute the rest once, but for what mirror counts say."""
    if not limits.mirror:
        return propose(graph, limits, reasons)
    counts = dict.fromkeys(np.unique(graph.storage[graph.losable]).tolist(), 1)
    counts |= dict.fromkeys(reasons, 0)
    return mirrored(graph, limits, {**counts, **limits.mirror})
