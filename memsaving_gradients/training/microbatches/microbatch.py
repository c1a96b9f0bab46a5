"""`microbatch`: make a step, or a loss, take its batch in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.microbatches.pieces import Cut, in_pieces

__all__ = ["microbatch"]


@tf.autograph.experimental.do_not_convert
def microbatch(
    function: Callable[..., Any],
    size: int,
    *,
    reduce: Any = "mean",
    whole: Sequence[str] = (),
    batch_norm: str | None = None,
    buffer: str = "float32",
    **options: Any,
) -> Callable[..., Any]:
    """Return a function that does the same as ``function``, in microbatches: by a loop in the graph
    and one buffer of gradients.

    Parameters
    ----------
    function
        A loss takes a batch, returns a scalar and is differentiated outside; its gradients are
        computed in the loop. A step computes gradients and returns them, or gives them to an
        optimizer (Keras' or TF1's), which gets the whole batch's gradients once. Other updates,
        such as metrics and moving averages, run for each microbatch, before the optimizer changes
        weights. Other results are differentiated through the loop, with a warning that this saves
        nothing.
    size
        The most examples of a microbatch. A batch is cut along the first axis, into as few and as
        equal parts as possible.
    reduce
        The reduction of results, gradients included: ``"mean"``, weighted by examples (for losses
        that are means), ``"sum"`` (for sums), ``"concat"`` (for results with a row for each
        example) or ``"last"``; a list, tuple or mapping has one for each part of the results. An
        optimizer gets a mean, or a sum if ``reduce`` is ``"sum"``.
    whole
        Names of arguments that every microbatch gets whole, such as class weights. Scalars,
        variables and arguments that are no tensors are always passed on whole.
    batch_norm
        The policy for layers that normalize by batch statistics: ``"microbatch"`` uses statistics
        of each microbatch, and updates moving averages with a root of their momentum; ``None`` does
        the same and warns; ``"error"`` refuses.
    buffer
        The type in which 16-bit gradients and results are summed: ``"float32"``; ``"stochastic"``:
        their own type, rounded at random. Other types are summed as they are.
    **options
        Options of `memsaving_gradients.gradients`, for gradients inside. Without any, gradients are
        plain, or follow a patch in force.

    Returns
    -------
    callable
        A function with the arguments of ``function``. It can be called in a ``tf.function``, under
        its tape, and in eager code.

    Raises
    ------
    ArgumentError
        If an argument cannot be used; in a call, if there is nothing to cut, results cannot be
        reduced, or each microbatch changes a weight.

    Warns
    -----
    NothingSavedWarning
        If a batch is smaller than ``size``.
    BatchStatisticsWarning
        If layers normalize by statistics of microbatches, and ``batch_norm`` does not say so; if
        Keras' losses are means over a mask or sample weights; if results compare examples.

    Notes
    -----
    Gradients are exact if each example is treated by itself and the loss is a mean or a sum over
    examples; only the order of additions differs. Gradients of gradients are refused. A budget in
    ``options`` is for one microbatch: the buffer, as large as the gradients, comes on top.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> w = tf.Variable([[2.0], [1.0]])
    >>> @tf.function
    ... def slope(x, y):
    ...     with tf.GradientTape() as tape:
    ...         loss = ms.microbatch(lambda x, y: tf.reduce_mean((x @ w - y) ** 2), size=2)(x, y)
    ...     return tape.gradient(loss, w)
    >>> x = tf.reshape(tf.range(10.0), [5, 2])
    >>> slope(x, tf.zeros([5, 1])).numpy().round(3).tolist()
    [[152.0], [178.0]]
    """
    if not callable(function):
        raise ArgumentError("function", function, "is not a function; give a loss or a step")
    cut = Cut(size, reduce, whole, batch_norm, buffer)
    inside = Options.of({"batch_size": cut.size, **options}) if options else None

    return in_pieces(function, cut, inside)
