"""The cheapest decisions for fixed prices of memory, by one minimum cut.

Each gap costs the price of its value's bytes while they are in memory and, if the value is dropped,
the time of recomputing it. Recomputing a value needs its inputs. An input that no event reads any
more (a tail) must be kept until then or be recomputed too, which needs *its* inputs. The cheapest
decisions under such implications are the closure problem (Picard 1976, Management Science 22). A
minimum cut between a source (dropped) and a sink (kept) solves it exactly:

- an inner gap is one node: on the source's side it is dropped;
- a tail is two nodes: the first says that its value is *there* when it is needed, the second that
  it is there by *recomputation* instead of being kept;
- each node on the source's side pulls the tails that it needs to this side.

A dropped input that an event reads later (an inner gap) is recomputed anyway. If another value
needs it *sooner*, its bytes cost from then on. This depends on pairs of decisions, which no cut can
tell apart, so it is counted under the last decisions (`_pulled`). PyTorch's min-cut partitioner is
the case of one moment and no times. A cut takes some milliseconds for a thousand gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memsaving_gradients.planners.prices.gaps import Gaps, Times, spans
from memsaving_gradients.planners.proposal import ROUNDING
from memsaving_gradients.planners.retention.problem import DROPPED, KEPT, STRICT
from memsaving_gradients.schedules.arrays import FloatArray, IntArray

__all__ = ["Closure"]

#: Fact: capacities are 32-bit integers; the edges of the source add up to at most ``FINITE``.
FINITE, INFINITE = 2**29, 2**30

#: The most values recomputed sooner that are counted for each gap. (To count all takes 0.3 s a cut
#: on a chain of 1,000 layers of which none is kept, and gives the same plans.)
FAR = 16

#: Fact: the nodes between which `maximum_flow` computes a flow.
_SOURCE, _SINK = 0, 1


class Closure:
    """The minimum cut of one problem: its edges are fixed, its capacities follow the prices."""

    def __init__(self, gaps: Gaps) -> None:
        self.gaps = gaps
        inner, tails = gaps.inner, gaps.tails
        self._dropped = np.arange(2, 2 + len(inner))
        self._there = np.arange(2 + len(inner), 2 + len(inner) + 2 * len(tails), 2)
        self._remade = self._there + 1
        self._nodes = 2 + len(inner) + 2 * len(tails)
        node = dict(zip(inner.tolist(), self._dropped.tolist(), strict=True))
        node |= dict(zip(tails.tolist(), self._remade.tolist(), strict=True))
        there = dict(zip(tails.tolist(), self._there.tolist(), strict=True))
        needs = [
            (node[gap], there[other])
            for gap, found in gaps.inputs.items()
            for other in found
            if other in there
        ]
        # A recomputed tail is there.
        needs += zip(self._remade.tolist(), self._there.tolist(), strict=True)
        ends = np.array(needs, np.int64).reshape(-1, 2)
        source, sink = np.full(len(inner), _SOURCE), np.full(len(inner), _SINK)
        self._rows = np.concatenate([source, self._dropped, self._there, self._remade, ends[:, 0]])
        self._columns = np.concatenate(
            [self._dropped, sink, self._remade, np.full(len(tails), _SINK), ends[:, 1]]
        )
        self._needs = np.full(len(ends), INFINITE)
        self._unit = max(float(sum(gaps.problem.seconds)), 1e-12)

    def decide(
        self, prices: FloatArray, times: Times, decisions: Sequence[int], *, linear: bool = True
    ) -> list[int]:
        """Return the cheapest decisions.

        Parameters
        ----------
        prices
            For each event, seconds a byte.
        times
            When values are recomputed.
        decisions
            The last decisions, to which ``times`` belong.
        linear
            Whether to count costs that depend on pairs of decisions, as under the last ones.
        """
        gaps, inner, tails = self.gaps, self.gaps.inner, self.gaps.tails
        total = np.concatenate([[0.0], np.cumsum(prices)])
        # Ties are broken in favor of keeping.
        tie = ROUNDING * self._unit

        def held(which: IntArray, begin: IntArray, end: IntArray) -> FloatArray:
            return gaps.size[which] * spans(total, begin[which], end[which])

        keep = held(inner, gaps.begin, gaps.end)
        drop = gaps.seconds[inner] + held(inner, times.made, gaps.end) + tie
        strict = np.zeros(len(inner), np.bool_)
        if linear:
            readers = gaps.readers(times)[inner]
            freed = gaps.seconds[inner] * (1 + readers) + tie
            strict = (readers > 0) & (freed < drop)
            drop = np.where(strict, freed, drop) + self._pulled(total, times, decisions)[inner]
        waits = held(tails, gaps.begin, times.until)
        remade = gaps.seconds[tails] + held(tails, times.made, times.until) + tie
        # A cost that both sides share does not change the cut.
        both = np.minimum(keep, drop)
        side = self._source_side(np.concatenate([keep - both, drop - both, waits, remade]))
        found = gaps.problem.plain()
        gone = side[self._dropped]
        for gap, dropped, freed in zip(inner.tolist(), gone.tolist(), strict.tolist(), strict=True):
            found[gap] = (STRICT if freed else DROPPED) if dropped else KEPT
        stays = side[self._there] & ~side[self._remade]
        for gap, kept in zip(tails.tolist(), stays.tolist(), strict=True):
            found[gap] = KEPT if kept else DROPPED
        return found

    def _source_side(self, costs: FloatArray) -> np.ndarray:
        """Return, for each node, whether it is on the source's side of a minimum cut."""
        # The source's edges fit into `FINITE` together; an edge clipped to it is never in the cut.
        most = max(self._unit, float(costs[: len(self._dropped)].sum()))
        scaled = np.minimum(np.rint(costs * (FINITE / most)), FINITE)
        capacity = np.concatenate([scaled, self._needs]).astype(np.int32)
        edges = csr_array((capacity, (self._rows, self._columns)), (self._nodes, self._nodes))
        left = edges - maximum_flow(edges, _SOURCE, _SINK).flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        side = np.zeros(self._nodes, np.bool_)
        side[breadth_first_order(left, _SOURCE, return_predecessors=False)] = True
        return side

    def _pulled(self, total: FloatArray, times: Times, decisions: Sequence[int]) -> FloatArray:
        """Return, for each gap (0 unless inner), the cost of dropping it because its inputs, which
        are recomputed anyway, are then recomputed sooner, under the last decisions."""
        gaps = self.gaps
        price, made, end = total.tolist(), times.made.tolist(), gaps.end.tolist()
        size, seconds, tail = gaps.size.tolist(), gaps.seconds.tolist(), gaps.tail.tolist()
        users, events = gaps.users, gaps.events
        cost = np.zeros(len(end))
        for gap in gaps.inner.tolist():
            event = end[gap] if decisions[gap] == KEPT else made[gap]
            seen: set[int] = set()
            pulled, stack = 0.0, [gap]
            while stack and len(seen) < FAR:
                reader = stack.pop()
                known = event == end[reader]
                for other in gaps.inputs[reader] if known else gaps.inputs_at(reader, event):
                    if other in seen or decisions[other] == KEPT or tail[other]:
                        continue
                    seen.add(other)
                    if decisions[other] == STRICT and event < end[other]:
                        pulled += seconds[other]
                        stack.append(other)
                        continue
                    if made[other] < event:
                        continue
                    sooner = made[other]
                    if sooner == event:
                        # Recomputed for this gap; without this gap, for the next that needs it.
                        sooner = min(
                            (
                                made[user]
                                for user in users.get(other, ())
                                if user not in (reader, gap)
                                and decisions[user] != KEPT
                                and not tail[user]
                                and event <= made[user]
                            ),
                            default=end[other],
                        )
                        sooner = min(sooner, end[other])
                    if sooner <= event:
                        continue
                    held = size[other] * (price[min(sooner, events)] - price[event + 1])
                    pulled += min(max(held, 0.0), seconds[other])
                    stack.append(other)
            cost[gap] = pulled
        return cost
