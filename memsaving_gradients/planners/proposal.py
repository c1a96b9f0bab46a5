"""What goes into a planner beside the graph, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memsaving_gradients.schedule import Schedule, Simulation, recompute_lazily, simulate
from memsaving_gradients.training_graph import TrainingGraph

__all__ = ["Limits", "Proposal", "propose"]


@dataclass(frozen=True)
class Limits:
    """What a plan has to respect.

    Attributes
    ----------
    keep
        Storages that must be kept, whatever else is, and for each the reason to give.
    """

    keep: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """A schedule and what is known of it.

    Attributes
    ----------
    schedule
        The order of execution, clones included.
    reasons
        For each storage that is kept by choice, why: a short phrase. (What cannot be recomputed is kept besides.)
    simulation
        Bytes alive over that schedule, and the time of its clones.
    """

    schedule: Schedule
    reasons: dict[int, str]
    simulation: Simulation

    @property
    def peak(self) -> int:
        """Simulated transient peak, bytes."""
        return self.simulation.peak

    @property
    def allocated(self) -> int:
        """The peak in chunks of TensorFlow's allocator, bytes; ten times as dear to know as `peak`."""
        return self.simulation.allocated_peak

    @property
    def extra_seconds(self) -> float:
        """Estimated time of the clones."""
        return self.simulation.extra_seconds


def propose(graph: TrainingGraph, limits: Limits, reasons: Mapping[int, str]) -> Proposal:
    """The proposal that keeps the storages in ``reasons`` and in ``limits``, and recomputes the rest once."""
    kept = dict(limits.keep)
    kept |= {storage: why for storage, why in reasons.items() if storage not in kept}
    schedule = recompute_lazily(graph, set(kept), graph.sums)
    return Proposal(schedule, kept, simulate(graph, schedule))
