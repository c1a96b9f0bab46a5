"""What goes into a planner beside the graph, and what comes out.

A planner never raises because a budget is too small: it returns the plan with the least peak that
it knows, and whoever asked compares. Bytes are those asked for; what an allocator makes of them is
a layer above.
"""

from __future__ import annotations

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
    "QUARTERS",
    "ROUNDING",
    "SLACK",
    "SMALLER",
    "Interrupted",
    "Limits",
    "Proposal",
    "Trial",
    "Trials",
    "checked",
    "propose",
    "proposed",
    "tried",
    "untouched",
]


#: Fact: sums of the same seconds in another order may differ by this share: some hundred thousand
#: roundings of 1e-16 each, and room for more.
ROUNDING = 1e-9
#: Shares that are tried where any may be best: of values that are offloaded where they may be
#: encoded as well; of a stage's bytes that are kept.
QUARTERS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: Where a search goes on with less, it has this share of what it had. Chosen by judgement.
SMALLER = 0.95
#: What a planner may simulate to better a plan step by step, in executions of ops or of events; in
#: large graphs that is less often. Chosen by judgement.
MOST_STEPS = 1_500_000
#: A share of the budget, or of a step's time, for which nothing is planned anew. Chosen by
#: judgement.
SLACK = 0.005


class Trials(NamedTuple):
    """How many plans a planner may simulate: as many as fit into so many executions of ops, within
    bounds."""

    executions: int
    fewest: int
    most: int

    def affordable(self, graph: TrainingGraph) -> int:
        """How many fit if each runs every op twice."""
        return self.executions // (2 * graph.length + 1)

    def of(self, graph: TrainingGraph) -> int:
        """How many there are for a graph."""
        return min(max(self.affordable(graph), self.fewest), self.most)


class Interrupted(Exception):
    """Raised by a progress hook: planning shall end with the best plan so far."""


@dataclass(frozen=True)
class Limits:
    """What a plan has to respect.

    Attributes
    ----------
    keep
        Storages that must be kept, whatever else is, and for each the reason to give.
    budget
        The most bytes of the simulated peak; the least extra time within it is wanted. ``None``:
        the planner's own aim.
    accumulate
        Whether sums of many addends may be added up as the addends come.
    seconds
        The most time to plan, about; ``None``: as long as it takes (the same plan in every
        process).
    progress
        Called now and then with the share of the work that is done, 0 to 1, and a word on what is
        going on. It may raise `Interrupted`: the best plan so far is returned then.
    mirror
        For storages, how many times they may be recomputed: 0 keeps one, more than 1 recomputes it
        recursively (`memsaving_gradients.planners.chains.mirror_counts`). Planners that cannot
        follow counts ignore them.
    host
        The most bytes that may be offloaded; ``None``: any.
    early
        How many times as long as it takes a transfer back begins before it must be there; 0: all
        transfers are synchronous.
    quick
        Whether any plan within the budget is good enough, since others are going to be asked for.
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
        """The sums that are added up as their addends come."""
        return frozenset(graph.sums if self.accumulate else ())


class _Simulated:
    """What is asked of a plan by way of its simulation."""

    simulation: Simulation

    @property
    def peak(self) -> int:
        """Simulated transient peak, bytes."""
        return self.simulation.peak

    @property
    def allocated(self) -> int:
        """The peak in chunks of TensorFlow's allocator, bytes; ten times as dear to know as
        `peak`."""
        return self.simulation.allocated_peak

    @property
    def extra_seconds(self) -> float:
        """Estimated time of the clones."""
        return self.simulation.extra_seconds


@dataclass(frozen=True)
class Proposal(_Simulated):
    """A schedule and what is known of it.

    Attributes
    ----------
    schedule
        The order of execution, clones included.
    reasons
        For each storage that is kept by choice, why: a short phrase. (What cannot be recomputed is
        kept besides.)
    simulation
        Bytes alive over that schedule, and the time of its clones.
    lower_bound
        No schedule that runs the originals in this order within the budget takes less extra time,
        seconds.
    optimal
        Whether this one is proven to take the least.
    complete
        Whether the planner came to its end, and was not stopped by a limit on time.
    quick
        Whether the planner may find a better one where no quick plan is asked for.
    """

    schedule: Schedule
    reasons: dict[int, str]
    simulation: Simulation
    lower_bound: float = 0.0
    optimal: bool = False
    complete: bool = True
    quick: bool = False


def checked(planner: object, proposal: object) -> Proposal:
    """Return what a planner returned, if it is a proposal; raise an `ArgumentError` otherwise."""
    if not isinstance(proposal, Proposal):
        raise ArgumentError(
            "planner", planner, f"returned a {type(proposal).__name__}; return a Proposal"
        )
    return proposal


def untouched(graph: TrainingGraph, limits: Limits) -> Proposal:
    """The proposal that runs nothing again; optimal, if there is a budget and it fits."""
    budget = -1 if limits.budget is None else limits.budget
    proposal = proposed(graph, limits, ordered(graph, limits.sums(graph)))
    if proposal.peak > budget and graph.derived(_plain_peak) < proposal.peak:
        # Sums that are begun early, and ops that wait until they are due, rarely take more than
        # plain training, but may.
        proposal = proposed(graph, limits, plain(graph))
    return replace(proposal, optimal=proposal.peak <= budget)


def _plain_peak(graph: TrainingGraph) -> int:
    return simulate(graph, plain(graph)).peak


@dataclass(frozen=True, eq=False)
class Trial(_Simulated):
    """What becomes of a kept set, without a schedule as yet: planners try hundreds of them.

    Attributes
    ----------
    reasons, simulation
        As in `Proposal`.
    runs
        What runs when.
    chained
        As in `Schedule`.
    """

    reasons: dict[int, str]
    simulation: Simulation
    runs: Runs
    chained: frozenset[int]

    def proposal(self, graph: TrainingGraph) -> Proposal:
        """The same as a proposal."""
        schedule = as_schedule(graph, self.runs, self.chained)
        return Proposal(schedule, self.reasons, self.simulation)


def tried(graph: TrainingGraph, limits: Limits, reasons: Mapping[int, str]) -> Trial:
    """What comes of keeping the storages in ``reasons`` and in ``limits``, and recomputing the rest
    once."""
    kept = dict(limits.keep)
    kept |= {storage: why for storage, why in reasons.items() if storage not in kept}
    chained = limits.sums(graph)
    runs = runs_lazily(graph, kept.keys())
    return Trial(kept, simulate_runs(graph, runs, chained), runs, chained)


def propose(graph: TrainingGraph, limits: Limits, reasons: Mapping[int, str]) -> Proposal:
    """The proposal that keeps the storages in ``reasons`` and in ``limits``, and recomputes the
    rest once."""
    return tried(graph, limits, reasons).proposal(graph)


def proposed(graph: TrainingGraph, limits: Limits, schedule: Schedule) -> Proposal:
    """The proposal of a schedule: what is read by clones and never recomputed is kept, as a
    checkpoint."""
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
    kept |= {s: f"checkpoint {number}" for number, s in enumerate(numbered, 1)}
    return Proposal(schedule, kept, simulate(graph, schedule))
