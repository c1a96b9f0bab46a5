"""Which ops the runtime makes one of: what must be neither parted nor joined by a rewrite.

Grappler's remapper and oneDNN fuse a product, the addition behind it and an activation where nothing else reads the
values between; constant folding moves a constant factor past the op before it; equal ops become one. The results of the merged
have other last bits, so that an original and its clone must be merged alike, and nothing is put between two ops that may be.
Rules of TensorFlow 2.16 to 2.21; what is not known here costs last bits at most.
"""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from graph_tools import _tf
from memsaving_gradients.roles import CapturedStep

__all__ = ["Merging"]


class Merging:
    """What the runtime merges in a captured step.

    Parameters
    ----------
    step
        The captured training step.
    idle
        Creation indices of ops that will be pruned when the graph runs.

    Attributes
    ----------
    twin_of
        For each backward op that equals an earlier one, that one.
    """

    def __init__(self, step: CapturedStep, idle: Collection[int]) -> None:
        self._step, self._idle = step, idle
        self.twin_of = _twins(step)

    def merges(self, position: int) -> bool:
        """Whether an op may be merged with the only one that reads it.

        Backward ops that were not captured lead nowhere and are pruned; forward ones may serve anything.
        """
        readers = len(self._step.source.readers[position])
        if not self._step.graph.fuses[position] or readers > 1:
            return False
        outputs = self._step.source.ops[position].outputs
        return (
            readers + sum(self._is_elsewhere(op) for out in outputs for op in out.consumers()) < 2
        )

    def _is_elsewhere(self, op: tf.Operation) -> bool:
        index = _tf.creation_index(op)
        early = index < self._step.created and index not in self._idle
        return early and op.name not in self._step.source.position


def _twins(step: CapturedStep) -> dict[int, int]:
    """Equal backward ops: grappler makes one op of them if they stay equal."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    found = {}
    for op in range(step.graph.first_backward, step.graph.length):
        twin = first.setdefault((step.source.ops[op].type, step.source.inputs[op]), op)
        if twin != op:
            found[op] = twin
    return found
