"""Patching TensorFlow, so that unchanged code gets memory-saving gradients.

The patch wraps ``GradientTape.gradient``, and the one function that every flavor of
``tf.gradients`` calls (TF1 optimizers and names bound before the patch included). It need not
replace ``tf.gradients`` itself, which would miss ``from tensorflow import gradients``. Gradients
that TensorFlow builds for itself (of functions, of loops, inside ``jacobian``, which vectorizes
them) stay plain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import autodiff, hooks
from graph_tools.warn import warn
from memsaving_gradients.engine.differentiate import (
    ends_in,
    inner_way,
    is_paused,
    paused,
    rewired,
    rule_inside,
)
from memsaving_gradients.engine.feedback.notices import OUTER, warn_nothing_saved
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.tensor_selection import resolve
from memsaving_gradients.errors import (
    EagerExecutionError,
    NothingSavedWarning,
    PatchError,
    SelectionError,
)
from memsaving_gradients.transforms.loops.gradient_hook import Rule, stand

__all__ = ["for_batches_of", "patch", "patched", "scoped", "unpatch"]


@dataclass(eq=False)
class _InForce:
    """The options in force, and the use that was made of their list of checkpoints.

    ``thread``: the thread that put the options in force. ``asked``: whether gradients were asked
    for. ``unused``: for each position of the list that no gradient computation could use so far,
    why the last computation could not.
    """

    options: Options
    eager_is_error: bool = True
    thread: int = field(default_factory=threading.get_ident)
    asked: bool = False
    used: set[int] = field(default_factory=set)
    unused: dict[int, SelectionError] = field(default_factory=dict)

    def note(self, skipped: dict[int, SelectionError]) -> None:
        listed: tuple[Any, ...] = self.options.checkpoints
        self.used |= set(range(len(listed))) - skipped.keys()
        self.unused = {k: why for k, why in (self.unused | skipped).items() if k not in self.used}

    def check(self) -> None:
        """Raise if a checkpoint of the list was of no use to any gradient computation."""
        if self.unused:
            raise self.unused[min(self.unused)]


#: The options in force, innermost last. No context variable: strategies trace in other threads.
_stack: list[_InForce] = []
#: The options that `patch` put in force, which `unpatch` removes.
_by_user: list[_InForce] = []
_restore: list[Callable[[], None]] = []


def patch(**options: Any) -> None:
    """Make ``tf.gradients`` and ``tf.GradientTape.gradient`` save memory, until `unpatch`.

    Covers ``tf.gradients`` and ``tf.compat.v1.gradients`` (also where they were imported by name
    before), TF1 optimizers, and tapes, in every thread. In eager code of the patching thread, they
    raise an error while patched. Gradients that other threads and functions of ``tf.py_function``
    compute eagerly stay TensorFlow's.

    A list of checkpoints serves all gradient computations while patched. Each computation must find
    a checkpoint to use in it, and each checkpoint must serve some computation (see `unpatch`).

    Parameters
    ----------
    **options
        ``checkpoints``, ``budget``, ``planner``, ``max_slowdown``, ``hold_gradients``,
        ``accumulate``, ``xla``, ``batch_size``, ``loop_steps``, ``profile``, ``plan``,
        ``progress``, ``planning_seconds``, ``loops``, ``attention``, ``encode``, ``offload`` as
        for `memsaving_gradients.gradients`. A budget is for a whole step; in a ``tf.Graph``, for
        each gradient computation by itself.

    Raises
    ------
    ArgumentError
        If an option is unknown or cannot be used.
    PatchError
        If TensorFlow is patched already.

    Examples
    --------
    >>> import memsaving_gradients as ms
    >>> ms.patch(checkpoints="speed")
    >>> ms.unpatch()
    """
    wanted = _InForce(Options.of(options))
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
    SelectionError
        If a checkpoint of a list was in the graph, but no gradient computation could use it.
        TensorFlow is unpatched all the same.
    """
    if not _by_user:
        raise PatchError("unpatch(): TensorFlow is not patched; call patch() first")
    ended = _by_user.pop()
    _remove(ended)
    ended.check()


@contextmanager
def patched(**options: Any) -> Iterator[None]:
    """Call `patch` for the duration of a ``with`` block: gradients traced inside save memory.

    A ``tf.function`` that was traced before keeps the graph it has. If nothing inside asks for
    gradients, a `NothingSavedWarning` says so.

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
    mine = _by_user[-1]
    try:
        yield
    except BaseException:
        # The error of the block matters, not the checkpoints that it left unused.
        mine.unused.clear()
        mine.asked = True
        raise
    finally:
        # The block may have unpatched, and patched anew.
        ended_early = mine not in _by_user
        if not ended_early:
            unpatch()
    if not (mine.asked or ended_early):
        warn(
            f"patched({_shown(mine)}): no gradients were asked for inside of the block, so nothing"
            " was saved; a tf.function that was traced before keeps the graph it has: trace it for"
            " the first time inside, or make a new tf.function of it there.",
            NothingSavedWarning,
        )


@contextmanager
def scoped(options: Options, *, eager_is_error: bool = True) -> Iterator[Callable[[], None]]:
    """Put ``options`` in force for the duration of a block, inside or outside of a user's patch.

    Yields a function that raises if a checkpoint of a list was of no use so far. With
    ``eager_is_error=False``, gradients in eager execution are TensorFlow's.
    """
    mine = _InForce(options, eager_is_error)
    _push(mine)
    try:
        yield mine.check
    finally:
        _remove(mine)


@contextmanager
def for_batches_of(size: int) -> Iterator[None]:
    """Set the batch size of the options in force to ``size`` inside a block; do nothing if there
    are no such options."""
    if not _stack:
        yield
        return
    mine, options = _stack[-1], _stack[-1].options
    mine.options = replace(options, batch_size=size)
    try:
        yield
    finally:
        mine.options = options


def _shown(patch: _InForce) -> str:
    options = patch.options
    if options.budget is not None:
        return f"budget={options.budget!r}"
    return f"checkpoints={options.checkpoints!r}"


def _push(patch: _InForce) -> None:
    if not _stack:
        _install()
    _stack.append(patch)


def _remove(patch: _InForce) -> None:
    # Not always the last one: blocks may end in another order than they began.
    _stack.remove(patch)
    if not _stack:
        while _restore:
            _restore.pop()()


def _install() -> None:
    _restore.append(stand(_standing_rule))
    _restore.append(hooks.differentiation.wrap(_gradients))
    _restore.append(hooks.tape["gradient"].wrap(_tape_gradient))
    for name in ("jacobian", "batch_jacobian"):
        _restore.append(hooks.tape[name].wrap(_plain_inside))


def _standing_rule() -> Rule | None:
    """Return how to treat loops in functions that are differentiated when called under a tape."""
    if is_paused() or not _stack:
        return None
    options = _stack[-1].options
    searches = options.searches or not isinstance(options.checkpoints, str)
    mode = "budget" if searches else options.checkpoints
    return None if inner_way(options, mode) == "keep" else rule_inside(options, mode)


def _gradients(inner: Callable[..., Any], ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
    source = hooks.source_graph(ys, xs, *args, **kwargs)
    elsewhere = source is not tf.compat.v1.get_default_graph()
    if not elsewhere:
        _note_asked()
    if elsewhere or _stays_plain("tf.gradients"):
        return inner(ys, xs, *args, **kwargs)
    return _patched(lambda: inner(ys, xs, *args, **kwargs), ys, xs)


def _tape_gradient(
    inner: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    _note_asked()
    if _stays_plain("GradientTape.gradient"):
        return inner(tape, target, sources, *args, **kwargs)
    return _patched(lambda: inner(tape, target, sources, *args, **kwargs), target, sources, tape)


def _plain_inside(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _note_asked()
    with paused():
        return inner(*args, **kwargs)


def _note_asked() -> None:
    for patch in _stack:
        patch.asked = True


def _stays_plain(what: str) -> bool:
    if is_paused() or not _stack:
        return True
    if not tf.executing_eagerly():
        return False
    mine = _stack[-1].thread == threading.get_ident()
    if _stack[-1].eager_is_error and mine and not autodiff.in_py_function():
        raise EagerExecutionError(
            f"{what}: there is no graph to rewire in eager execution; decorate the training step"
            " with @tf.function, or leave the patch (unpatch(), or the end of the with block) for"
            " eager code"
        )
    return True


def _patched(differentiate: Callable[[], Any], ys: Any, xs: Any, tape: Any = None) -> Any:
    graph = tf.compat.v1.get_default_graph()
    ends = ends_in(graph, ys)
    if not ends:
        # Targets of an outer graph: their forward ops are not in this one.
        if _stack[-1].options.searches:
            way_out = "so no budget is kept; call gradients where ys are computed"
            warn_nothing_saved(graph, f"{OUTER}, {way_out}")
        return differentiate()
    now = _stack[-1]
    options = now.options
    starts = tf.nest.flatten(xs, expand_composites=True)
    if isinstance(options.checkpoints, tuple) and options.checkpoints:
        skipped: dict[int, SelectionError] = {}
        operations = len(graph.get_operations())
        tensors = resolve(graph, operations, options.checkpoints, ends, starts, skipped=skipped)
        now.note(skipped)
        options = replace(options, checkpoints=tuple(tensors))
    return rewired(differentiate, ends, starts, options, tape)
