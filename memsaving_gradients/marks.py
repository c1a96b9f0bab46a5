"""Marking tensors by hand, where they are made."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from graph_tools import _tf_autodiff
from memsaving_gradients.errors import ArgumentError

__all__ = ["COLLECTION", "checkpoint", "marked"]

#: The graph collection that marks are read from in TF1 graphs.
COLLECTION = "checkpoints"

_marks: weakref.WeakKeyDictionary[tf.Graph, list[tf.Tensor]] = weakref.WeakKeyDictionary()


def checkpoint(tensor: Any, name: str | None = None) -> Any:
    """Mark ``tensor`` as one to keep; returns it unchanged.

    In a graph the tensor is remembered (under ``name``, if one is given) and used by
    ``checkpoints="collection"`` and, if any tensor between xs and ys is marked, by ``"auto"``. In eager code
    this is the identity.

    Parameters
    ----------
    tensor
        A tensor, or a Keras symbolic tensor while a functional model is being built.
    name
        A name to find the tensor by, in plans and in lists of checkpoints.

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
    if not isinstance(tensor, tf.Tensor):
        raise ArgumentError("tensor", tensor, "only tensors can be marked")
    if not _is_symbolic(tensor):
        return tensor
    if name is not None:
        tensor = tf.identity(tensor, name=name)
    _marks.setdefault(tensor.graph, []).append(tensor)
    return tensor


def marked(graph: tf.Graph) -> list[tf.Tensor]:
    """The tensors of ``graph`` that are marked or stand in its collection ``"checkpoints"``, each once."""
    found = [*_marks.get(graph, ()), *graph.get_collection(COLLECTION)]
    unique = {t.ref(): t for t in found if isinstance(t, tf.Tensor) and t.graph is graph}
    return list(unique.values())


def _is_symbolic(tensor: tf.Tensor) -> bool:
    return tf.is_symbolic_tensor(tensor)
