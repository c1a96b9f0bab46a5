"""Bytes alive during a training step, and the peaks of TensorFlow's allocator that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from graph_tools.memory.bfc_allocator import (
    GROWING,
    Buffers,
    Peaks,
    allocated_peak,
    most_chunk,
    peaks_in_turn,
)
from graph_tools.memory.liveness import requested_peak

__all__ = ["CHANCE", "MANY_OPS", "STEPS", "Alive", "Part", "Timeline"]

Part = Literal["forward", "recomputed", "backward", "scratch"]

#: The share of its chunks by which a step may need more than the average step: small changes of the
#: order change which holes the buffers take. Chosen by judgement.
CHANCE = 0.05
#: In graphs of more ops, one simulation takes seconds: fewer are run, and bounds are simple ones.
#: Chosen by judgement.
MANY_OPS = 30_000
#: Steps that are simulated to see which holes the buffers take. Chosen by judgement.
STEPS = 8
#: Steps in a row among which the worst is sought, because holes change slowly. With a plan for a
#: ResNet of KerasHub, the first simulated steps all kept the budget. But 16 of 38 broke it, as did
#: most of the measured steps.
LONG = 40


@dataclass(frozen=True)
class Alive:
    """A buffer that is alive at the peak.

    Attributes
    ----------
    tensor
        The tensor that it was made for; for scratch space, an empty string.
    bytes
        Its bytes.
    part
        ``"forward"``: of the forward pass; ``"recomputed"``: of a clone; ``"backward"``: of the
        backward pass, and of the optimizer if it was simulated; ``"scratch"``: memory that a kernel
        takes in addition to its outputs, and copies of variables.
    first, last
        The first and the last op of the timeline during which it is alive.
    """

    tensor: str
    bytes: int
    part: Part
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes alive during each op of a step, in one order or several.

    Attributes
    ----------
    bytes_alive
        Bytes during each op.
    peak
        The maximum of `bytes_alive`: the simulated transient peak.
    buffers
        First op, last op and bytes of every buffer, workspace included.
    owner
        For each buffer, the value that it was made for. The buffers at the end (workspace, copies
        of variables) have none.
    other_orders
        Buffers for other orders that the ops may run in.
    persistent
        Bytes of variables, fed inputs and large constants, which exist before the step. They decide
        which holes the buffers take.
    replaces
        For `buffers` and for each of `other_orders`: the persistent buffer that each one replaces
        (-1: none).
    first_region
        Bytes of the allocator's first region (:mod:`graph_tools.memory.regions`).
    margin
        The share of its chunks by which a step may need more by chance.
    largest
        The largest buffers at the peak, by name, if they were looked up.
    """

    bytes_alive: npt.NDArray[np.int64]
    peak: int
    buffers: Buffers
    owner: list[int] = field(default_factory=list)
    other_orders: tuple[Buffers, ...] = ()
    persistent: tuple[int, ...] = ()
    replaces: tuple[npt.NDArray[np.int64], ...] = ()
    first_region: int = GROWING
    margin: float = 0.0
    largest: tuple[Alive, ...] = ()

    @property
    def at_peak(self) -> npt.NDArray[np.int64]:
        """The numbers of the buffers that are alive at the peak, for its first op."""
        born, dies, size = self.buffers
        at = int(np.argmax(self.bytes_alive)) if len(self.bytes_alive) else 0
        return np.flatnonzero((born <= at) & (dies >= at) & (size > 0))

    @property
    def least_peak(self) -> int:
        """The least peak of requested bytes over all orders: a lower bound for peaks in chunks,
        which are no smaller than the buffers in them, at a hundredth of their time."""
        return min(requested_peak(*order) for order in self._orders)

    @property
    def allocated_most(self) -> int:
        """An upper bound for peaks in chunks, as fast as `least_peak`."""
        return max(
            requested_peak(born, dies, most_chunk(size)) for born, dies, size in self._orders
        )

    @cached_property
    def allocated_least(self) -> int:
        """The least peak in chunks over all orders, if nothing was allocated before the steps."""
        return min(allocated_peak(*order, self.first_region) for order in self._orders)

    @cached_property
    def allocated_peak(self) -> int:
        """The peak in chunks of TensorFlow's allocator, which are larger than the buffers in them.

        A schedule is one order. The executor has several, and chance decides among them: a step may
        need more than this peak, by `margin`.
        """
        return self._peaks.average

    @cached_property
    def allocated_worst(self) -> int:
        """The peak in chunks in the worst of many steps.

        It is the average if all steps are equal, or if chance evens out over very many buffers.
        """
        if self._is_regular or self._is_large:
            return self._peaks.average
        return max(self._peaks.worst, self._chunks(LONG, 1).worst)

    @cached_property
    def _peaks(self) -> Peaks:
        if self._is_regular:
            peak = allocated_peak(*self.buffers, self.first_region)
            return Peaks(peak, peak)
        # One arena of each kind.
        return self._chunks(STEPS, 1 if self._is_large else 3)

    @property
    def _orders(self) -> tuple[Buffers, ...]:
        """The buffers for each order that the ops may run in."""
        return self.buffers, *self.other_orders

    @property
    def _is_regular(self) -> bool:
        """Whether there is only one order, and no persistent buffer."""
        return not (self.other_orders or self.persistent)

    @property
    def _is_large(self) -> bool:
        return len(self.buffers[0]) >= MANY_OPS

    def _chunks(self, steps: int, arenas: int) -> Peaks:
        return peaks_in_turn(
            self._orders,
            before=self.persistent,
            steps=steps,
            arenas=arenas,
            replaces=self.replaces,
            first_region=self.first_region,
        )
