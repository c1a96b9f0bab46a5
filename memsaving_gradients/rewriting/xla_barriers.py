"""Keeping XLA from computing gradients again where a run of clones begins.

XLA fuses elementwise ops into every op that reads them, even if they are computed several times for
it, and through any number of them. The gradient of a residual stream becomes, in each of its
readers, the sum of everything that was ever added to it, and all that this sum reads stays alive:
an 83-layer ResNet needs 92 MB, of which recomputation accounts for 40. Gradients that are alive
when a gate opens therefore go through an identity that XLA cannot look through
(:mod:`graph_tools.editing.opaque`).
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from graph_tools.editing import opaque
from graph_tools.editing.rewiring import Rewiring
from memsaving_gradients.capture.training_step import CapturedStep

__all__ = ["Barriers"]

#: Gradients of less than this share of the peak are left alone.
LEAST_SHARE = 1 / 64


class Barriers:
    """The state of one pass over a schedule.

    ``left``: for each value, how many reads by backward ops are to come; ``alive``: large gradients
    that were made and will be read, each with the tensor that stands for it now.
    """

    def __init__(self, step: CapturedStep, peak: int, rewiring: Rewiring) -> None:
        self.graph, self.ops, self.rewiring = step.graph, step.source, rewiring
        self.least = peak * LEAST_SHARE
        # Addends of long sums are as many as they are large; XLA adds them as they come.
        self.left = np.zeros(len(self.ops.producer), np.int64)
        for op in range(self.graph.first_backward, self.graph.length):
            if op not in self.graph.sums:
                np.add.at(self.left, list(self.graph.reads[op]), 1)
        self.alive: dict[int, tf.Tensor] = {}

    def pass_backward(self, position: int) -> None:
        """Let a backward op read what stands for its inputs; call for all of them, in order."""
        op = self.ops.ops[position]
        for k, value in enumerate(self.graph.reads[position]):
            if value not in self.alive:
                continue
            if self.alive[value] is not op.inputs[k]:
                self.rewiring.point(op, k, self.alive[value])
            if position not in self.graph.sums:
                self.left[value] -= 1
                if not self.left[value]:
                    del self.alive[value]
        for value, tensor in zip(self.graph.writes[position], op.outputs, strict=True):
            large = self.graph.size[self.graph.storage[value]] >= self.least
            if large and self.left[value] and opaque.can_pass(tensor):
                self.alive[value] = tensor

    def replace(self, value: int, tensor: tf.Tensor) -> None:
        """Let ``tensor`` stand for a value that was just made."""
        if value in self.alive:
            self.alive[value] = tensor

    def close(self, predicate: tf.Tensor) -> None:
        """Put all that is alive behind a barrier."""
        self.alive = {v: opaque.behind(t, predicate) for v, t in self.alive.items()}
