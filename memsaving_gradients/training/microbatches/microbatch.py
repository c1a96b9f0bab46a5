"""`microbatch`: a step, or a loss, that takes its batch in pieces."""

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
    """A function that does what ``function`` does with a batch, in microbatches: a loop in the
    graph, and one buffer of gradients.

    Parameters
    ----------
    function
        A loss: from a batch to a scalar, to be differentiated outside; its gradients are then
        computed in the loop. Or a step, which computes gradients and returns them or hands them to
        an optimizer (Keras' or TF1's), which gets those of the whole batch, once. What else it
        changes, such as metrics and moving averages, it changes for each microbatch, before the
        optimizer changes weights. What else is returned is differentiated through the loop, which
        saves nothing, and is said.
    size
        The most examples of a microbatch. A batch is cut along the first axis, into as few and as
        equal parts as can be.
    reduce
        How its results are put together, gradients included: ``"mean"``, weighted by examples (of
        losses that are means), ``"sum"`` (of those that are sums), ``"concat"`` (what has a row for
        each example) or ``"last"``; a list, tuple or mapping has one for each part of what is
        returned. What an optimizer gets is a mean, or a sum if ``reduce`` is ``"sum"``.
    whole
        Names of arguments that every microbatch gets whole, such as class weights. Scalars,
        variables and what is no tensor are passed on.
    batch_norm
        What becomes of layers that normalize by statistics of the batch: ``"microbatch"`` takes
        those of each microbatch, and moves moving averages by the root of their momentum; ``None``
        does that and warns; ``"error"`` refuses.
    buffer
        What sums of 16-bit gradients and results are made in: ``"float32"``; or ``"stochastic"``,
        in as many bits as they have, rounded at random. Others are added up in their own type.
    **options
        How gradients inside save memory: as in `memsaving_gradients.gradients`. None: plain, or as
        a patch in force says.

    Returns
    -------
    callable
        With the arguments of ``function``. It can be called in a ``tf.function``, under its tape,
        and in eager code.

    Raises
    ------
    ArgumentError
        If an argument cannot be used; when it is called, if there is nothing to cut, results cannot
        be put together, or a weight is changed in each microbatch.

    Warns
    -----
    NothingSavedWarning
        If a batch is smaller than ``size``.
    BatchStatisticsWarning
        If layers normalize by statistics of microbatches, and ``batch_norm`` does not say so; if
        losses of Keras are means over what a mask or sample weights leave.

    Notes
    -----
    Exact where each example is treated by itself and the loss is a mean or a sum over them, but for
    the order of additions. Gradients of gradients are refused. A budget in ``options`` is for what
    one microbatch takes: the buffer, as large as the gradients, comes on top.

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
        raise ArgumentError("function", function, "is no function; give a loss or a step")
    cut = Cut(size, reduce, whole, batch_norm, buffer)
    inside = Options.of({"batch_size": cut.size, **options}) if options else None

    return in_pieces(function, cut, inside)
