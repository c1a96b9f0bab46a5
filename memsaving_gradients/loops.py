"""``tf.while_loop`` and ``tf.scan`` with one more argument, which says how memory-saving gradients
treat the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from graph_tools.tf_private.loops import LOOPS
from graph_tools.warn import warn
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.options import check_one_of
from memsaving_gradients.errors import PlanNote
from memsaving_gradients.transforms.loops.selection import WAYS, mark

__all__ = ["scan", "while_loop"]


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    *,
    loops: str = "segments",
    swap_memory: bool = False,
    **options: Any,
) -> Any:
    """Build a ``tf.while_loop`` and say how memory-saving gradients treat it, whatever they do with
    other loops.

    Parameters
    ----------
    cond, body, loop_vars
        As in ``tf.while_loop``.
    loops
        ``"segments"``, ``"treeverse"`` or ``"keep"``, as in `memsaving_gradients.gradients`.
    swap_memory
        Ignored, as in TensorFlow 2; a `PlanNote` says so.
    **options
        ``shape_invariants``, ``parallel_iterations``, ``maximum_iterations``, ``name`` as in
        ``tf.while_loop``.

    Returns
    -------
    structure
        The loop variables after the last step, as from ``tf.while_loop``. Gradients of
        `memsaving_gradients.gradients`, or in a patch, save memory; others are TensorFlow's.

    Raises
    ------
    ArgumentError
        If ``loops`` is not one of its three values.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> @tf.function
    ... def slope(x):
    ...     _, y = ms.while_loop(lambda i, _: i < 100, lambda i, y: (i + 1, tf.sin(y)), (0, x))
    ...     return ms.gradients(y, x, checkpoints="speed")
    >>> slope(tf.zeros([1000]))[0][0].numpy()
    np.float32(1.0)
    >>> print(ms.plans(slope)[-1].replayed[0])
    while: 100 steps, 10 steps to a segment
    """
    _check(loops, swap_memory)
    return _marked(loops, lambda: tf.while_loop(cond, body, loop_vars, **options))


def scan(
    fn: Callable[..., Any],
    elems: Any,
    initializer: Any = None,
    *,
    loops: str = "segments",
    swap_memory: bool = False,
    **options: Any,
) -> Any:
    """Build a ``tf.scan`` and say how memory-saving gradients treat it.

    Parameters
    ----------
    fn, elems, initializer
        As in ``tf.scan``.
    loops, swap_memory
        As in `while_loop`.
    **options
        ``parallel_iterations``, ``infer_shape``, ``reverse``, ``name`` as in ``tf.scan``.

    Returns
    -------
    structure
        The results of ``fn`` at each step, stacked.

    Raises
    ------
    ArgumentError
        If ``loops`` is not one of its three values.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> @tf.function
    ... def slopes(x):
    ...     y = ms.scan(lambda state, e: tf.tanh(state + e), x, loops="treeverse")
    ...     return ms.gradients(y[-1], x)
    >>> slopes(tf.zeros([64, 100]))[0].shape
    TensorShape([64, 100])
    """
    _check(loops, swap_memory)
    return _marked(loops, lambda: tf.scan(fn, elems, initializer, **options))


def _check(loops: Any, swap_memory: Any) -> None:
    check_one_of("loops", loops, WAYS)
    if swap_memory:
        note = (
            "swap_memory=True: TensorFlow 2 ignores it; the values that a loop keeps stay on its"
            " device. With loops='segments' or 'treeverse', a loop keeps fewer"
        )
        if not graph_state.warned(tf.compat.v1.get_default_graph(), note):
            warn(note + ".", PlanNote)


def _marked(way: str, build: Callable[[], Any]) -> Any:
    if tf.executing_eagerly():
        # There is no graph with a loop to mark: TensorFlow runs the steps one by one.
        return build()
    graph = tf.compat.v1.get_default_graph()
    since = len(graph.get_operations())
    result = build()
    for op in graph.get_operations()[since:]:
        if op.type in LOOPS:
            mark(op, way)
    return result
