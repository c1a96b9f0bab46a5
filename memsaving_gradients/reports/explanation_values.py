"""The fields of an explanation, and what follows from them: what all reports of one read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memsaving_gradients.budget import exact_bytes, parse_budget
from memsaving_gradients.errors import BudgetError

__all__ = ["AtPeak", "Compiled", "ExplanationValues", "Layer", "Parts", "Point"]


@dataclass(frozen=True)
class Parts:
    """What takes memory when a plain training step takes most of it; bytes asked for.

    Attributes
    ----------
    parameters
        Variables that the forward pass reads or updates.
    slots
        Other variables: the optimizer's.
    gradients
        Gradients that were made and are still there.
    activations
        Forward tensors that backward ops read.
    temporaries
        Everything else: what ops pass to each other, and scratch space.
    """

    parameters: int
    slots: int
    gradients: int
    activations: int
    temporaries: int

    @property
    def transient(self) -> int:
        """What a step takes beside the variables: its transient peak, to a hundredth."""
        return self.gradients + self.activations + self.temporaries

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.slots + self.transient


@dataclass(frozen=True)
class Layer:
    """Activations of one layer.

    Attributes
    ----------
    name
        The name scope of their ops.
    bytes
        What is kept of them at the peak of plain training.
    source
        The line of the user's program that made the largest, or an empty string.
    """

    name: str
    bytes: int
    source: str


@dataclass(frozen=True)
class Point:
    """What a budget costs.

    Attributes
    ----------
    budget
        The budget to give, bytes.
    share
        The same as a fraction of what plain training takes.
    extra_time
        Estimated time of the recomputation, as a fraction of the plain step's.
    lower_bound
        No plan for this budget takes less, as far as is known.
    clones
        Number of ops that run a second time.
    simulated
        The budget in simulated bytes, where ``budget`` is in those that XLA assigns, else ``None``.
    """

    budget: int
    share: float
    extra_time: float
    lower_bound: float
    clones: int
    simulated: int | None = None


@dataclass(frozen=True)
class AtPeak:
    """A value that is alive when a compiled step takes most: its bytes, the instruction of XLA's
    that makes it, and the TensorFlow ops behind that."""

    bytes: int
    instruction: str
    op_names: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A step that XLA has compiled.

    Attributes
    ----------
    name
        What the step does, in words.
    simulated
        Its simulated peak, bytes.
    assigned
        The bytes that XLA assigns besides arguments: temporaries, and results.
    results
        Those of results.
    seconds
        How long XLA compiled.
    at_peak
        What is alive when the step takes most, largest first.
    """

    name: str
    simulated: int
    assigned: int
    results: int
    seconds: float
    at_peak: tuple[AtPeak, ...]


@dataclass(frozen=True, repr=False)
class ExplanationValues:
    """What a `memsaving_gradients.Explanation` consists of; that class documents the fields."""

    parts: Parts
    allocated_plain: int
    layers: tuple[Layer, ...]
    curve: tuple[Point, ...]
    seconds: float
    computations: int = 1
    assumed_batch: int | None = None
    assumed_steps: int | None = None
    assumed_rows: int | None = None
    sums: int = 0
    xla: bool = False
    compiled: tuple[Compiled, ...] = ()

    @property
    def least(self) -> Point:
        """The least budget that a plan was found for."""
        return self.curve[-1]

    def at(self, budget: Any) -> Point:
        """The fastest point known within a budget, which is given as in
        `memsaving_gradients.gradients`.

        Raises
        ------
        BudgetError
            If it is below the least.
        """
        limit = parse_budget(budget)
        if limit == 1.0 and isinstance(limit, float):
            return self.curve[0]
        if isinstance(limit, float):
            limit = int(limit * self.allocated_plain)
        fits = [point for point in self.curve if point.budget <= limit]
        if not fits:
            raise BudgetError(
                "budget",
                budget,
                "no plan that fits was found; the least budget is"
                f" {exact_bytes(self.least.budget)}, {self.least.share:g} of plain training",
                limit,
                self.least.budget,
                self.least.share,
            )
        return min(fits, key=lambda point: (point.extra_time, point.budget))
