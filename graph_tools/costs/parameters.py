"""The few integers of a graph that give the axes, sizes and paddings of its ops, as far as
constants and shapes decide them.

TensorFlow computes many of them in the graph: the sizes of the gradient of a convolution, the
inverse of a permutation, the axes to sum over after broadcasting. This module copies the ops that
compute them from constants and shapes into a small graph, equal ops once, and runs that.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

__all__ = ["MOST", "known_shape", "parameters"]

#: Constants with more elements are data: indices, labels, weights. Smaller ones are shapes, axes
#: and factors, whose values decide how an op works. Chosen by judgement.
MOST = 1024

Array = npt.NDArray[Any]


def known_shape(tensor: tf.Tensor, batch: int) -> tuple[int, ...] | None:
    """Return the shape of ``tensor`` at a batch of ``batch``; ``None`` if its rank or more than one
    dimension is unknown."""
    if tensor.shape.rank is None:
        return None
    shape = tensor.shape.as_list()
    if shape.count(None) > 1:
        return None
    return tuple(batch if dim is None else dim for dim in shape)


def parameters(graph: OpGraph, batch: int) -> dict[int, Array]:
    """Return small integers that do not depend on data, by value, at a batch of ``batch`` examples.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    ...     twice = tf.shape(x) * 2
    ...     graph = capture([twice])
    >>> parameters(graph, batch=4)[graph.value(twice)]
    array([8, 6], dtype=int32)
    """
    scratch = tf.Graph()
    tensors: dict[int, tf.Tensor] = {}
    with scratch.as_default(), tf.device("CPU:0"):
        made: dict[Any, list[tf.Tensor]] = {}
        for i, op in enumerate(graph.ops):
            if op.outputs and all(map(_is_parameter, op.outputs)):
                found = _copied(graph, i, batch, tensors, made)
                tensors.update(enumerate(found, int(graph.first_value[i])))
    return _values(scratch, tensors) if tensors else {}


def _is_parameter(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    small = shape.rank in (0, 1) or (shape.rank == 2 and shape.is_fully_defined())
    return bool(tensor.dtype.is_integer) and small and (shape.num_elements() or 0) <= MOST


def _copied(
    graph: OpGraph, i: int, batch: int, tensors: dict[int, tf.Tensor], made: dict[Any, Any]
) -> list[tf.Tensor]:
    """Return the outputs of op ``i`` in the small graph; none if they depend on data."""
    op = graph.ops[i]
    if op.type in op_types.SHAPES:
        shapes = [known_shape(t, batch) for t in op.inputs]
        if any(shape is None for shape in shapes):
            return []
        dtype = op.outputs[0].dtype
        values = [
            _about(op.type, shape, dtype.as_numpy_dtype) for shape in shapes if shape is not None
        ]
        return [_constant(value, made) for value in values]
    if op.type == "Const":
        value = tf.get_static_value(op.outputs[0])
        return [] if value is None else [_constant(np.asarray(value), made)]
    reads = [tensors.get(v) for v in graph.inputs[i]]
    if not graph.clonable[i] or any(t is None for t in reads):
        return []
    node = op.node_def
    attributes = {k: v for k, v in node.attr.items() if not k.startswith("_")}
    texts = tuple(
        (k, v.SerializeToString(deterministic=True)) for k, v in sorted(attributes.items())
    )
    key = (op.type, texts, tuple(t.name for t in reads if t is not None))
    if key not in made:
        dtypes = [t.dtype for t in op.outputs]
        try:
            copy = graphs.create_in(
                tf.compat.v1.get_default_graph(), op.type, reads, dtypes, attributes, op.op_def
            )
            made[key] = list(copy.outputs)
        except (ValueError, TypeError):  # the shapes fit another batch only
            made[key] = []
    return list(made[key])


def _about(kind: str, shape: tuple[int, ...], dtype: Any) -> Array:
    if kind == "Size":
        return np.array(math.prod(shape), dtype)
    if kind == "Rank":
        return np.array(len(shape), dtype)
    return np.array(shape, dtype)


def _constant(value: Array, made: dict[Any, list[tf.Tensor]]) -> tf.Tensor:
    key = ("Const", value.dtype.str, value.shape, value.tobytes())
    if key not in made:
        made[key] = [tf.constant(value)]
    return made[key][0]


def _values(scratch: tf.Graph, tensors: dict[int, tf.Tensor]) -> dict[int, Array]:
    distinct = {t.name: t for t in tensors.values()}
    with tf.compat.v1.Session(graph=scratch) as session:
        try:
            found = session.run(distinct)
        except tf.errors.OpError:
            # One op that fails ends the run: only constants are known then.
            found = session.run({k: t for k, t in distinct.items() if t.op.type == "Const"})
    return {v: found[t.name] for v, t in tensors.items() if t.name in found}
