"""The limits that a planner gets with a graph, and the proposal that it returns.

A planner never raises because a budget is too small: it returns the plan with the least peak that
it knows, and its caller compares. Bytes are the bytes that ops request; the layer above counts the
chunks of an allocator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.schedules.liveness import Runs, runs_lazily
from memsaving_gradients.schedules.schedule import Schedule, as_schedule, ordered, plain
from memsaving_gradients.schedules.simulate import Simulation, simulate, simulate_runs
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = [
    "MOST_STEPS",
    "NEAR_BOUND",
    "QUARTERS",
    "ROUNDING",
    "SLACK",
    "SMALLER",
    "Deadline",
    "Interrupted",
    "Limits",
    "Proposal",
    "Trial",
    "TrialCount",
    "checked",
    "checkpoints",
    "is_near",
    "propose",
    "proposed",
    "tried",
    "untouched",
]


#: Fact: sums of the same seconds in another order may differ by this share: some hundred thousand
#: roundings of 1e-16 each, and room for more.
ROUNDING = 1e-9
#: Shares to try where any may be best: of the values to offload where they may be encoded as well;
#: of a stage's bytes to keep.
QUARTERS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: A search that continues with less has this share of its last amount. Chosen by judgement.
SMALLER = 0.95
#: The most executions of ops or of events that a planner may simulate to improve a plan step by
#: step; large graphs therefore get fewer simulations. Chosen by judgement.
MOST_STEPS = 1_500_000
#: The share of the budget, or of a step's time, that is too small to plan again for. Chosen by
#: judgement.
SLACK = 0.005
#: A plan is near the lower bound up to this many times the bound, or up to `SLACK` of a step above
#: the bound. Chosen by judgement.
NEAR_BOUND = 1.15


def is_near(extra: float, bound: float, step: float, times: float = NEAR_BOUND) -> bool:
    """Return whether extra time is at most ``times`` its lower bound, or at most `SLACK` of a
    step's time above it."""
    return extra <= max(bound * times, bound + SLACK * step)


class TrialCount(NamedTuple):
    """The number of plans that a planner may simulate: as many as fit into so many ``executions``
    of ops, but at least ``fewest`` and at most ``most``."""

    executions: int
    fewest: int
    most: int

    def affordable(self, graph: TrainingGraph) -> int:
        """Return how many plans fit if each runs every op twice."""
        return self.executions // (2 * graph.length + 1)

    def of(self, graph: TrainingGraph) -> int:
        """Return how many plans a planner may simulate for a graph."""
        return min(max(self.affordable(graph), self.fewest), self.most)


@dataclass(frozen=True)
class Deadline:
    """The time, on the monotonic clock, at which planning has to end; infinite: no limit.

    Examples
    --------
    >>> Deadline.of(None).left, Deadline.of(-1.0).left, Deadline.of(-1.0).is_over
    (None, 0.0, True)
    """

    ends: float

    @classmethod
    def of(cls, seconds: float | None) -> Deadline:
        """Return the deadline of work that may take so many seconds from now; ``None``: any."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """The seconds until then, at least 0; ``None``: no limit."""
        return None if self.ends == math.inf else max(0.0, self.ends - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() > self.ends


class Interrupted(Exception):
    """Raised by a progress hook to end planning with the best plan so far."""


@dataclass(frozen=True)
class Limits:
    """The limits that a plan has to respect.

    Attributes
    ----------
    keep
        Storages that a plan must keep, each with the reason to give.
    budget
        The most bytes of the simulated peak; planners minimize the extra time within it. ``None``:
        the planner's own aim.
    accumulate
        Whether sums of many addends may be added up as the addends come.
    seconds
        The approximate limit on planning time; ``None``: no limit (the same plan in every
        process).
    progress
        A hook, called now and then with the share of the work done, 0 to 1, and a phrase for the
        current work. It may raise `Interrupted`; the planner then returns the best plan so far.
    mirror
        For storages, how many times each may be recomputed: 0 keeps it, more than 1 recomputes it
        recursively (`memsaving_gradients.planners.chains.mirror_counts`). Planners that cannot
        follow counts ignore them.
    host
        The most bytes that may be offloaded; ``None``: any.
    early
        How long before its use a transfer back begins, as a multiple of its own time; 0: all
        transfers are synchronous.
    quick
        Whether any plan within the budget is good enough, because the caller will ask for others.
    """

    keep: Mapping[int, str] = field(default_factory=dict)
    budget: int | None = None
    accumulate: bool = True
    seconds: float | None = None
    progress: Callable[[float, str], None] | None = None
    mirror: Mapping[int, int] = field(default_factory=dict)
    host: int | None = None
    early: float = 1.0
    quick: bool = False

    def sums(self, graph: TrainingGraph) -> frozenset[int]:
        """Return the sums that are added up as their addends come."""
        return frozenset(graph.sums if self.accumulate else ())


class _Simulated:
    """The base of plans that take their figures from a simulation."""

    simulation: Simulation

    @property
    def peak(self) -> int:
        """Simulated transient peak, bytes."""
        return self.simulation.peak

    @property
    def allocated(self) -> int:
        """The peak in chunks of TensorFlow's allocator, bytes; ten times as expensive to compute as
        `peak`."""
        return self.simulation.allocated_peak

    @property
    def extra_seconds(self) -> float:
        """Estimated time of clones, of storing and loading, and of waiting for transfers."""
        return self.simulation.extra_seconds

    def rank(self, budget: int | None) -> tuple[float, float, int]:
        """Return a rank, less being better: the bytes above ``budget`` (``None``: all bytes), the
        extra time, then the peak."""
        over = self.peak if budget is None else max(0, self.peak - budget)
        return over, self.extra_seconds, self.peak


@dataclass(frozen=True)
class Proposal(_Simulated):
    """A schedule, its simulation, and its distance from the optimum.

    Attributes
    ----------
    schedule
        The order of execution, clones included.
    reasons
        For each storage kept by choice, the reason: a short phrase. (Storages that cannot be
        recomputed are kept as well.)
    simulation
        Bytes alive over the schedule, and its extra time.
    lower_bound
        Extra seconds that no schedule within the budget can go below if it runs the originals in
        this order.
    optimal
        Whether the schedule is proven to take the least extra time.
    complete
        Whether the planner finished, and was not stopped by a limit on time or a hook.
    quick
        Whether the planner may find a better plan if it is not asked for a quick one.
    """

    schedule: Schedule
    reasons: dict[int, str]
    simulation: Simulation
    lower_bound: float = 0.0
    optimal: bool = False
    complete: bool = True
    quick: bool = False


def checked(planner: object, proposal: object) -> Proposal:
    """Return the result of a planner if it is a proposal; raise an `ArgumentError` otherwise."""
    if not isinstance(proposal, Proposal):
        raise ArgumentError(
            "planner", planner, f"returned a {type(proposal).__name__}; return a Proposal"
        )
    return proposal


def untouched(graph: TrainingGraph, limits: Limits) -> Proposal:
    """Return the proposal that recomputes nothing; optimal, if there is a budget and it fits."""
    budget = -1 if limits.budget is None else limits.budget
    proposal = proposed(graph, limits, ordered(graph, limits.sums(graph)))
    if proposal.peak > budget and graph.derived(_plain_peak) < proposal.peak:
        # Sums that begin early, and ops that wait until they are due, rarely take more bytes than
        # plain training, but may.
        proposal = proposed(graph, limits, plain(graph))
    return replace(proposal, optimal=proposal.peak <= budget)


def _plain_peak(graph: TrainingGraph) -> int:
    return simulate(graph, plain(graph)).peak


@dataclass(frozen=True, eq=False)
class Trial(_Simulated):
    """The simulation of a kept set, without a schedule yet: planners try hundreds of them.

    Attributes
    ----------
    reasons, simulation
        As in `Proposal`.
    runs
        The executions of ops, in order.
    chained
        As in `Schedule`.
    """

    reasons: dict[int, str]
    simulation: Simulation
    runs: Runs
    chained: frozenset[int]

    def proposal(self, graph: TrainingGraph) -> Proposal:
        """Return the trial as a proposal, with its schedule."""
        schedule = as_schedule(graph, self.runs, self.chained)
        return Proposal(schedule, self.reasons, self.simulation)


def tried(graph: TrainingGraph, limits: Limits, reasons: Mapping[int, str]) -> Trial:
    """Return the trial that keeps the storages in ``reasons`` and in ``limits``, and recomputes the
    rest once."""
    kept = dict(limits.keep)
    kept |= {storage: why for storage, why in reasons.items() if storage not in kept}
    chained = limits.sums(graph)
    runs = runs_lazily(graph, kept.keys())
    return Trial(kept, simulate_runs(graph, runs, chained), runs, chained)


def propose(graph: TrainingGraph, limits: Limits, reasons: Mapping[int, str]) -> Proposal:
    """Return the proposal that keeps the storages in ``reasons`` and in ``limits``, and recomputes
    the rest once."""
    return tried(graph, limits, reasons).proposal(graph)


def proposed(graph: TrainingGraph, limits: Limits, schedule: Schedule) -> Proposal:
    """Return the proposal of a schedule, which keeps its checkpoints."""
    return Proposal(schedule, checkpoints(graph, limits, schedule), simulate(graph, schedule))


def checkpoints(graph: TrainingGraph, limits: Limits, schedule: Schedule) -> dict[int, str]:
    """Return the storages that a schedule keeps by choice, with reasons: those in ``limits``, and
    those that clones read and that are never recomputed."""
    producer, storage = graph.producer.tolist(), graph.storage.tolist()
    again = {step.op for step in schedule.steps if step.copy}
    read = {
        storage[v]
        for step in schedule.steps
        if step.copy and step.op not in schedule.stored
        for v in graph.reads[step.op]
        if not graph.source[storage[v]]
    }
    kept = dict(limits.keep)
    numbered = sorted(s for s in read if producer[s] not in again and s not in kept)
    return kept | {s: f"checkpoint {number}" for number, s in enumerate(numbered, 1)}
