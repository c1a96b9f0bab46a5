"""A lower bound on the extra time of any plan within a budget, by an integer program for one moment.

:mod:`~memsaving_gradients.planners.bound` lets every value that has no room at a moment come back at the price of its own op. But making it again
needs what it is made of: that was there at the moment, too, and took its bytes, or it has to be made again itself. So for each value
that is read behind the moment there are two integers, whether it is there and whether its op is run again; one of them is 1 if an original
reads it, each one that is made again needs one of the two for all that it is made of, and what is there fits into the budget. It is
one row of Checkmate's program (Jain et al. 2020, arXiv 1910.02653), and where a network's memory has one summit nearly all of it: on the public
instances it comes to the optimum or close to it. The same with fractions says little (half of every value is there, and lets half of
every op be run again), and several moments together are a hundred times as slow for a tenth of a point.

Every schedule that runs the originals in the order of the graph obeys it, however often it recomputes. What is there and what is not in
the program's own solution is a good place for a search to begin. Solved by HiGHS, through SciPy (extra
``exact``), within a limit on branches: some hundredths of a second each moment. The same number in every process.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np

from memsaving_gradients.planners.bound import Crowd
from memsaving_gradients.training_graph import TrainingGraph

__all__ = ["Bound", "Moment", "bound_within", "tightest_bound"]

#: Moments that are looked at: those where the simple bound is highest.
MOMENTS = 3
#: In graphs of more ops, none are.
MANY_OPS = 20_000
#: Branches for each, and the share of the bound that is near enough.
BRANCHES, GAP = 2_000, 1e-3
#: Values of fewer bytes than this share of the budget are taken to be there.
SMALL = 1e-3
#: HiGHS comes this close to the optimum; its word for a program that has no solution.
TOLERANCE, INFEASIBLE = 1e-6, 2


@dataclass(frozen=True)
class Moment:
    """The solution of the program for one moment.

    Attributes
    ----------
    place
        The moment: a place of ``graph.order``.
    seconds
        Its bound.
    absent
        Storages that were made by then and are not there.
    """

    place: int
    seconds: float
    absent: frozenset[int]


@dataclass(frozen=True)
class Bound:
    """The highest bound, and the moments that were looked at for it (none in large graphs, and where nothing is to be lost)."""

    seconds: float
    moments: tuple[Moment, ...] = ()


def tightest_bound(graph: TrainingGraph, budget: int, *, accumulate: bool = True) -> float:
    """No schedule with a simulated peak of ``budget`` bytes takes less extra time, seconds (``inf``: there is none).

    In large graphs and without SciPy, what :func:`~memsaving_gradients.planners.bound.least_extra_seconds` gives.

    Examples
    --------
    Three values wait for the backward pass, made one of the other; each takes as many bytes as seconds. With the third one kept, which is
    the dearest for its bytes, the other two have to be made again:

    >>> import numpy as np
    >>> no = np.zeros(7, bool)
    >>> chain = TrainingGraph(
    ...     first_backward=4, reads=[(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)],
    ...     writes=[(k,) for k in range(7)], producer=np.arange(7), storage=np.arange(7),
    ...     size=np.array([1, 2, 3, 1, 1, 1, 1]), source=no, clonable=~no, joins=no, forwards=no, fuses=no,
    ...     seconds=np.array([1.0, 2.0, 3.3, 1.0, 1.0, 1.0, 1.0]), expensive=no)
    >>> round(tightest_bound(chain, 5), 3) if importlib.util.find_spec("scipy") else 3.0
    3.0
    """
    return bound_within(graph, budget, accumulate=accumulate).seconds


def bound_within(
    graph: TrainingGraph, budget: int, *, accumulate: bool = True, moments: int = MOMENTS
) -> Bound:
    """`tightest_bound`, with where it comes from; of so many ``moments``."""
    crowd = Crowd(graph, budget, accumulate=accumulate)
    bound = crowd.bound
    large = graph.length > MANY_OPS or importlib.util.find_spec("scipy") is None
    if not 0 < bound < float("inf") or large:
        return Bound(bound)
    solved = tuple(_solved(crowd, place) for place in crowd.worst(moments))
    return Bound(max(bound, *(moment.seconds for moment in solved)), solved)


def _solved(crowd: Crowd, place: int) -> Moment:
    """The integer program for the moment at a place; a bound of 0 if HiGHS comes to none."""
    from scipy import optimize, sparse

    graph, budget = crowd.graph, crowd.budget
    fixed, _ = crowd.at(place)
    touched = crowd.touched(place)
    # Items are what was made by then and may be lost. Columns: those that are there, and then those that are made again.
    items = np.flatnonzero(crowd.free & (crowd.born <= place) & (crowd.size >= SMALL * budget))
    number = {int(crowd.storages[item]): k for k, item in enumerate(items)}
    many = len(items)
    storage, producer = graph.storage.tolist(), graph.producer.tolist()
    # One run of an op makes all its results: that of the first counts.
    first = [min(number[v] for v in graph.writes[producer[root]] if v in number) for root in number]
    rows: list[list[tuple[int, float]]] = []
    limits: list[float] = []
    for k, root in enumerate(number):
        if crowd.last[items[k]] > place:
            rows.append([(k, -1.0), (many + k, -1.0)])
            limits.append(-1.0)
        for made_of in {storage[v] for v in graph.reads[producer[root]]} & number.keys():
            u = number[made_of]
            rows.append([(many + k, 1.0), (u, -1.0), (many + u, -1.0)])
            limits.append(0.0)
        if first[k] != k:
            rows.append([(many + k, 1.0), (many + first[k], -1.0)])
            limits.append(0.0)
    # What the op at the moment reads and makes is among what is fixed, whoever reads it later.
    free = touched[items] | (crowd.born[items] == place)
    rows.append([(k, float(crowd.size[items[k]]) / budget) for k in np.flatnonzero(~free).tolist()])
    limits.append((budget - fixed) / budget)
    seconds = np.zeros(2 * many)
    for root, k in number.items():
        if first[k] == k:
            seconds[many + k] = graph.seconds[producer[root]]
    scale = float(seconds.max(initial=0.0))
    if not scale:
        return Moment(place, 0.0, frozenset())
    entries = [(row, column, factor) for row, terms in enumerate(rows) for column, factor in terms]
    at, columns, factors = zip(*entries, strict=True)
    matrix = sparse.csr_matrix((factors, (at, columns)), (len(rows), 2 * many))
    result = optimize.milp(
        seconds / scale,
        integrality=1,
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix, ub=limits),
        options={"node_limit": BRANCHES, "mip_rel_gap": GAP},
    )
    if result.status == INFEASIBLE:
        return Moment(place, float("inf"), frozenset())
    found = result.mip_dual_bound
    there = np.ones(many) if result.x is None else result.x[:many]
    return Moment(
        place,
        0.0 if found is None else float(found) * scale * (1 - TOLERANCE),
        frozenset(root for root, k in number.items() if there[k] < 0.5),
    )
