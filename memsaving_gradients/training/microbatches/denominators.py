"""Weights of microbatches for losses that are not means over the examples.

A microbatch counts by its share of the examples, which is right for means over them. Keras' losses
may also be sums, means over the unmasked part of padded sequences, or means over sample weights.
For such means, the weight of a microbatch must be the denominator of its own mean, so that

    (w1 mean1 + w2 mean2 + …) / (w1 + w2 + …)

is the mean of the batch, and penalties of weights, which are the same in all microbatches, do not
change. This is done if the loss of a compiled model is the only loss. If there are several losses
with masks or weights of their own, or the user's function computes the loss itself, there is a
warning instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients.errors import BatchStatisticsWarning

__all__ = ["Losses", "compiled_loss", "losses_in"]

_compiled: ContextVar[bool] = ContextVar("memsaving_gradients_compiled_loss", default=False)


@dataclass(eq=False)
class Losses:
    """The losses that were computed in a microbatch.

    Attributes
    ----------
    compiled
        For each, whether it is the loss of a compiled model.
    weighted
        Name and denominator of each loss that is a mean over a mask or sample weights.
    """

    compiled: list[bool] = field(default_factory=list)
    weighted: list[tuple[str, tf.Tensor]] = field(default_factory=list)

    def counts(self) -> tf.Tensor | None:
        """Return the weight of the microbatch; ``None``: its share of the examples. Warn if neither
        is right."""
        if not self.weighted:
            return None
        if self.compiled == [True]:
            return self.weighted[0][1]
        names = ", ".join(dict.fromkeys(repr(name) for name, _ in self.weighted))
        warn(
            f"microbatch: {names} are means weighted by a mask or sample weights, and the sum of"
            " these weights differs between microbatches, so that gradients are not those of the"
            " whole batch. Compute sums (reduction='sum', reduce='sum') and divide them by the sum"
            " of the weights of the whole batch, or train a compiled model with a single loss, for"
            " which each microbatch counts by its sum of weights.",
            BatchStatisticsWarning,
        )
        return None


@contextmanager
def compiled_loss() -> Iterator[None]:
    """Mark losses that are computed inside as losses of a compiled model."""
    token = _compiled.set(True)
    try:
        yield
    finally:
        _compiled.reset(token)


@contextmanager
def losses_in(scale: Callable[[], tf.Tensor]) -> Iterator[Losses]:
    """Note Keras' losses that are computed inside. Multiply a compiled model's losses that are sums
    by ``scale``, so that they count as means."""
    found = Losses()
    keras = sys.modules.get("keras")
    if keras is None:
        yield found
        return
    kind = keras.losses.Loss
    original = kind.__call__

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = original(self, y_true, y_pred, sample_weight)
        found.compiled.append(_compiled.get())
        weight = _mean_over(self, y_pred, sample_weight)
        if weight is not None:
            found.weighted.append((self.name, weight))
        if _compiled.get() and self.reduction == "sum":
            value *= tf.cast(scale(), value.dtype)
        return value

    kind.__call__ = call
    try:
        yield found
    finally:
        kind.__call__ = original


def _mean_over(loss: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor | None:
    """Return the denominator of a loss; ``None``: it is a mean over examples, or no mean."""
    # Keras hands masks from layer to layer in this attribute of tensors.
    mask = getattr(y_pred, "_keras_mask", None)
    parts = [] if mask is None else [mask]
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        parts.append(sample_weight)
    elif loss.reduction not in ("mean", "sum_over_batch_size", "mean_with_sample_weight"):
        return None
    if not parts:
        return None
    parts = [tf.cast(part, tf.float32) for part in parts]
    rank = max(part.shape.rank for part in parts)
    product = tf.ones([])
    for part in parts:
        product *= tf.reshape(part, [*tf.unstack(tf.shape(part)), *[1] * (rank - part.shape.rank)])
    return tf.reduce_sum(product)
