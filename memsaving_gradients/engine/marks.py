"""Marking tensors by hand, where they are made.

Marks live in the graph collection ``"checkpoints"``, as those of the ``memory_saving_gradients`` module of TensorFlow 1
did: a collection is part of its graph (function graphs have collections too) and dies with it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError

__all__ = ["COLLECTION", "checkpoint", "marked"]

#: The graph collection that marks are kept in.
COLLECTION = "checkpoints"


def checkpoint(tensor: Any, name: str | None = None) -> Any:
    """Mark ``tensor`` as one to keep, and return it.

    In a graph the tensor is remembered (under ``name``, if one is given) and used by
    ``checkpoints="collection"`` and, if any tensor between xs and ys is marked, by ``"auto"``. In eager code
    this is the identity.

    Parameters
    ----------
    tensor
        A floating point tensor, or a Keras symbolic tensor while a functional model is being built.
    name
        A name to find the tensor by, in plans and in lists of checkpoints.

    Raises
    ------
    ArgumentError
        If it is something else, or a tensor of the graph that has no gradient because of its dtype.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default() as graph:
    ...     x = tf.compat.v1.placeholder(tf.float32, [4])
    ...     y = checkpoint(tf.tanh(x), name="middle")
    >>> [t.name for t in marked(graph)]
    ['middle:0']
    """
    if name is not None and not isinstance(name, str):
        raise ArgumentError("name", name, "give a string or nothing")
    if type(tensor).__name__ == "KerasTensor":
        from memsaving_gradients.keras import Checkpoint

        return Checkpoint(name=name)(tensor)
    if isinstance(tensor, tf.Variable) or hasattr(tensor, "handle"):
        raise ArgumentError(
            "tensor",
            tensor,
            "is a variable, which is never recomputed; mark what is computed from it",
        )
    if not isinstance(tensor, tf.Tensor):
        raise ArgumentError(
            "tensor", tensor, "only tensors can be marked; of a composite one, mark the values"
        )
    if not tf.is_symbolic_tensor(tensor):
        return tensor
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        raise ArgumentError(
            "tensor",
            tensor.name,
            f"has dtype {tensor.dtype.name} and therefore no gradient; mark a floating point tensor",
        )
    if name is not None:
        tensor = tf.identity(tensor, name=name)
    tensor.graph.add_to_collection(COLLECTION, tensor)
    return tensor


def marked(graph: tf.Graph) -> list[tf.Tensor]:
    """The tensors of ``graph`` that are marked, each once, in the order of marking."""
    unique: dict[Any, tf.Tensor] = {}
    for item in graph.get_collection(COLLECTION):
        for tensor in item.outputs if isinstance(item, tf.Operation) else [item]:
            # A function's graph begins with a copy of the collections of the graph around it.
            if isinstance(tensor, tf.Tensor) and tensor.graph is graph:
                unique[tensor.ref()] = tensor
    return list(unique.values())
