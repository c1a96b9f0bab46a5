"""The functions of TensorFlow that this project wraps: how they are found, wrapped and restored.

Each is one `Hook`, which any number of subscribers may wrap. A hook replaces the function when the
first one subscribes, and restores it when the last one ends. Importing this module changes nothing.
TensorFlow looks up each of these functions at each call (2.16 to 2.21), so a hook also reaches code
that imported ``tf.gradients`` or ``tf.GradientTape`` before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function, transform
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from graph_tools.tf_private.autodiff import GradientTape
from graph_tools.tf_private.loops import LOOPS

__all__ = [
    "Hook",
    "call_gradients",
    "differentiation",
    "loop_gradients",
    "source_graph",
    "tape",
    "when_traced",
]

Function = Callable[..., Any]
#: A function that is called with the function that it wraps, and the arguments of the call.
Around = Callable[..., Any]


class Hook:
    """A function of TensorFlow that subscribers wrap.

    Parameters
    ----------
    read, write
        Functions that return and that replace the wrapped function.

    Examples
    --------
    >>> functions = {"f": abs}
    >>> hook = Hook(lambda: functions["f"], lambda new: functions.update(f=new))
    >>> end = hook.wrap(lambda inner, x: inner(x) + 1)
    >>> functions["f"](-2)
    3
    >>> end()
    >>> functions["f"] is abs
    True
    """

    def __init__(self, read: Callable[[], Function], write: Callable[[Function], None]) -> None:
        self._read, self._write = read, write
        #: Innermost first.
        self._subscribers: list[Around] = []
        self._original: Function | None = None
        self._dispatch: Function | None = None
        self._composed: Function | None = None

    def wrap(self, around: Around, *, innermost: bool = False) -> Callable[[], None]:
        """Let ``around(inner, *args, **kwargs)`` handle each call, and return a function that ends
        the subscription.

        Later subscribers wrap earlier ones; with ``innermost``, all others wrap this one.
        """
        if self._original is None:
            self._install()
        self._subscribers.insert(0 if innermost else len(self._subscribers), around)
        self._compose()

        def end() -> None:
            self._subscribers.remove(around)
            self._compose()
            if not self._subscribers:
                self._uninstall()

        return end

    def _install(self) -> None:
        original = self._original = self._read()

        @tf.autograph.experimental.do_not_convert
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            # Without subscribers, call the original: other code may have wrapped this function.
            return (self._composed or original)(*args, **kwargs)

        # Keep the signature and the documentation of the original.
        self._dispatch = functools.wraps(original)(dispatch)
        self._write(self._dispatch)

    def _uninstall(self) -> None:
        if self._read() is not self._dispatch:
            # Other code wraps the dispatcher, and still calls it: another installation would put
            # this dispatcher below itself.
            return
        assert self._original is not None
        self._write(self._original)
        self._original = self._dispatch = self._composed = None

    def _compose(self) -> None:
        function = self._original
        for around in self._subscribers:
            function = functools.partial(around, function)
        self._composed = function


def _set_differentiation(function: Function) -> None:
    gradients_util._GradientsHelper = function


#: All flavors of ``tf.gradients`` call this function, as do TF1 optimizers and function gradients.
differentiation = Hook(lambda: gradients_util._GradientsHelper, _set_differentiation)


def source_graph(*args: Any, **kwargs: Any) -> tf.Graph:
    """Return the graph that a call of `differentiation` with these arguments differentiates:
    ``src_graph``, its tenth parameter, or the current graph (2.16 to 2.21)."""
    given = kwargs.get("src_graph", args[9] if len(args) > 9 else None)
    return tf.compat.v1.get_default_graph() if given is None else given


def _entry(kind: str) -> dict[str, Any]:
    """Return the entry of a gradient function in TensorFlow's registry, which refuses to register a
    second function for an op type."""
    entry: dict[str, Any] = ops.gradient_registry._registry[kind]
    return entry


#: The gradient functions of loops, by the op type of the loop.
loop_gradients = {
    kind: Hook(
        lambda kind=kind: _entry(kind)["type"],  # type: ignore[misc]
        lambda function, kind=kind: _entry(kind).update(type=function),  # type: ignore[misc]
    )
    for kind in LOOPS
}

#: The method that makes the functions that the gradient of a call runs inside of graphs (see
#: `graph_tools.tf_private.autodiff.without_side_gradients`).
call_gradients = Hook(
    lambda: concrete_function._DelayedRewriteGradientFunctions.forward_backward,
    lambda new: setattr(
        concrete_function._DelayedRewriteGradientFunctions, "forward_backward", new
    ),
)

#: Methods of ``tf.GradientTape``, on the class, so that names bound earlier see them too.
tape = {
    name: Hook(
        functools.partial(getattr, GradientTape, name),
        functools.partial(setattr, GradientTape, name),
    )
    for name in ("gradient", "jacobian", "batch_jacobian")
}


def when_traced(callback: Callable[[tf.Graph], None]) -> None:
    """Call ``callback`` with the graph of each function, branch and body when its trace ends. A
    second registration of the same ``callback`` has no effect.

    The graph is complete then, and not compiled yet. TensorFlow calls the transformations of this
    list, including any added during the trace. It calls them again for a loop's graph when its
    gradient extends the graph (2.16 to 2.21).
    """
    if callback not in transform.FUNC_GRAPH_TRANSFORMS:
        transform.FUNC_GRAPH_TRANSFORMS.append(callback)
