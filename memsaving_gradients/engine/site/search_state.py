"""The state of the search for a plan: its step, its goal, and the plans tried so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from memsaving_gradients.budget import Goal
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.planners.budget_search import Search
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["SearchState"]


@dataclass(frozen=True, eq=False)
class SearchState:
    """The search for a plan for one gradient computation: its step, its goal, its state.

    Attributes
    ----------
    step
        The step that plans are made for; its masks may be packed.
    unpacked
        The step as TensorFlow built it.
    before
        The simulation of plain training.
    goal
        The budget, or ``None``.
    search
        The search, with the plans tried so far. ``None``: plain training meets the budget, or (in
        ``other``) the search has not begun.
    other
        Under a budget, the search with packing switched: one of its plans may be better.
    estimate
        The number of the estimate of the rest of the step in ``step``, as `Site.estimate`.
    searched
        For each estimate that was in use before, its step and its search.
    """

    step: CapturedStep
    unpacked: CapturedStep
    before: Simulation
    goal: Goal | None
    search: Search | None
    other: SearchState | None = None
    estimate: int = 0
    searched: dict[int, tuple[CapturedStep, Search | None]] = field(default_factory=dict)
