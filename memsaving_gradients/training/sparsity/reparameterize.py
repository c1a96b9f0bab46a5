"""The callback that moves sparse weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from memsaving_gradients.budget import is_integer
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.arguments import real, seed_of
from memsaving_gradients.training.sparsity.model import sparse_model_in
from memsaving_gradients.training.sparsity.rewiring import rewired
from memsaving_gradients.training.sparsity.slots import first_values, optimizers_of, slots_of

__all__ = ["Reparameterize"]

#: Fact: the schedule of Mostafa & Wang for WideResNet-28-2, in 200 epochs: shares of training, with
#: the steps between moves from there on, and the share at which moves end.
SCHEDULE, UNTIL = ((0.0, 100), (25 / 200, 200), (80 / 200, 400), (140 / 200, 800)), 190 / 200
#: Fact: in the same work, 20,000 of 1,467,610 dense weights move at a time: at first, weights below
#: this threshold.
MOVED, THRESHOLD = 20_000 / 1_467_610, 1e-3


class Reparameterize(keras.callbacks.Callback):
    """A callback of ``fit`` that moves a sparse model's smallest weights, and their slots, at
    intervals.

    The model may be sparse itself, or have a sparse model as a part. Slots of all optimizers that
    are its attributes move along; slots of new weights get the optimizer's initial values.

    Parameters
    ----------
    schedule
        ``(share, steps)`` pairs: from that share of training on, weights move every ``steps``
        steps. If Keras does not know the length of an epoch, the first epoch does not count before
        it ends.
    until
        The share of training after which weights stay.
    moved
        How many weights should move at a time, as a share of the places.
    threshold
        The absolute value below which weights move, at first; it adapts.
    seed
        The seed of the new places.

    Raises
    ------
    ArgumentError
        If an argument cannot be used; when training begins, if the model is not sparse, or its
        sparse weights are frozen.

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
        share = "give a share, above 0 and at most 1"
        self.schedule = _checked(schedule)
        self.until = real("until", until, lambda s: 0 < s <= 1, share)
        self.moved = real("moved", moved, lambda s: 0 < s <= 1, share)
        self.threshold = real(
            "threshold", threshold, lambda t: 0 < t < math.inf, "give a positive number"
        )
        #: How often weights have moved.
        self.rewirings = 0
        self._draw = np.random.default_rng(seed_of(seed))
        self._epoch = self._since = self._length = 0
        self._last = -1
        self._first: dict[int, list[float]] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise if the model has no sparse weights, or they are frozen."""
        if not sparse_model_in(self.model).store.values.trainable:
            raise ArgumentError(
                "model",
                self.model.name,
                "its sparse weights are frozen, but Reparameterize would move them; leave it out",
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note how far training is."""
        self._epoch, self._last = epoch, -1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note how long an epoch is."""
        self._length = self._last + 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Move weights if it is time."""
        self._since += batch - self._last
        self._last = batch
        done = self._done(batch + 1)
        period = [steps for share, steps in self.schedule if share <= done]
        if done <= self.until and period and self._since >= period[-1]:
            self._since = 0
            self.rewire()

    def _done(self, steps: int) -> float:
        """Return the share of training that is done after ``steps`` steps of an epoch."""
        params = self.params or {}
        length = params.get("steps") or self._length
        part = min(1.0, steps / length) if length else 0.0
        return (self._epoch + part) / (params.get("epochs") or 1)

    def rewire(self) -> None:
        """Move weights now."""
        store = sparse_model_in(self.model).store
        optimizers = optimizers_of(self.model)
        if not optimizers:
            raise ArgumentError(
                "model",
                self.model.name,
                "has no optimizer, whose slots must move with the weights; compile it first",
            )
        masks = store.masks()
        wanted = round(self.moved * sum(map(len, masks)))
        values = store.values.numpy().astype(np.float32)
        now = rewired(masks, values, self.threshold, wanted, self._draw)
        self.threshold = now.threshold
        new = now.sources < 0
        firsts = [(store.values, 0.0)]
        for optimizer in optimizers:
            slots = slots_of(optimizer, store.values)
            if id(optimizer) not in self._first or len(self._first[id(optimizer)]) != len(slots):
                self._first[id(optimizer)] = first_values(optimizer, store.values)
            firsts += zip(slots, self._first[id(optimizer)], strict=True)
        for variable, first in firsts:
            moved = variable.numpy()[now.sources]
            moved[new] = first
            variable.assign(moved)
        store.set_masks(now.masks)
        self.rewirings += 1


def _checked(schedule: Any) -> tuple[tuple[float, int], ...]:
    way_out = (
        "give pairs of a share of training from 0 to 1, ascending, and a whole number of steps, 1"
        " or more: [(0, 100), (0.5, 200)]"
    )
    pairs = [*schedule] if isinstance(schedule, list | tuple) else []
    if not pairs:
        raise ArgumentError("schedule", schedule, way_out)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not is_integer(pair[1], 1):
            raise ArgumentError("schedule", schedule, way_out)
        real("schedule", pair[0], lambda share: 0 <= share <= 1, way_out)
    begins = [float(share) for share, _ in pairs]
    if begins != sorted(begins):
        raise ArgumentError("schedule", schedule, way_out)
    return tuple(zip(begins, (int(steps) for _, steps in pairs), strict=True))
