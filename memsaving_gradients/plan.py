"""What was done to one gradient computation, as a value: which tensors stay, which are recomputed, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from graph_tools.allocator import allocated_peak
from memsaving_gradients.schedule import Simulation

__all__ = ["Decision", "Plan"]

Fate = Literal["keep", "recompute", "offload", "encode"]

#: Lines of the printed table.
MOST_LINES = 20


@dataclass(frozen=True)
class Decision:
    """The fate of one residual, or of a tensor that is kept to recompute residuals from.

    Attributes
    ----------
    tensor
        Name of the tensor.
    bytes
        Bytes of its buffer.
    fate
        What the plan does with it.
    reason
        Why, in a phrase.
    op_type
        Type of the op that makes it.
    source
        The line of the user's program that made it (``file:line``), or an empty string.
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


@dataclass(frozen=True)
class Plan:
    """The plan behind one gradient computation.

    Attributes
    ----------
    mode
        ``"memory"``, ``"speed"``, ``"collection"`` or ``"named"``.
    decisions
        One for each residual, and each tensor kept to recompute from, that is large enough to matter, in order of
        creation.
    peak_plain, peak
        Simulated transient peak of plain training and of this plan, bytes.
    extra_time
        Estimated time of the recomputation, as a fraction of the plain step's.
    clones
        Number of ops that run a second time.
    checkpoints
        Tensors kept to recompute from, in order of creation (a subset of what stays).
    gating
        ``"control"`` or ``"data"`` (XLA).
    simulation_plain, simulation
        The simulations behind these figures: bytes alive at every op, lives of all buffers.
    """

    mode: str
    decisions: tuple[Decision, ...]
    peak_plain: int
    peak: int
    extra_time: float
    clones: int
    checkpoints: tuple[str, ...]
    gating: str
    simulation_plain: Simulation = field(repr=False, compare=False)
    simulation: Simulation = field(repr=False, compare=False)

    @property
    def timeline_plain(self) -> npt.NDArray[np.int64]:
        """Simulated bytes alive at every op of plain training."""
        return self.simulation_plain.bytes_alive

    @property
    def timeline(self) -> npt.NDArray[np.int64]:
        """Simulated bytes alive at every op with this plan, clones included."""
        return self.simulation.bytes_alive

    @property
    def allocated_plain(self) -> int:
        """``peak_plain`` as TensorFlow's BFC allocator counts it: in chunks, larger than the buffers in them.

        XLA takes one buffer for a whole program.
        """
        return self._allocated(self.simulation_plain)

    @property
    def allocated(self) -> int:
        """``peak`` as TensorFlow's BFC allocator counts it."""
        return self._allocated(self.simulation)

    def _allocated(self, simulation: Simulation) -> int:
        if self.gating == "control":
            return simulation.allocated_peak
        return allocated_peak(
            np.zeros(1, np.int64), np.ones(1, np.int64), np.array([simulation.peak])
        )

    @property
    def kept(self) -> tuple[Decision, ...]:
        """Residuals that stay."""
        return tuple(d for d in self.decisions if d.fate == "keep")

    @property
    def recomputed(self) -> tuple[Decision, ...]:
        """Residuals that are computed again."""
        return tuple(d for d in self.decisions if d.fate == "recompute")

    def __str__(self) -> str:
        kept, again = self.kept, self.recomputed
        lines = [
            f"plan {self.mode!r}: simulated peak {self.peak:,} bytes, plain {self.peak_plain:,} "
            f"({self.peak / max(self.peak_plain, 1):.0%}), extra time about {self.extra_time:.0%}, "
            f"{self.clones:,} ops run again",
            f"kept {len(kept)} residuals of {sum(d.bytes for d in kept):,} bytes, "
            f"recomputed {len(again)} of {sum(d.bytes for d in again):,}",
            f"{'bytes':>14}  {'fate':<9}  {'tensor':<48}  {'reason':<22}  source",
        ]
        largest = sorted(self.decisions, key=lambda d: (-d.bytes, d.tensor))
        lines += [
            f"{d.bytes:>14,}  {d.fate:<9}  {_shorten(d.tensor, 48):<48}  {d.reason:<22}  {d.source}"
            for d in largest[:MOST_LINES]
        ]
        if len(largest) > MOST_LINES:
            lines.append(
                f"{'':>14}  … and {len(largest) - MOST_LINES} smaller ones (plan.decisions)"
            )
        return "\n".join(lines)


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
