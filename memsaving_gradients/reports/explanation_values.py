"""The fields of an explanation and the values derived from them, which all its reports read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memsaving_gradients.budget import exact_bytes, parse_budget
from memsaving_gradients.errors import BudgetError

__all__ = ["AtPeak", "Compiled", "ExplanationValues", "Layer", "Parts", "Point"]


@dataclass(frozen=True)
class Parts:
    """The parts of memory at the peak of a plain training step, in bytes asked for.

    Attributes
    ----------
    parameters
        Variables that the forward pass reads or updates.
    slots
        Other variables: the optimizer's.
    gradients
        Gradients that were computed and are still alive.
    activations
        Forward tensors that backward ops read.
    temporaries
        Everything else: tensors passed from op to op, and scratch space.
    """

    parameters: int
    slots: int
    gradients: int
    activations: int
    temporaries: int

    @property
    def transient(self) -> int:
        """Bytes of the step without the variables: its transient peak, within 1 %."""
        return self.gradients + self.activations + self.temporaries

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.parameters + self.slots + self.transient


@dataclass(frozen=True)
class Layer:
    """The activations of one layer.

    Attributes
    ----------
    name
        The name scope of their ops.
    bytes
        Their bytes at the peak of plain training.
    source
        The line of the user's program that made the largest, ``"imported"``, or empty.
    """

    name: str
    bytes: int
    source: str


@dataclass(frozen=True)
class Point:
    """A budget and its extra time.

    Attributes
    ----------
    budget
        The budget to give, bytes.
    share
        The budget as a fraction of the bytes of plain training.
    extra_time
        Estimated extra time, as a fraction of the plain step's time.
    lower_bound
        Extra time that no plan for this budget can go below, as far as is known.
    clones
        Number of ops that run a second time.
    simulated
        The budget in simulated bytes, if ``budget`` is in bytes that XLA assigns; else ``None``.
    """

    budget: int
    share: float
    extra_time: float
    lower_bound: float
    clones: int
    simulated: int | None = None


@dataclass(frozen=True)
class AtPeak:
    """A value that is alive at the peak of a compiled step: its bytes, the XLA instruction that
    makes it, and the TensorFlow ops behind that instruction."""

    bytes: int
    instruction: str
    op_names: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """A step that XLA has compiled.

    Attributes
    ----------
    name
        The name of the step, such as ``"plain training"``.
    simulated
        Its simulated peak, bytes.
    assigned
        The bytes that XLA assigns to temporaries and results, without arguments.
    results
        The bytes of results among them.
    seconds
        The seconds that XLA took to compile the step.
    at_peak
        The values alive at the peak, largest first.
    """

    name: str
    simulated: int
    assigned: int
    results: int
    seconds: float
    at_peak: tuple[AtPeak, ...]


@dataclass(frozen=True, repr=False)
class ExplanationValues:
    """The fields of a `memsaving_gradients.Explanation`, which documents them."""

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
        """The point of the least budget that a plan was found for."""
        return self.curve[-1]

    def at(self, budget: Any) -> Point:
        """Return the fastest known point within a budget, given as in
        `memsaving_gradients.gradients`.

        Raises
        ------
        BudgetError
            If the budget is below the least.
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
