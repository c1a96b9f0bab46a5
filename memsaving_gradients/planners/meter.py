"""What plans need of a budget: bytes in the chunks of TensorFlow's allocator, where planners count
bytes asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from graph_tools.memory.bfc_allocator import irregular_peaks
from memsaving_gradients.budget import chunk_bytes, one_chunk
from memsaving_gradients.planners.proposal import Proposal
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["MANY_OPS", "Found", "Meter"]

#: In graphs of more ops an attempt takes seconds: there are fewer; and chunks are simulated for so
#: many steps.
MANY_OPS, STEPS = 30_000, 5


class Meter:
    """What schedules of one training graph need.

    Parameters
    ----------
    graph
        The training graph.
    gating
        ``"control"``, or ``"data"`` under XLA.
    persistent
        Bytes of what is there before the step. In a graph of more than `MANY_OPS`, schedules are
        simulated amidst of it, for `STEPS`: half a second each, where one that turns out to need
        more costs five.
    """

    def __init__(self, graph: TrainingGraph, gating: str, persistent: Sequence[int] = ()) -> None:
        self.graph, self.gating = graph, gating
        amidst = graph.length > MANY_OPS and gating != "data"
        self.persistent = tuple(persistent) if amidst else ()

    def need(self, proposal: Proposal) -> int:
        """The bytes in chunks that a proposal needs."""
        simulation = proposal.simulation
        if not self.persistent:
            return chunk_bytes(simulation, self.gating)
        peaks = irregular_peaks([simulation.buffers], before=self.persistent, steps=STEPS)
        return peaks.average

    @cached_property
    def plain(self) -> Proposal:
        """Plain training."""
        schedule = plain(self.graph)
        return Proposal(schedule, {}, simulate(self.graph, schedule), optimal=True)

    def most_to_ask(self, budget: int) -> int:
        """The most bytes to ask a planner for, such that the chunks can fit ``budget``."""
        if self.gating != "data":
            return budget
        low, high = 0, budget
        while low < high:
            middle = (low + high + 1) // 2
            if one_chunk(middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return max(low, 1)


@dataclass(frozen=True, eq=False)
class Found:
    """A plan that does what was asked for.

    Attributes
    ----------
    proposal
        The plan.
    need
        The bytes in chunks that it needs.
    asked
        The bytes asked for within which it was planned; its lower bound holds for these. ``None``:
        no limit.
    stopped
        Why planning ended early, or an empty string.
    """

    proposal: Proposal
    need: int
    asked: int | None
    stopped: str = ""
