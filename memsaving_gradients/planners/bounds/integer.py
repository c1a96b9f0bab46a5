"""A lower bound on the extra time of any plan within a budget, by integer programs for the most
crowded moments.

:mod:`~memsaving_gradients.planners.bounds.relaxation` lets every value that has no room at a moment
come back at the price of its own op. But making it again needs what it is made of: that was there
at the moment, too, and took its bytes, or it has to be recomputed itself. The program of
:mod:`~memsaving_gradients.planners.bounds.moment_program` sees that; on the public instances it
comes to the optimum or close to it. The same with fractions says little (half of every value is
there, and lets half of every op be run again).

First each of the most crowded moments is looked at alone. Then the one that says most is looked at
together with others: as long as the solution is above the budget at some moment, that is looked at,
too (what Dantzig, Fulkerson and Johnson did with their tours in 1954). On a U-Net at 45 % of its
peak that is 17 % more than one moment says, on a transformer 4 %; where there is one summit,
nothing.

What is there and what is not in the solutions are good places for a search to begin. The same
number in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

from memsaving_gradients.planners.bounds.moment_program import Program, Solved
from memsaving_gradients.planners.bounds.relaxation import Crowd
from memsaving_gradients.planners.chains.frontiers import TINY
from memsaving_gradients.planners.meter import MANY_OPS
from memsaving_gradients.schedules.simulate import TIE
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Bound", "bound_within", "tightest_bound"]

#: Branches of the programs for several moments.
BRANCHES = 20


@dataclass(frozen=True)
class _Depth:
    """How much is looked at where a bound is worth some seconds.

    Attributes
    ----------
    moments
        Moments alone: those where the simple bound is highest.
    together
        Moments together, at most.
    integers
        Those of a program for several moments, at most.
    gain
        A moment more that raises the bound by less than this share is the last one.
    """

    moments: int
    together: int
    integers: int
    gain: float


#: What is looked at for a bound that is worth some seconds. Chosen by judgement.
DEPTH = _Depth(3, 4, 1_500, 0.02)


@dataclass(frozen=True)
class Bound:
    """The highest bound, and the solutions of the programs that were solved for it (none in large
    graphs, and where nothing is to be lost)."""

    seconds: float
    solved: tuple[Solved, ...] = ()


def tightest_bound(graph: TrainingGraph, budget: int, *, accumulate: bool = True) -> float:
    """No schedule with a simulated peak of ``budget`` bytes takes less extra time, seconds
    (``inf``: there is none).

    In large graphs, what
    :func:`~memsaving_gradients.planners.bounds.relaxation.least_extra_seconds` gives.

    Examples
    --------
    Three values wait for the backward pass, made one of the other; each takes as many bytes as
    seconds. With the third one kept, which is the dearest for its bytes, the other two have to be
    recomputed:

    >>> chain = TrainingGraph.of(
    ...     [(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)], 4,
    ...     size=[1, 2, 3, 1, 1, 1, 1], seconds=[1.0, 2.0, 3.3, 1.0, 1.0, 1.0, 1.0])
    >>> round(tightest_bound(chain, 5), 3)
    3.0
    """
    return bound_within(graph, budget, accumulate=accumulate).seconds


def bound_within(
    graph: TrainingGraph,
    budget: int,
    *,
    accumulate: bool = True,
    deep: bool = True,
    seconds: float | None = None,
) -> Bound:
    """`tightest_bound`, with where it comes from; each program may take so many ``seconds``.

    ``deep``: whether the bound is worth some seconds. Otherwise the worst moment is looked at
    alone, to within `TIE`.
    """
    crowd = Crowd(graph, budget, accumulate=accumulate)
    bound = crowd.bound
    if not 0 < bound < float("inf") or graph.length > MANY_OPS:
        return Bound(bound)
    program = Program(crowd)
    places, near = (crowd.worst(DEPTH.moments), TINY) if deep else (crowd.worst(1), TIE)
    solved = [program.solve(program.rows([place]), seconds=seconds, near=near) for place in places]
    best = max(range(len(solved)), key=lambda k: solved[k].seconds)
    if deep:
        solved += _together(program, [places[best]], solved[best], seconds)
    return Bound(max(bound, *(one.seconds for one in solved)), tuple(solved))


def _together(
    program: Program, places: list[int], solved: Solved, seconds: float | None
) -> list[Solved]:
    """Of more and more moments, as long as the last solution does not fit."""
    found: list[Solved] = []
    while solved.moments and len(places) < DEPTH.together:
        place = program.most_crowded(solved)
        if place is None or place in places:
            break
        places = sorted([*places, place])
        rows = program.rows(places)
        if len(rows.seconds) > DEPTH.integers:
            break
        before, solved = solved.seconds, program.solve(rows, BRANCHES, seconds)
        found.append(solved)
        if solved.seconds < before * (1 + DEPTH.gain):
            break
    return found
