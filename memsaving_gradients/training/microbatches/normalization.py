"""Batch normalization in microbatches: its statistics, and the updates of its moving averages.

A layer that normalizes by the statistics of a batch does not treat each example by itself.
Microbatches then give other gradients than the batch, and no way to cut it is exact. A policy says
what happens:

* ``"microbatch"``: each microbatch is normalized by its own statistics, like batches on parallel
  devices that do not communicate. Each microbatch updates moving averages with the n-th root of the
  layer's momentum, so that n of them forget as much as one batch would.
* ``None``: the same, with a warning that says so once.
* ``"error"``: such layers are refused.

Statistics of fewer than 16 examples are too noisy to train with (Wu & He 2018, figure 1). Group and
layer normalization treat each example by itself, and are exact in microbatches of any size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients.errors import ArgumentError, BatchStatisticsWarning

__all__ = ["POLICIES", "normalizing"]

POLICIES = (None, "microbatch", "error")
#: Fact: with batches of fewer examples, the validation error of a ResNet-50 with batch
#: normalization rises (Wu & He 2018, figure 1).
FEW = 16
#: Ops that normalize by a batch's statistics while they train.
_FUSED = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})


@contextmanager
def normalizing(policy: str | None, count: tf.Tensor, size: int) -> Iterator[list[str]]:
    """Let batch normalization that is called inside follow ``policy``, in one of ``count``
    microbatches of at most ``size`` examples.

    Yield the names of layers and ops that normalize, complete at the end of the context.

    Raises
    ------
    ArgumentError
        If there is any, and the policy is ``"error"``.
    """
    found: list[str] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    with _slower_moving(found, count):
        yield found
    for op in graph.get_operations()[before:]:
        if op.type in _FUSED and op.get_attr("is_training"):
            found.append(op.name)
    if not found or policy == "microbatch":
        return
    names = ", ".join(map(repr, dict.fromkeys(found)))
    advice = (
        "group normalization (keras.layers.GroupNormalization) or layer normalization treats each"
        " example by itself and is exact"
    )
    if policy == "error":
        raise ArgumentError(
            "batch_norm",
            policy,
            f"{names} would be normalized by statistics of microbatches; {advice}",
        )
    noisy = f", which are noisy for microbatches of {size}" if size < FEW else ""
    shown = names if len(names) < 200 else f"{found[0]!r} and {len(found) - 1} others"
    warn(
        f"microbatch: {shown} normalize by statistics of each microbatch{noisy}, so that gradients"
        f" are not those of the whole batch; {advice}. To accept this, give"
        " batch_norm='microbatch'.",
        BatchStatisticsWarning,
    )


@contextmanager
def _slower_moving(found: list[str], count: tf.Tensor) -> Iterator[None]:
    """Let Keras' layers note their names when they train, and move their averages as much in
    ``count`` calls as in one."""
    keras = sys.modules.get("keras")
    if keras is None:
        yield
        return
    layer = keras.layers.BatchNormalization
    original = layer.call

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if not (training and self.trainable):
            return original(self, inputs, training=training, mask=mask)
        # Layers have no path in Keras 3.3.
        found.append(getattr(self, "path", None) or self.name)
        momentum = self.momentum
        self.momentum = tf.cast(momentum, tf.float32) ** (1 / tf.cast(count, tf.float32))
        try:
            return original(self, inputs, training=training, mask=mask)
        finally:
            self.momentum = momentum

    layer.call = call
    try:
        yield
    finally:
        layer.call = original
