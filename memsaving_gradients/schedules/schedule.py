"""The common language of planners: which op runs when, and which copy of each input it reads.

Every plan becomes a schedule. Most planners choose a special case, a *kept set*: its storages stay,
and every other residual is recomputed once, just before its first backward reader
(`recompute_lazily`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memsaving_gradients.schedules.liveness import Runs, runs_lazily
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["LAG", "Schedule", "Step", "as_schedule", "ordered", "plain", "recompute_lazily"]

#: The default of `Schedule.lag`. Chosen by judgement.
LAG = 1 / 32


class Step(NamedTuple):
    """One execution of an op. A clone of an op whose value is stored runs nothing: it loads the
    value.

    Attributes
    ----------
    op
        The op.
    copy
        0 for the original, k for its k-th clone.
    reads
        For each value that the op reads, the ``copy`` of the execution that made it (empty: all are
        originals).
    """

    op: int
    copy: int = 0
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A sequence of op executions in which every value is made before it is read.

    Attributes
    ----------
    steps
        The executions, in order.
    chained
        Sums (ops) that add their addends one by one as they become available.
    stored
        For each op whose value is stored when it is made, the way. All of its clones are loads.
    lag
        The share of all bytes of the forward pass that may be written before an earlier value is
        stored.
    """

    steps: tuple[Step, ...]
    chained: frozenset[int] = frozenset()
    stored: Mapping[int, Stored] = field(default_factory=dict)
    lag: float = LAG

    @property
    def moves(self) -> bool:
        """Whether anything is stored on another device."""
        return any(how.moving_seconds for how in self.stored.values())

    @property
    def clones(self) -> int:
        """The number of executions that are recomputations."""
        return sum(1 for step in self.steps if step.copy and step.op not in self.stored)


def plain(graph: TrainingGraph, chained: Iterable[int] = ()) -> Schedule:
    """Return a schedule that runs every op once, in the order of the graph."""
    return Schedule(tuple(Step(op) for op in range(graph.length)), frozenset(chained))


def ordered(graph: TrainingGraph, chained: Iterable[int] = ()) -> Schedule:
    """Return a schedule that runs every op once, in the order of originals in plans: as in `plain`,
    except deferrable ops when they are due, and ops brought forward."""
    return Schedule(tuple(Step(op) for op in run_order(graph)), frozenset(chained))


def recompute_lazily(graph: TrainingGraph, kept: set[int], chained: Iterable[int] = ()) -> Schedule:
    """Keep the storages in ``kept``, and recompute all others that the backward ops read, once and
    as late as possible.

    Storages whose op must not be copied are kept as well, whether named or not. Deferrable
    backward ops also run as late as possible.
    """
    return as_schedule(graph, runs_lazily(graph, kept), chained)


def as_schedule(graph: TrainingGraph, runs: Runs, chained: Iterable[int] = ()) -> Schedule:
    """Return the schedule that runs ops as in ``runs`` and stores nothing."""
    picks = runs.picks.tolist()
    steps = []
    at = 0
    for op, copy in zip(runs.ops.tolist(), runs.copies.tolist(), strict=True):
        picked = tuple(picks[at : (at := at + len(graph.reads[op]))])
        steps.append(Step(op, copy, picked if copy or any(picked) else ()))
    return Schedule(tuple(steps), frozenset(chained))
