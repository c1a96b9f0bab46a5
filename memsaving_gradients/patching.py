"""Patching TensorFlow, so that unchanged code gets memory-saving gradients.

Two places are replaced. The one function that every flavor of ``tf.gradients`` goes through (TF1 optimizers
included, and names bound before the patch), and ``GradientTape.gradient``. Gradients that TensorFlow builds for
itself (of functions, of loops, inside ``jacobian``, which vectorizes them) stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graph_tools import _tf_autodiff
from memsaving_gradients.errors import EagerExecutionError, PatchError
from memsaving_gradients.options import Options
from memsaving_gradients.saving import is_paused, paused, saving

__all__ = ["patch", "patched", "scoped", "unpatch"]

#: Options in force, innermost last; TensorFlow is patched while there are any.
_stack: list[Options] = []
#: What `unpatch` removes: the options that `patch` put in force.
_by_user: list[Options] = []
_restore: list[Callable[[], None]] = []


def patch(**options: Any) -> None:
    """Make ``tf.gradients`` and ``tf.GradientTape.gradient`` save memory, until `unpatch`.

    Parameters
    ----------
    **options
        ``checkpoints``, ``hold_gradients``, ``xla``, ``batch_size`` as for `memsaving_gradients.gradients`.

    Raises
    ------
    PatchError
        If TensorFlow is patched already.
    """
    wanted = Options(**options)
    if _by_user:
        raise PatchError(
            f"patch({_shown(wanted)}): TensorFlow is patched already, with {_shown(_by_user[-1])}; "
            "call unpatch() first"
        )
    _by_user.append(wanted)
    _push(wanted)


def unpatch() -> None:
    """Undo `patch`.

    Raises
    ------
    PatchError
        If TensorFlow is not patched.
    """
    if not _by_user:
        raise PatchError("unpatch(): TensorFlow is not patched; call patch() first")
    _remove(_by_user.pop())


@contextmanager
def patched(**options: Any) -> Iterator[None]:
    """`patch` for the duration of a ``with`` block; what is traced inside saves memory.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> @tf.function
    ... def slope(x):
    ...     with tf.GradientTape() as tape:
    ...         tape.watch(x)
    ...         y = x
    ...         for _ in range(8):
    ...             y = tf.sin(y)
    ...     return tape.gradient(y, x)
    >>> with ms.patched(checkpoints="memory"):
    ...     slope(tf.zeros([1000]))[0].numpy()
    np.float32(1.0)
    >>> len(ms.plans(slope))
    1
    """
    patch(**options)
    try:
        yield
    finally:
        if _by_user:
            unpatch()


@contextmanager
def scoped(options: Options) -> Iterator[None]:
    """``options`` in force for the duration of a block, inside or outside of a patch by the user."""
    _push(options)
    try:
        yield
    finally:
        _remove(options)


def _shown(options: Options) -> str:
    return f"checkpoints={options.checkpoints!r}"


def _push(options: Options) -> None:
    if not _stack:
        _install()
    _stack.append(options)


def _remove(options: Options) -> None:
    # The last one that is this very value: blocks may end in another order than they began.
    for place in reversed(range(len(_stack))):
        if _stack[place] is options:
            del _stack[place]
            break
    if not _stack:
        while _restore:
            _restore.pop()()


def _install() -> None:
    tape = _tf_autodiff.GradientTape
    inner = _tf_autodiff.differentiate()
    _restore.append(lambda: _tf_autodiff.replace_differentiate(inner))
    _tf_autodiff.replace_differentiate(_gradients_saving(inner))
    for name, wrap in (
        ("gradient", _tape_saving),
        ("jacobian", _plain_inside),
        ("batch_jacobian", _plain_inside),
    ):
        original = getattr(tape, name)
        _restore.append(lambda name=name, original=original: setattr(tape, name, original))
        setattr(tape, name, wrap(original))


def _gradients_saving(inner: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    def differentiate(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        # src_graph, the tenth parameter: the graph that is differentiated, where it is not the current one.
        source = kwargs.get("src_graph", args[7] if len(args) > 7 else None)
        elsewhere = source is not None and source is not tf.compat.v1.get_default_graph()
        if is_paused() or elsewhere:
            return inner(ys, xs, *args, **kwargs)
        if tf.executing_eagerly():
            raise _eager("tf.gradients")
        return saving(lambda: inner(ys, xs, *args, **kwargs), ys, xs, _stack[-1])

    return differentiate


def _tape_saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if is_paused():
            return original(self, target, sources, *args, **kwargs)
        if tf.executing_eagerly():
            raise _eager("GradientTape.gradient")
        graph = tf.compat.v1.get_default_graph()
        ours = [
            y
            for y in tf.nest.flatten(target)
            if isinstance(y, tf.Tensor) and tf.is_symbolic_tensor(y) and y.graph is graph
        ]
        if not ours:
            return original(self, target, sources, *args, **kwargs)
        return saving(
            lambda: original(self, target, sources, *args, **kwargs), ours, sources, _stack[-1]
        )

    return gradient


def _plain_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @tf.autograph.experimental.do_not_convert
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return original(*args, **kwargs)

    return jacobian


def _eager(what: str) -> EagerExecutionError:
    return EagerExecutionError(
        f"{what}: there is no graph to rewire in eager execution; decorate the training step with @tf.function, or "
        "leave the patch (unpatch(), or the end of the with block) for eager code"
    )
