"""Bytes alive at every step of a schedule, and the time that its recomputations take.

References are counted as by TensorFlow's executor: buffers are freed at their last use, views cost
nothing, and an elementwise op writes into an input that dies with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from graph_tools.memory.liveness import timeline
from graph_tools.memory.timeline import Timeline
from memsaving_gradients.schedules.liveness import Lives, Runs, lifetimes, runs_of
from memsaving_gradients.schedules.schedule import Schedule
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph
from memsaving_gradients.schedules.transfers import transfers

__all__ = ["TIE", "Simulation", "simulate", "simulate_runs"]

#: Peaks that differ by at most this share are equal, and bytes below this share of a peak do not
#: matter: the allocator's choice of chunks changes a peak by more. Chosen by judgement.
TIE = 0.01


@dataclass(frozen=True, eq=False)
class Simulation(Timeline):
    """The timeline of a schedule.

    Attributes
    ----------
    extra_seconds
        Estimated time of the clones, of storing and loading, and of waiting for transfers.
    """

    extra_seconds: float = field(default=0.0, kw_only=True)

    @classmethod
    def of(cls, timeline: Timeline, extra_seconds: float) -> Simulation:
        """Return a simulation with this timeline and extra time."""
        values = {each.name: getattr(timeline, each.name) for each in fields(timeline)}
        return cls(**values, extra_seconds=extra_seconds)


def simulate(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Return the bytes alive at every step of ``schedule``, without fed inputs, variables and
    constants."""
    stream = transfers(graph, schedule) if schedule.moves else None
    moved = {} if stream is None else stream.out_until
    runs = runs_of(graph, schedule.steps)
    return _simulation(
        graph,
        runs,
        lifetimes(graph, runs, schedule.chained, schedule.stored, moved),
        schedule.stored,
        0.0 if stream is None else stream.stalled,
    )


def simulate_runs(graph: TrainingGraph, runs: Runs, chained: Iterable[int] = ()) -> Simulation:
    """Simulate ``runs`` as `simulate` does a schedule, with nothing stored."""
    return _simulation(graph, runs, lifetimes(graph, runs, frozenset(chained)))


def _simulation(
    graph: TrainingGraph,
    runs: Runs,
    lives: Lives,
    stored: Mapping[int, Stored] | None = None,
    stalled: float = 0.0,
) -> Simulation:
    stored = stored or {}
    again = runs.copies > 0
    seconds = graph.seconds[runs.ops] * again
    loads = np.zeros(len(runs.ops), np.bool_)
    if stored:
        loads = again & np.isin(runs.ops, list(stored))
        seconds[loads] = [stored[op].load_seconds for op in runs.ops[loads].tolist()]
    # Added one after the other, so that rounding does not depend on their number.
    extra = float(seconds.cumsum()[-1]) if len(seconds) else 0.0
    extra += stalled
    for op in dict.fromkeys(runs.ops[loads].tolist()):
        extra += stored[op].store_seconds
    born, dies, sizes, owner = lives
    if graph.workspace is not None:
        scratch = graph.workspace[runs.ops]
        scratch[loads] = 0
        during = np.flatnonzero(scratch)
        born, dies = np.concatenate([born, during]), np.concatenate([dies, during])
        sizes = np.concatenate([sizes, scratch[during]])
    alive = timeline(born, dies, sizes, len(runs.ops))
    buffers = (born, dies, sizes)
    return Simulation(
        alive, int(alive.max(initial=0)), buffers, owner.tolist(), extra_seconds=extra
    )
