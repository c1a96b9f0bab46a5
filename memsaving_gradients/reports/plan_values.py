"""The fields of a plan and the values derived from them, which all its reports read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from graph_tools.memory.timeline import Alive
from memsaving_gradients.budget import chunk_bytes, plain_bytes
from memsaving_gradients.capture.fingerprint import Fingerprint
from memsaving_gradients.errors import PlanError
from memsaving_gradients.schedules.schedule import Schedule
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.transforms.loops.checkpoint_positions import Replayed

__all__ = ["Decision", "Fate", "PlanValues"]

Fate = Literal["keep", "recompute", "offload", "encode"]


@dataclass(frozen=True)
class Decision:
    """The fate of one residual, or of a tensor kept to recompute residuals from.

    Attributes
    ----------
    tensor
        Name of the tensor.
    bytes
        Bytes of its buffer.
    fate
        The decision: keep, recompute, offload or encode.
    reason
        The reason, in a phrase.
    op_type
        Type of the op that makes it.
    source
        The line of the user's program that made it (``file:line``), ``"imported"``, or empty.
    """

    tensor: str
    bytes: int
    fate: Fate
    reason: str
    op_type: str
    source: str

    @property
    def layer(self) -> str:
        """The name scope of the tensor: the layer, in a Keras model."""
        scope, _, _ = self.tensor.rpartition("/")
        return scope


@dataclass(frozen=True, repr=False)
class PlanValues:
    """The fields of a `memsaving_gradients.Plan`, which documents them."""

    mode: str
    decisions: tuple[Decision, ...]
    peak_plain: int
    peak: int
    extra_time: float
    clones: int
    checkpoints: tuple[str, ...]
    gating: str
    planner: str = ""
    budget: int | None = None
    planned_for: int | None = None
    lower_bound: float = 0.0
    optimal: bool = False
    complete: bool = True
    packed: bool = False
    loops: str = ""
    replayed: tuple[Replayed, ...] = field(default=(), compare=False)
    attention: tuple[str, ...] = ()
    attention_kept: tuple[tuple[str, str], ...] = ()
    schedule: Schedule | None = field(default=None, compare=False)
    reasons: Mapping[int, str] = field(default_factory=dict, compare=False)
    fingerprint: Fingerprint | None = None
    simulation_plain: Simulation | None = field(default=None, compare=False)
    simulation: Simulation | None = field(default=None, compare=False)
    activations_plain: int = 0
    activations: int = 0
    chunks: tuple[int, int] | None = field(default=None, compare=False)
    whole_step: int | None = field(default=None, compare=False)
    assigned: bool = field(default=False, compare=False)
    assumed_batch: int | None = None
    assumed_steps: int | None = None
    assumed_rows: int | None = None
    file: str = field(default="", compare=False)

    @property
    def allocated_plain(self) -> int:
        """Bytes that plain training takes in the chunks of TensorFlow's BFC allocator; budgets
        given as fractions are fractions of it.

        Chunks are larger than their buffers, and chance decides by how much: this is the least. A
        real step may take a few percent more. XLA takes one buffer for a whole program.
        """
        if self.chunks is not None:
            return self.chunks[0]
        return plain_bytes(_simulated(self, self.simulation_plain), self.gating)

    @property
    def allocated(self) -> int:
        """Bytes that this plan takes in the allocator's chunks, on average; a plan for a budget
        leaves a margin for chance above them."""
        if self.chunks is not None:
            return self.chunks[1]
        return chunk_bytes(_simulated(self, self.simulation), self.gating)

    @property
    def slack(self) -> int | None:
        """Bytes of the budget that are left, or ``None`` without a budget."""
        return None if self.budget is None else self.budget - self.allocated

    @property
    def gap(self) -> float:
        """Extra time above the lower bound, as a fraction of the plain step's time: the most that a
        better plan could save."""
        return max(0.0, self.extra_time - self.lower_bound)

    @property
    def timeline_plain(self) -> npt.NDArray[np.int64]:
        """Simulated bytes alive at every op of plain training."""
        return _simulated(self, self.simulation_plain).bytes_alive

    @property
    def timeline(self) -> npt.NDArray[np.int64]:
        """Simulated bytes alive at every op with this plan, clones included."""
        return _simulated(self, self.simulation).bytes_alive

    @property
    def at_peak(self) -> tuple[Alive, ...]:
        """The largest buffers, at most two dozen, that are alive at the peak of a step with this
        plan; largest first."""
        return _simulated(self, self.simulation).largest

    @property
    def kept(self) -> tuple[Decision, ...]:
        """Decisions to keep a tensor."""
        return tuple(d for d in self.decisions if d.fate == "keep")

    @property
    def recomputed(self) -> tuple[Decision, ...]:
        """Decisions to recompute a tensor."""
        return tuple(d for d in self.decisions if d.fate == "recompute")

    @property
    def stored(self) -> tuple[Decision, ...]:
        """Decisions to encode or offload a tensor."""
        return tuple(d for d in self.decisions if d.fate in ("encode", "offload"))


def _simulated(plan: PlanValues, simulation: Simulation | None) -> Simulation:
    if simulation is None:
        raise PlanError(
            "plan",
            plan.file or plan.planner or plan.mode,
            "was read from a file, which has no timelines; apply it (gradients(..., plan=...)) and"
            " take the applied plan from memsaving_gradients.plans",
        )
    return simulation
