"""`gradients`: what ``tf.gradients`` is, in less memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from memsaving_gradients.errors import ArgumentError, EagerExecutionError
from memsaving_gradients.options import Options
from memsaving_gradients.saving import saving

__all__ = ["gradients", "gradients_collection", "gradients_memory", "gradients_speed"]


@tf.autograph.experimental.do_not_convert
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = False,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    *,
    checkpoints: Any = "auto",
    hold_gradients: bool = False,
    xla: bool | None = None,
    batch_size: int = 32,
) -> list[Any]:
    """Gradients of the sum of ``ys`` with respect to each of ``xs``, recomputing what was not kept.

    Takes what ``tf.gradients`` and ``tf.compat.v1.gradients`` take, and returns what they return.

    Parameters
    ----------
    ys, xs, grad_ys, name, colocate_gradients_with_ops, gate_gradients, aggregation_method, stop_gradients
        As in ``tf.compat.v1.gradients``.
    unconnected_gradients
        As in ``tf.gradients``.
    checkpoints
        Which forward tensors to keep:

        - ``"auto"``: the marked tensors between xs and ys if there are any, else ``"memory"``;
        - ``"memory"``: those with which the simulated peak is least, found automatically;
        - ``"speed"``: outputs of expensive ops; cheap ones are recomputed;
        - ``"collection"``: those marked by `checkpoint` or in the graph collection ``"checkpoints"``;
        - a list of tensors, operations, names, glob patterns, layer names;
        - ``None`` or ``[]``: none; everything is recomputed from the inputs.
    hold_gradients
        Whether all gradients are alive together at the end (clipping by global norm, loss scaling). For planning.
    xla
        Whether the graph is compiled by XLA; found out if not given.
    batch_size
        Stands in for an unknown batch dimension when bytes are estimated.

    Returns
    -------
    list
        A tensor, ``tf.IndexedSlices`` or ``None`` for each x: the values of TensorFlow's own gradients.

    Raises
    ------
    EagerExecutionError
        Outside of a graph.
    ArgumentError
        For arguments that cannot be used; the graph is left as it was.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> @tf.function
    ... def slope(x):
    ...     y = x
    ...     for _ in range(8):
    ...         y = tf.sin(y)
    ...     return ms.gradients(y, x)
    >>> slope(tf.zeros([1000]))[0][0].numpy()
    np.float32(1.0)
    """
    options = Options(checkpoints, hold_gradients, xla, batch_size)
    if tf.executing_eagerly():
        raise EagerExecutionError(
            "gradients: there is no graph to rewire in eager execution; call it inside of a function "
            "decorated with @tf.function, or under tf.Graph().as_default()"
        )
    _check_tensors("ys", ys)
    _check_tensors("xs", xs)
    for y in tf.nest.flatten(ys):
        if isinstance(y, tf.Tensor) and not (y.dtype.is_floating or y.dtype.is_complex):
            raise ArgumentError(
                "ys",
                y.name,
                f"has dtype {y.dtype.name}, which cannot be differentiated; cast or drop it",
            )

    def differentiate() -> list[Any]:
        return tf.compat.v1.gradients(
            ys,
            xs,
            grad_ys=grad_ys,
            name=name,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            stop_gradients=stop_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    return saving(differentiate, ys, xs, options)


def _check_tensors(argument: str, tensors: Any) -> None:
    graph = tf.compat.v1.get_default_graph()
    for tensor in tf.nest.flatten(tensors):
        if not isinstance(tensor, tf.Tensor):
            continue
        if not tf.is_symbolic_tensor(tensor):
            if argument == "ys":
                raise ArgumentError(
                    argument,
                    tensor,
                    "is an eager tensor, computed outside of the graph; compute it inside of the tf.function",
                )
        elif argument == "ys" and tensor.graph is not graph:
            raise ArgumentError(
                argument,
                tensor.name,
                "is of another graph than the current one; call gradients where it was computed",
            )


def gradients_memory(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """`gradients` with ``checkpoints="memory"``."""
    return gradients(ys, xs, grad_ys, checkpoints="memory", **kwargs)


def gradients_speed(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """`gradients` with ``checkpoints="speed"``."""
    return gradients(ys, xs, grad_ys, checkpoints="speed", **kwargs)


def gradients_collection(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> list[Any]:
    """`gradients` with ``checkpoints="collection"``."""
    return gradients(ys, xs, grad_ys, checkpoints="collection", **kwargs)
