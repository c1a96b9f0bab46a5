"""The callback that moves weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.sparsity.held import slots_of
from memsaving_gradients.sparsity.model import SparseModel
from memsaving_gradients.sparsity.rewiring import rewired

__all__ = ["Reparameterize"]

#: Of Mostafa & Wang for WideResNet-28-2, in 200 epochs: from which share of training on weights move every so many steps, and when they stop.
SCHEDULE, UNTIL = ((0.0, 100), (25 / 200, 200), (80 / 200, 400), (140 / 200, 800)), 190 / 200
#: 20,000 of 1,467,610 dense weights move at a time.
MOVED, THRESHOLD = 20_000 / 1_467_610, 1e-3


class Reparameterize(keras.callbacks.Callback):
    """Move a sparse model's smallest weights every so many steps, with their slots; as a callback of ``fit``.

    Parameters
    ----------
    schedule
        ``(share, steps)`` pairs: from that share of training on, weights move every so many steps.
    until
        The share of training after which they stay.
    moved
        How many should move at a time, as a share of the places.
    threshold
        The absolute value below which they do, to begin with; it adapts.
    seed
        Of the new places.

    Raises
    ------
    ArgumentError
        If an argument cannot be used; when training begins, if the model is not sparse.

    Examples
    --------
    >>> import keras, numpy as np
    >>> import memsaving_gradients as ms
    >>> model = keras.Sequential([keras.Input([16]), keras.layers.Dense(8), keras.layers.Dense(8)])
    >>> model = ms.keras.sparsify(model, 0.5)
    >>> model.compile("adam", "mse")
    >>> before = model.store.masks()
    >>> moving = ms.keras.Reparameterize([(0, 2)], moved=0.1, threshold=0.1)
    >>> _ = model.fit(np.ones([32, 16]), np.ones([32, 8]), 8, 4, verbose=0, callbacks=[moving])
    >>> moving.rewirings, all((a == b).all() for a, b in zip(before, model.store.masks()))
    (7, False)
    """

    def __init__(
        self,
        schedule: Sequence[tuple[float, int]] = SCHEDULE,
        *,
        until: float = UNTIL,
        moved: float = MOVED,
        threshold: float = THRESHOLD,
        seed: int = 0,
    ) -> None:
        super().__init__()
        begins = [share for share, _ in schedule]
        if not schedule or begins != sorted(begins) or any(steps < 1 for _, steps in schedule):
            raise ArgumentError(
                "schedule",
                schedule,
                "give pairs of a share of training, ascending, and a number of steps from 1 on",
            )
        for name, value in (("until", until), ("moved", moved)):
            if not 0 < value <= 1:
                raise ArgumentError(name, value, "give a share, above 0 and at most 1")
        if not threshold > 0:
            raise ArgumentError("threshold", threshold, "give a positive number")
        self.schedule, self.until = tuple(schedule), until
        self.moved, self.threshold = moved, threshold
        #: How often weights have moved.
        self.rewirings = 0
        self._draw = np.random.default_rng(seed)
        self._epoch = self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the model."""
        if not isinstance(self.model, SparseModel):
            raise ArgumentError(
                "model", self.model.name, "is not sparse; train what sparsify returns"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note how far training is."""
        self._epoch, self._last = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Move weights if it is time."""
        params = self.params or {}
        self._since += batch - self._last
        self._last = batch
        done = (self._epoch + (batch + 1) / (params.get("steps") or batch + 1)) / (
            params.get("epochs") or 1
        )
        period = [steps for share, steps in self.schedule if share <= done]
        if done <= self.until and period and self._since >= period[-1]:
            self._since = 0
            self.rewire()

    def rewire(self) -> None:
        """Move weights now."""
        store = self.model.store
        masks = store.masks()
        wanted = round(self.moved * sum(map(len, masks)))
        values = store.values.numpy().astype(np.float32)
        now = rewired(masks, values, self.threshold, wanted, self._draw)
        self.threshold = now.threshold
        new = now.sources < 0
        for variable in (store.values, *slots_of(self.model.optimizer, store.values)):
            moved = variable.numpy()[now.sources]
            moved[new] = 0
            variable.assign(moved)
        store.set_masks(now.masks)
        self.rewirings += 1
