"""Keras' training step in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from memsaving_gradients.training.keras_models import replaced
from memsaving_gradients.training.microbatches.applying import changed_in
from memsaving_gradients.training.microbatches.denominators import compiled_loss
from memsaving_gradients.training.microbatches.pieces import Cut, in_pieces

__all__ = ["train_step_of"]


def train_step_of(model: Any, cut: Cut) -> Callable[[Any], Any]:
    """Return the ``train_step`` of ``model``, Keras' or the user's, in microbatches.

    Metrics see each microbatch, and their results are read after the last one. Other results of the
    step are averaged; those that are no floating-point numbers are taken from the last microbatch.
    """
    original = model.train_step

    def train_step(data: Any) -> Any:
        seen: dict[str, Any] = {}

        def one(data: Any) -> Any:
            with replaced(model, "compute_loss", _marked(model.compute_loss)):
                logs = tf.nest.map_structure(tf.convert_to_tensor, original(data))
            changed = changed_in(tf.compat.v1.get_default_graph())
            seen["metrics"] = [
                m for m in model.metrics if any(_handle(v) in changed for v in m.variables)
            ]
            seen["logs"] = logs
            flat = tf.nest.flatten(logs)
            return [v for v in flat if _is_real(v)], [v for v in flat if not _is_real(v)]

        real, others = map(iter, in_pieces(one, replace(cut, reduce=("mean", "last")))(data))
        values = [
            next(real if _is_real(value) else others) for value in tf.nest.flatten(seen["logs"])
        ]
        logs = tf.nest.pack_sequence_as(seen["logs"], values)
        if not isinstance(logs, Mapping):
            return logs
        results: dict[str, Any] = {}
        for metric in seen["metrics"]:
            result = metric.result()
            results |= result if isinstance(result, Mapping) else {metric.name: result}
        return {name: results.get(name, value) for name, value in logs.items()}

    return train_step


def _marked(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's ``compute_loss`` that marks its losses as those of a compiled model."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        with compiled_loss():
            return compute_loss(*args, **kwargs)

    return marked


def _is_real(value: tf.Tensor) -> bool:
    return bool(value.dtype.is_floating)


def _handle(variable: Any) -> int:
    """Return the id of a Keras variable's handle."""
    return id(getattr(variable.value, "handle", None))
