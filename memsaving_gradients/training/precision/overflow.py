"""Counts of steps that loss scaling skipped because a gradient was too large for 16 bits.

The scale grows until a gradient overflows, which skips about one step in two thousand. Many skipped
steps mean that the loss, or the learning rate, is too high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients._keras import applied_steps
from memsaving_gradients.errors import OverflowWarning

__all__ = ["Skipped"]

#: Fact: Keras' scale begins at 2¹⁵, and is 1 or less after this many skipped steps.
FEW = 16


class Skipped:
    """A counter of the steps that an optimizer skips in an epoch.

    The graph counts all steps and all applied steps: callbacks do not learn how many steps Keras
    runs at a time, nor how many are left for the last time.
    """

    def __init__(self, optimizer: Any) -> None:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self.optimizer: Any = optimizer if scales else None
        self.steps: Any = None
        if scales:
            self.steps = keras.Variable(
                0, dtype="int64", trainable=False, aggregation="only_first_replica", name="steps"
            )
            self.restart()

    def counting(self, train_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``train_step`` with a count of its runs, if losses are scaled."""

        def counted(data: Any) -> Any:
            logs = train_step(data)
            # Before Keras 3.7, steps that are run together may find no data left. Such a step is
            # not counted.
            there = filter(tf.is_tensor, tf.nest.flatten(data, expand_composites=True))
            with tf.control_dependencies([*there]):
                self.steps.assign_add(1)
            return logs

        return train_step if self.optimizer is None else counted

    def restart(self) -> None:
        """Begin an epoch."""
        if self.optimizer is not None:
            self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        # Not `iterations`: Keras divides them by the number of accumulation steps.
        applied = applied_steps(self.optimizer.inner_optimizer)
        # Before 3.5, ``int`` does not take Keras' variables.
        return int(self.steps.numpy()), int(applied.numpy())

    def report(self) -> dict[str, float]:
        """Return an epoch's entries for the logs, and warn of many skipped steps; empty, unless
        losses are scaled and the optimizer is built."""
        if self.optimizer is None or not self.optimizer.built:
            return {}
        now, before = self._counts(), self._before
        steps, applied = now[0] - before[0], now[1] - before[1]
        skipped = steps - applied
        scale = float(self.optimizer.dynamic_scale.numpy())
        if skipped > FEW and skipped >= applied:
            warn(
                f"{skipped} of {steps} steps were skipped, because gradients were not finite at a"
                f" loss scale that has fallen to {scale:g}: lower the learning rate or"
                " initial_scale, look for numbers that are not finite in the data, or use"
                " bfloat16, which has the range of float32.",
                OverflowWarning,
            )
        return {"skipped_steps": skipped, "loss_scale": scale}
