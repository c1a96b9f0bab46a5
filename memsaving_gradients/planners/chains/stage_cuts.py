"""The cuts of a training graph into stages, and the stage of each backward op.

Cuts are the narrowest positions of stretches of equal bytes and seconds. A backward op belongs to
the latest stage that has all of its inputs. In order of execution, stages never rise. Linear in ops
and edges.
"""

from __future__ import annotations

import numpy as np

from memsaving_gradients.planners.chains.frontiers import Segments, narrow_cuts, narrowest_cuts
from memsaving_gradients.schedules.arrays import IntArray
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["early", "narrow", "places"]

#: Backward may read values before it enters their stages (a loss in the middle of a network). They
#: are kept if they hold no more than this share of all residual bytes.
EARLY_SHARE = 0.2


def narrow(graph: TrainingGraph, segments: Segments, most: int) -> IntArray:
    """Return at most ``most`` − 1 positions to cut behind: the narrowest of each stretch."""
    changes = np.unique(np.concatenate([segments.born, segments.last, segments.residual_born]))
    cuts = changes[(changes < segments.length - 1) & (changes >= 0)]
    cuts = cuts[segments.cuttable[cuts]]
    width = segments.frontier_bytes()
    # Between two residuals one cut is enough.
    cuts = narrowest_cuts(cuts, width, segments.held[cuts])
    if len(cuts) >= most:
        cuts = narrow_cuts(cuts, width)
    if len(cuts) >= most:
        seconds = np.cumsum(graph.seconds[: graph.first_backward])
        share = segments.held / max(segments.held[-1], 1) + seconds / max(seconds[-1], 1e-300)
        stretch = np.minimum(share[cuts] / 2 * (most - 1), most - 2)
        cuts = narrowest_cuts(cuts, width, stretch.astype(np.int64))
    return cuts


def places(graph: TrainingGraph, segments: Segments) -> list[int]:
    """Return, for each backward op in order of execution, its forward position; these never rise.

    A position is after the makers of the op's inputs, and as late as all inputs are available for a
    recomputation.
    """
    residual, storage = graph.residuals, graph.storage.tolist()
    producer = graph.producer.tolist()
    until = dict(zip(segments.parts.tolist(), segments.last.tolist(), strict=True))
    order = run_order(graph)[graph.first_backward :]
    low, high = [], []
    for op in order:
        read = [storage[v] for v in graph.reads[op] if storage[v] in residual]
        made = max((producer[s] for s in read), default=-1)
        low.append(made)
        last = min((until.get(s, producer[s]) for s in read), default=graph.first_backward - 1)
        high.append(max(made, last))
    at = graph.first_backward - 1
    least = np.maximum.accumulate(np.array(low[::-1], np.int64))[::-1].tolist()
    found = []
    for k in range(len(order)):
        at = max(least[k], min(at, high[k]), 0)
        found.append(at)
    return found


def early(graph: TrainingGraph, segments: Segments, cuts: IntArray, at: list[int]) -> set[int]:
    """Return the residuals read in a stage that has them neither in its input nor in itself, if
    they are few."""
    residual, storage = graph.residuals, graph.storage.tolist()
    until = dict(zip(segments.parts.tolist(), segments.last.tolist(), strict=True))
    begin = np.concatenate([[-1], cuts])
    begins = begin[np.searchsorted(cuts, at)].tolist() if at else []
    found = set()
    for op, start in zip(run_order(graph)[graph.first_backward :], begins, strict=True):
        for value in graph.reads[op]:
            root = storage[value]
            if root in residual and graph.losable[root]:
                made = int(graph.producer[root])
                if made <= start and until.get(root, made) <= start:
                    found.add(root)
    found -= segments.small | segments.pinned
    fits = graph.size[list(found)].sum() <= EARLY_SHARE * graph.residual_bytes
    return found if fits else set()
