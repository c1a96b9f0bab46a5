"""Marks: tensors that users mark by hand, where they are made.

Marks live in the graph collection ``"checkpoints"``, as in the ``memory_saving_gradients`` module
of TensorFlow 1. A collection is part of its graph (function graphs have collections, too) and dies
with it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError

__all__ = ["COLLECTION", "mark", "marked"]

#: The graph collection that contains the marks.
COLLECTION = "checkpoints"


def mark(tensor: Any, name: str | None = None) -> Any:
    """Mark ``tensor``, as `memsaving_gradients.checkpoint` does with all tensors except Keras'
    symbolic ones, and return it."""
    if isinstance(tensor, tf.Variable) or hasattr(tensor, "handle"):
        raise ArgumentError(
            "tensor",
            tensor,
            "is a variable, which is never recomputed; mark a tensor computed from it",
        )
    if not isinstance(tensor, tf.Tensor):
        raise ArgumentError(
            "tensor", tensor, "only tensors can be marked; of a composite tensor, mark the values"
        )
    if not tf.is_symbolic_tensor(tensor):
        return tensor
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        raise ArgumentError(
            "tensor",
            tensor.name,
            f"has dtype {tensor.dtype.name} and therefore no gradient; mark a floating point"
            " tensor",
        )
    if name is not None:
        tensor = tf.identity(tensor, name=name)
    tensor.graph.add_to_collection(COLLECTION, tensor)
    return tensor


def marked(graph: tf.Graph) -> list[tf.Tensor]:
    """Return the marked tensors of ``graph``, each once, in the order of marking."""
    unique: dict[Any, tf.Tensor] = {}
    for item in graph.get_collection(COLLECTION):
        for tensor in item.outputs if isinstance(item, tf.Operation) else [item]:
            # A function's graph begins with a copy of the collections of the graph around it.
            if isinstance(tensor, tf.Tensor) and tensor.graph is graph:
                unique[tensor.ref()] = tensor
    return list(unique.values())
