"""Steps that loss scaling skipped, because a gradient was too large for 16 bits.

A scale that grows until something overflows makes one such step in two thousand; many of them mean that the loss, or the learning rate, is too high.
"""

from __future__ import annotations

from typing import Any

import keras

from graph_tools.warn import warn
from memsaving_gradients.errors import OverflowWarning

__all__ = ["Skipped"]

#: From this share of skipped steps on, something is wrong; unless there are so few that the scale may just be coming down to where it belongs.
MANY, FEW = 0.5, 16


class Skipped:
    """Counts the steps of an epoch that an optimizer has skipped."""

    def __init__(self, optimizer: Any) -> None:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.optimizer = optimizer if scales else None
        self.restart()

    def restart(self) -> None:
        """Begin an epoch."""
        self._before = self._applied()

    def _applied(self) -> int:
        return 0 if self.optimizer is None else int(self.optimizer.iterations)

    def report(self, steps: int) -> dict[str, float]:
        """What an epoch of ``steps`` adds to the logs: nothing, unless losses are scaled."""
        if self.optimizer is None:
            return {}
        skipped = steps - (self._applied() - self._before)
        scale = float(self.optimizer.dynamic_scale)
        if skipped > FEW and skipped >= MANY * steps:
            warn(
                f"{skipped} of {steps} steps were skipped, as gradients were not finite at a loss scale that has come down to {scale:g}: "
                "lower the learning rate or initial_scale, look for numbers that are not finite in the data, or take bfloat16, whose range is "
                "that of float32.",
                OverflowWarning,
            )
        return {"skipped_steps": skipped, "loss_scale": scale}
