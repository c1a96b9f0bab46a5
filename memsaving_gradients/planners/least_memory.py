"""The least peak with every value recomputed at most once: checkpoints placed by bytes.

The planner cuts the forward order into segments. A cut keeps its frontier (one tensor or several).
Residuals of a segment are recomputed together when backward reaches it; the last segment's
residuals are kept. While backward is in a segment, three kinds of bytes are alive: frontiers of the
cuts before it, its unread residuals, and the current gradients. Earlier segments may therefore be
longer than later ones. Equal spacing is not optimal even on a chain of equal ops: this placement
needs about √(2n) units there instead of the 2√n of Chen et al. 2016 (arXiv 1604.06174).

For a limit on the peak, a shortest path over pairs of cuts keeps the fewest bytes, because fewer
kept bytes never hurt later segments. That takes O(c²) for c candidate cuts, vectorized. A bisection
finds the least limit that has a path. Exact for chains in this model, which assumes that backward
reads each residual when it passes the op that made it. The planner therefore simulates plans for
limits around the least one and returns the best, so the result is never worse than keeping
everything. Deterministic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memsaving_gradients.planners.chains.frontiers import (
    Segments,
    measure_segments,
    narrow_cuts,
    narrowest_cuts,
)
from memsaving_gradients.planners.proposal import Limits, Proposal, Trial, TrialCount, tried
from memsaving_gradients.schedules.arrays import FloatArray, IntArray
from memsaving_gradients.schedules.simulate import TIE
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]

#: The most candidate cuts; others are thinned out, since the table of pairs has the square of this.
MOST_CUTS = 1000
#: A stretch between two changes of the frontier may be cut if it makes at least this share of all
#: residual bytes. In smaller ones, cuts gain nothing and blur the choice of plans to simulate. (30
#: layers and then 60 readers of one tensor: 12 MB instead of 21. A residual chain of 100, where no
#: stretch makes a fiftieth, takes 16 units instead of 15 if all stretches may be cut.)
LONG_STRETCH = 1 / 16
#: Plans to simulate. Chosen by judgement.
TRIALS = TrialCount(executions=400_000, fewest=2, most=24)


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Place checkpoints for the least simulated peak, in addition to the storages that ``limits``
    keeps."""
    segments = measure_segments(graph, limits.keep)
    cuts = _candidates(segments)
    tables = _tables(segments, cuts)
    thorough = graph.length * TRIALS.most <= TRIALS.executions
    affordable = TRIALS.affordable(graph)
    trials = TRIALS.most if thorough else max(TRIALS.fewest, affordable)
    paths = _paths(tables, trials) or [()]
    found = [tried(graph, limits, segments.kept_by([int(cuts[k]) for k in path])) for path in paths]
    best = _best(found, thorough)
    if thorough:
        best = _improve(graph, limits, segments, best, affordable)
    return _keep_late(graph, limits, segments, best, thorough).proposal(graph)


def _best(trials: list[Trial], thorough: bool) -> Trial:
    """Return the trial of least peak; of peaks within `TIE`, the one with the fewest bytes in
    chunks or, unless ``thorough``, the least extra time."""
    least = min(trial.peak for trial in trials)
    near = [trial for trial in trials if trial.peak <= least * (1 + TIE)]
    if not thorough:
        return min(near, key=lambda trial: (trial.extra_seconds, trial.peak))
    return min(near, key=lambda trial: (trial.allocated, trial.peak, trial.extra_seconds))


def _improve(
    graph: TrainingGraph, limits: Limits, segments: Segments, best: Trial, trials: int
) -> Trial:
    """Drop kept storages, or keep a neighbor instead, as long as that lowers the peak: the model of
    cuts is coarse. A change matters only if one of its storages is alive at the peak."""
    places = sorted({*segments.parts.tolist(), *segments.residuals.tolist()})
    place_of = {storage: k for k, storage in enumerate(places)}
    seen: set[frozenset[int]] = set()
    alive = _at_peak(graph, best)
    improved = True
    while improved:
        improved = False
        chosen = [s for s in best.reasons if s in place_of and s not in limits.keep]
        chosen.sort(key=lambda storage: (-int(graph.size[storage]), storage))
        for storage in chosen:
            k = place_of[storage]
            for other in (None, *places[max(k - 1, 0) : k], *places[k + 1 : k + 2]):
                if storage not in best.reasons:
                    break
                if alive.isdisjoint((storage, other)):
                    continue
                rest = {kept: why for kept, why in best.reasons.items() if kept != storage}
                if other is not None:
                    rest.setdefault(other, best.reasons[storage])
                if frozenset(rest) in seen:
                    continue
                if len(seen) == trials:
                    return best
                seen.add(frozenset(rest))
                trial = tried(graph, limits, rest)
                if trial.peak < best.peak:
                    best, improved = trial, True
                    alive = _at_peak(graph, best)
    return best


def _at_peak(graph: TrainingGraph, trial: Trial) -> set[int]:
    """Return the storages that are alive at the peak."""
    owner = np.array(trial.simulation.owner, np.int64)
    at_peak = trial.simulation.at_peak
    return set(graph.storage[owner[at_peak[at_peak < len(owner)]]].tolist())


def _paths(tables: _Tables, trials: int) -> list[tuple[int, ...]]:
    """Return up to ``trials`` different choices of cuts, for limits from the least one that has a
    path upwards."""
    found: dict[tuple[int, ...], None] = {}
    last = len(tables.peak) - 3
    for limit in _limits(tables, trials):
        path = _shortest(tables, limit)
        if path is None:
            continue
        found[tuple(path)] = None
        # With another cut at the very end, the plan keeps nothing of the last segment at first.
        if last >= 0 and path[-1:] != [last]:
            found[(*path, last)] = None
        if len(found) >= trials:
            break
    return list(found)[:trials]


def _keep_late(
    graph: TrainingGraph, limits: Limits, segments: Segments, best: Trial, thorough: bool
) -> Trial:
    """Keep as many of the residuals made last as do not raise the peak: recomputing them would save
    nothing."""
    fewest, most = 0, len(segments.residuals)
    # Find their number to within `TIE` of all residuals.
    bisections = math.ceil(-math.log2(TIE)) if thorough else TRIALS.fewest
    for _ in range(bisections):
        count = (fewest + most + 1) // 2
        late = segments.residuals[len(segments.residuals) - count :].tolist()
        trial = tried(
            graph, limits, best.reasons | dict.fromkeys(late, "near the loss") | best.reasons
        )
        if trial.peak <= best.peak and not (thorough and trial.allocated > best.allocated):
            fewest, best = count, trial
        else:
            most = count - 1
        if fewest >= most:
            break
    return best


@dataclass(frozen=True, eq=False)
class _Tables:
    """Costs of segments between candidate cuts; index 0 is the start, the last index is the end.

    Attributes
    ----------
    keep
        At [i, j], the bytes that cut j adds to the kept bytes if the cut before it is i.
    peak
        At [i, j], the bytes that backward needs in the segment from i to j, in addition to the
        bytes kept up to i.
    """

    keep: FloatArray
    peak: FloatArray

    @cached_property
    def by_end(self) -> tuple[FloatArray, FloatArray]:
        """Both tables transposed, so that entries that end at one cut are adjacent."""
        return self.keep.T.copy(), self.peak.T.copy()


def _candidates(segments: Segments) -> IntArray:
    """Return the positions to cut at: all where the frontier changes and between readers of one
    tensor, or the narrowest ones if there are too many."""
    # A cut behind the last residual means keeping none of the last segment.
    ends = segments.residual_born[-1:]
    changes = np.unique(np.concatenate([segments.born, segments.last, ends]))
    if len(changes):
        # A stretch of readers would be one segment, which the model recomputes all at once.
        born = segments.residual_born
        held = np.concatenate([[0], segments.held[changes]])
        within = np.diff(held)[np.searchsorted(changes, born)]
        changes = np.union1d(changes, born[within >= LONG_STRETCH * held[-1]])
    changes = changes[changes < segments.length - 1]
    cuts = changes[segments.cuttable[changes]]
    if len(cuts) <= MOST_CUTS:
        return cuts
    width = segments.frontier_bytes()
    cuts = narrow_cuts(cuts, width)
    if len(cuts) <= MOST_CUTS:
        return cuts
    # Take the narrowest cut of each stretch of equal residual bytes.
    stretch = (segments.held[cuts] * MOST_CUTS) // (segments.held[-1] + 1)
    return narrowest_cuts(cuts, width, stretch)


def _tables(segments: Segments, cuts: IntArray) -> _Tables:
    count = len(cuts)
    begins = np.concatenate([[-1], cuts])
    keep = segments.added_bytes(begins)
    pinned = np.concatenate([[0], segments.pinned_held[cuts], segments.pinned_held[-1:]])
    keep += pinned[None, :] - pinned[:, None]
    held = np.concatenate([[0], segments.held[cuts]])
    need = segments.held + segments.working
    block = np.maximum.reduceat(need, begins + 1) if len(need) else np.zeros(count + 1)
    peak = np.full((count + 2, count + 2), np.inf)
    for i in range(count + 1):
        peak[i, i + 1 :] = np.maximum.accumulate(block[i:]) - held[i]
    return _Tables(keep, peak)


def _limits(tables: _Tables, trials: int) -> list[float]:
    """Return the least limit that has a path, and limits above it."""
    high = float(tables.peak[0, -1])
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        if _shortest(tables, middle) is None:
            low = middle
        else:
            high = middle
        if high - low <= 1e-4 * high:
            break
    return [high * (1 + 0.8 * (k / trials) ** 2) for k in range(trials)]


def _shortest(tables: _Tables, limit: float) -> list[int] | None:
    """Return the numbers of the cuts that keep the fewest bytes with all segments in ``limit``."""
    count = len(tables.peak) - 2
    kept = np.full(count + 2, np.inf)
    kept[0] = 0.0
    came = np.zeros(count + 2, np.int64)
    added, needed = tables.by_end
    for j in range(1, count + 2):
        so_far = kept[:j]
        arrive = so_far + added[j, :j]
        arrive[so_far + needed[j, :j] > limit] = np.inf
        i = int(arrive.argmin())
        kept[j], came[j] = arrive[i], i
    if not np.isfinite(kept[-1]):
        return None
    path, j = [], int(came[-1])
    while j:
        path.append(j - 1)
        j = int(came[j])
    return path[::-1]
