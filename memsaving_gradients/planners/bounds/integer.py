"""A lower bound on the extra time of any plan within a budget, by integer programs for the most
crowded moments.

In :mod:`~memsaving_gradients.planners.bounds.relaxation`, every value that has no room at a moment
comes back at the price of its own op. But recomputing the value needs its inputs. They took bytes
at that moment, too, or have to be recomputed themselves. The program of
:mod:`~memsaving_gradients.planners.bounds.moment_program` models that. On the public instances, its
bound is the optimum or close to it. The same program with fractions gives little: half of every
value is present, and lets half of every op run again.

First, each of the most crowded moments gets a program. Then the moment with the highest bound is
combined with others: as long as a solution is above the budget at some moment, that moment joins
the program (as Dantzig, Fulkerson and Johnson did with their tours in 1954). On a U-Net at 45 % of
its peak, this raises the bound of one moment by 17 %, on a transformer by 4 %; where memory has one
summit, not at all.

The values present and absent in the solutions are good starting points for a search. The bound is
the same in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_tools.memory.timeline import MANY_OPS
from memsaving_gradients.planners.bounds.moment_program import Program, Solved
from memsaving_gradients.planners.bounds.relaxation import Crowd
from memsaving_gradients.planners.chains.frontiers import TINY
from memsaving_gradients.schedules.simulate import TIE
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Bound", "bound_within", "tightest_bound"]

#: The most branches of a program for several moments.
BRANCHES = 20


@dataclass(frozen=True)
class _Depth:
    """The extent of the programs where a bound is worth some seconds.

    Attributes
    ----------
    moments
        The number of moments with a program of their own: where the simple bound is highest.
    together
        The most moments in one program.
    integers
        The most integers of a program for several moments.
    gain
        The first moment that raises the bound by less than this share is the last one.
    """

    moments: int
    together: int
    integers: int
    gain: float


#: The extent of the programs for a bound that is worth some seconds. Chosen by judgement.
DEPTH = _Depth(3, 4, 1_500, 0.02)


@dataclass(frozen=True)
class Bound:
    """The highest bound, and the solutions of the programs that were solved for it (none in large
    graphs, and where the simple bound is 0 or infinite)."""

    seconds: float
    solved: tuple[Solved, ...] = ()


def tightest_bound(graph: TrainingGraph, budget: int, *, accumulate: bool = True) -> float:
    """Return extra seconds that no schedule with a simulated peak of ``budget`` bytes can go below
    (``inf``: there is no such schedule).

    In large graphs, the bound of
    :func:`~memsaving_gradients.planners.bounds.relaxation.least_extra_seconds`.

    Examples
    --------
    Three values wait for the backward pass, each made of the one before; each takes about as many
    bytes as seconds. The fastest plan keeps the third one, the most expensive for its bytes, and
    recomputes the other two:

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
    """Return `tightest_bound` with its solutions; each program may take so many ``seconds``.

    ``deep``: whether the bound is worth some seconds. Otherwise, only the worst moment has a
    program, solved to within `TIE`.
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
    """Return solutions for more and more moments, as long as the last one does not fit."""
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
