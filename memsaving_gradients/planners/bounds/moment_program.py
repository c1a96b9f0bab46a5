"""The integer program of the values present at some moments of a step, and of the ops recomputed
between them.

At each moment, an original op runs. An integer for each moment and value says whether the value is
present, if it can be recomputed and may be read later. An integer for each op and each stretch
between moments says whether the op runs again. Values that originals or clones read in a stretch
were present at its beginning, or are made in it. Values present at a moment were present at the
moment before, or were made between. They fit into the budget, together with the bytes that no plan
can spare. These are some rows of Checkmate's program (Jain et al. 2020, arXiv 1910.02653), which
has rows for every op. Where memory has one summit, one moment gives nearly the whole bound; where
it has several (a U-Net: one at each level), a few moments do.

Every schedule that runs the originals in the order of the graph satisfies the program, however
often it recomputes. Its least time is therefore a lower bound. It ignores the bytes needed between
moments. A solution shows which moment would raise the bound: simulated as lazily as possible, the
solution exceeds the budget there.

HiGHS solves it, through SciPy, within a limit on branches: some hundredths of a second for a
moment, up to some seconds for several. The bound is the same in every process.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memsaving_gradients.planners.bounds.relaxation import Crowd
from memsaving_gradients.planners.chains.frontiers import TINY
from memsaving_gradients.planners.proposal import SLACK
from memsaving_gradients.schedules.order import run_order

__all__ = ["Moment", "Program", "Rows", "Solved"]

#: The most branches that HiGHS may explore for one moment.
BRANCHES = 2_000
#: Fact: the tolerance of HiGHS at the optimum; its status for a program that has no solution.
TOLERANCE, INFEASIBLE = 1e-6, 2

#: A row of the program: columns, each with its factor.
Row = list[tuple[int, float]]


@dataclass(frozen=True)
class Moment:
    """A moment of a solution: a place of ``run_order(graph)``, and the storages that were made by
    then and are absent."""

    place: int
    absent: frozenset[int]


@dataclass(frozen=True)
class Solved:
    """The solution of a program.

    Attributes
    ----------
    seconds
        The lower bound on extra time (0: nothing is known; ``inf``: there is no schedule).
    moments
        The best solution found, in order; empty if there is none.
    again
        For each stretch of the solution, the ops that run again: before the first moment, between
        two, and behind the last.
    runs
        The same executions, as late as possible and in order: the place of ``run_order(graph)``
        before which an op runs again, and the op.
    """

    seconds: float
    moments: tuple[Moment, ...] = ()
    again: tuple[frozenset[int], ...] = ()
    runs: tuple[tuple[int, int], ...] = ()


class Program:
    """The programs of one graph and one budget.

    Attributes
    ----------
    crowd
        The values alive in plain training.
    values
        The storages that a solution may drop, in the order in which they are made.
    """

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        graph = crowd.graph
        large = crowd.size >= TINY * crowd.budget
        items = np.flatnonzero(crowd.free & ~crowd.summed & large)
        self.values: list[int] = crowd.storages[items].tolist()
        self._size: list[int] = crowd.size[items].tolist()
        self._born: list[int] = crowd.born[items].tolist()
        number = {value: k for k, value in enumerate(self.values)}
        storage = self._storage = graph.storage.tolist()
        place = {op: k for k, op in enumerate(run_order(graph))}
        self._number = number
        self._fixed_at: dict[int, int] = {}
        self._op = [int(graph.producer[value]) for value in self.values]
        self._made_of = [
            sorted({number[storage[v]] for v in graph.reads[op] if storage[v] in number})
            for op in self._op
        ]
        self._reads: list[list[int]] = [[] for _ in self.values]
        for op, read in enumerate(graph.reads):
            for root in {storage[v] for v in read} & number.keys():
                self._reads[number[root]].append(place[op])
        for root in {storage[v] for v in graph.targets} & number.keys():
            self._reads[number[root]].append(graph.length)
        for places in self._reads:
            places.sort()
        #: For each value, the last place that reads it, or anything made of it.
        self._useful = [places[-1] if places else -1 for places in self._reads]
        for k in reversed(range(len(self.values))):
            for u in self._made_of[k]:
                self._useful[u] = max(self._useful[u], self._useful[k])

    def rows(self, places: Sequence[int]) -> Rows:
        """Return the program of some places of ``run_order(graph)``, the earliest first."""
        return Rows(self, places)

    def solve(
        self,
        rows: Rows,
        branches: int = BRANCHES,
        seconds: float | None = None,
        near: float = TINY,
    ) -> Solved:
        """Find the least time of a program, to within the share ``near`` of it, in at most so many
        ``branches`` and ``seconds``."""
        from scipy import optimize, sparse

        scale = max(rows.seconds, default=0.0)
        if not scale:
            return Solved(0.0)
        entries = [(r, c, factor) for r, terms in enumerate(rows.terms) for c, factor in terms]
        at, columns, factors = zip(*entries, strict=True)
        shape = (len(rows.terms), len(rows.seconds))
        result = optimize.milp(
            np.array(rows.seconds) / scale,
            integrality=1,
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(
                sparse.csr_matrix((factors, (at, columns)), shape), ub=rows.most
            ),
            options={"node_limit": branches, "mip_rel_gap": near}
            | ({} if seconds is None else {"time_limit": max(seconds, 0.1)}),
        )
        if result.status == INFEASIBLE:
            return Solved(float("inf"))
        dual = result.mip_dual_bound
        bound = 0.0 if dual is None else float(dual) * scale * (1 - TOLERANCE)
        if result.x is None:
            return Solved(bound)
        found = Solved(bound, *rows.read((result.x > 0.5).tolist()))
        return replace(found, runs=tuple(self._runs(found)))

    def most_crowded(self, solved: Solved) -> int | None:
        """Return the place where a solution is furthest above the budget, and by `SLACK` at least,
        if its clones run as late as possible."""
        crowd, graph = self.crowd, self.crowd.graph
        change = np.zeros(graph.length + 2, np.int64)
        spans: dict[int, list[tuple[int, int]]] = {}
        for k, begin, end in self._spans(solved):
            if end > begin:
                change[begin + 1] += self._size[k]
                change[end] -= self._size[k]
                spans.setdefault(k, []).append((begin, end))
        across = np.cumsum(change)
        worst, most = None, int(SLACK * crowd.budget)
        for place in crowd.places.tolist():
            fixed = self._fixed(place)
            read = {
                self._storage[v] for v in graph.reads[run_order(graph)[place]]
            } & self._number.keys()
            touched = sum(
                self._size[k]
                for k in map(self._number.__getitem__, read)
                if any(begin < place < end for begin, end in spans.get(k, ()))
            )
            over = fixed + int(across[place]) - touched - crowd.budget
            if over > most:
                worst, most = place, over
        return worst

    def _fixed(self, place: int) -> int:
        if place not in self._fixed_at:
            self._fixed_at[place], _ = self.crowd.at(place)
        return self._fixed_at[place]

    def _runs(self, solved: Solved) -> list[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for stretch, (begin, _, first, _) in enumerate(self._needs(solved)):
            for k, place in first.items():
                if self._op[k] in solved.again[stretch] and self._born[k] <= begin:
                    found.add((place, self._op[k]))
        return sorted(found)

    def _spans(self, solved: Solved) -> Iterator[tuple[int, int, int]]:
        """Yield, for each value and stretch, the places between which the value has to be present,
        both excluded."""
        for stretch, (begin, end, first, last) in enumerate(self._needs(solved)):
            for k in first:
                if begin < self._born[k] <= end:
                    yield k, self._born[k], last[k]
                elif self._born[k] <= begin:
                    again = self._op[k] in solved.again[stretch]
                    yield k, first[k] if again else begin, last[k]

    def _needs(self, solved: Solved) -> Iterator[tuple[int, int, dict[int, int], dict[int, int]]]:
        """Yield the bounds of each stretch and, for the values needed in it, the first and the last
        place of need."""
        places = [moment.place for moment in solved.moments]
        for stretch, (begin, end) in enumerate(self._stretches(places)):
            absent = solved.moments[stretch].absent if stretch < len(places) else None
            first: dict[int, int] = {}
            last: dict[int, int] = {}
            for k in reversed(range(len(self.values))):
                read = _within(self._reads[k], begin, end)
                stays = absent is not None and self.values[k] not in absent
                if stays and self._useful[k] > end >= self._born[k]:
                    read = [*read, end]
                if read:
                    first[k] = min(read[0], first.get(k, read[0]))
                    last[k] = max(read[-1], last.get(k, read[-1]))
                if k in first and self._op[k] in solved.again[stretch]:
                    for u in self._made_of[k]:
                        first[u] = min(first[k], first.get(u, first[k]))
                        last[u] = max(first[k], last.get(u, first[k]))
            yield begin, end, first, last

    def _stretches(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the places at which the stretches begin (excluded) and end (included)."""
        bounds = [-1, *places, self.crowd.graph.length]
        return list(itertools.pairwise(bounds))


class Rows:
    """The rows of the program of some places: terms, whose sum is at most ``most``; and the seconds
    that each column costs."""

    def __init__(self, program: Program, places: Sequence[int]) -> None:
        self.program, self.places = program, places
        self.terms: list[Row] = []
        self.most: list[float] = []
        self.seconds: list[float] = []
        # The columns by moment and value, and by stretch and op.
        self._there: dict[tuple[int, int], int] = {}
        self._again: dict[tuple[int, int], int] = {}
        stretches = program._stretches(places)
        for moment, place in enumerate(places):
            for k in range(len(program.values)):
                if program._born[k] <= place < program._useful[k]:
                    self._there[moment, k] = self._column(0.0)
        seconds = program.crowd.graph.seconds
        for stretch, (begin, _) in enumerate(stretches):
            for k, op in enumerate(program._op):
                # Recomputations before the first moment have no columns, and cost nothing.
                behind = stretch and program._born[k] <= begin < program._useful[k]
                if behind and (stretch, op) not in self._again:
                    self._again[stretch, op] = self._column(float(seconds[op]))
        for stretch, (begin, end) in enumerate(stretches):
            if stretch:
                self._make(stretch, begin, end)
        for moment, place in enumerate(places):
            self._fit(moment, place)

    def read(self, chosen: Sequence[bool]) -> tuple[tuple[Moment, ...], tuple[frozenset[int], ...]]:
        """Return the moments and the repeated ops of a solution, from its columns."""
        values = self.program.values
        moments = []
        for moment, place in enumerate(self.places):
            absent = {
                values[k]
                for (at, k), column in self._there.items()
                if at == moment and not chosen[column]
            }
            moments.append(Moment(place, frozenset(absent)))
        again: list[set[int]] = [set() for _ in range(len(self.places) + 1)]
        for (stretch, op), column in self._again.items():
            if chosen[column]:
                again[stretch].add(op)
        return tuple(moments), tuple(map(frozenset, again))

    def _column(self, seconds: float) -> int:
        self.seconds.append(seconds)
        return len(self.seconds) - 1

    def _at_most(self, row: Row, most: float) -> None:
        if row:
            self.terms.append(row)
            self.most.append(most)

    def _sources(self, stretch: int, k: int) -> Row:
        """Return the columns that provide a value in a stretch, if it was made before."""
        columns = (
            self._there.get((stretch - 1, k)),
            self._again.get((stretch, self.program._op[k])),
        )
        return [(column, -1.0) for column in columns if column is not None]

    def _make(self, stretch: int, begin: int, end: int) -> None:
        """Demand a source for all values that a stretch reads, recomputes from, and leaves."""
        program = self.program
        done: set[int] = set()
        for k, op in enumerate(program._op):
            if program._born[k] > begin:
                continue
            if _within(program._reads[k], begin, end):
                self._at_most(self._sources(stretch, k), -1.0)
            left = self._there.get((stretch, k))
            if left is not None:
                self._at_most([(left, 1.0), *self._sources(stretch, k)], 0.0)
            again = self._again.get((stretch, op))
            if again is None or op in done:
                continue
            done.add(op)
            for u in program._made_of[k]:
                self._at_most([(again, 1.0), *self._sources(stretch, u)], 0.0)

    def _fit(self, moment: int, place: int) -> None:
        """Demand that the values present at a moment fit, together with the inputs and outputs of
        its op."""
        program, crowd = self.program, self.program.crowd
        fixed = program._fixed(place)
        touched = set(crowd.storages[crowd.touched(place)].tolist())
        row = [
            (column, program._size[k] / crowd.budget)
            for (at, k), column in self._there.items()
            if at == moment and program._born[k] < place and program.values[k] not in touched
        ]
        self._at_most(row, (crowd.budget - fixed) / crowd.budget)


def _within(places: list[int], begin: int, end: int) -> list[int]:
    """Return the part of the ordered ``places`` from ``begin`` (excluded) to ``end``."""
    return places[bisect_right(places, begin) : bisect_right(places, end)]
