"""Keeps later differentiation of a rewritten graph exact.

`tf.gradients` walks the graph from ys back to xs. In a rewritten graph that walk would pass through clones: a second
order gradient with respect to a tensor that is recomputed, or with ``stop_gradients`` at one, would miss what
flows through the clone, silently. While TensorFlow differentiates, a rewritten graph therefore takes back its edits,
and makes them again afterwards. (Tapes are not concerned: they remember the inputs that ops had when they were made.)

Installed once, around the one function that all flavors of `tf.gradients` and the gradients of functions go through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.tf_private.autodiff import differentiate, enclosing_graphs, replace_differentiate

__all__ = ["as_built", "forget", "install", "remember"]

#: A rewiring refers to its graph, so it lives on the graph itself: a table of them, weak or not, would keep it alive.
_ATTRIBUTE = "_memsaving_gradients_rewirings"


def remember(graph: tf.Graph, rewiring: Rewiring) -> None:
    """Note that ``graph`` was edited by ``rewiring``."""
    setattr(graph, _ATTRIBUTE, [*getattr(graph, _ATTRIBUTE, ()), rewiring])


def forget(graph: tf.Graph, rewiring: Rewiring) -> None:
    """Note that ``rewiring`` was undone for good."""
    edits = getattr(graph, _ATTRIBUTE, ())
    setattr(graph, _ATTRIBUTE, [edit for edit in edits if edit is not rewiring])


@contextmanager
def as_built(graph: tf.Graph) -> Iterator[None]:
    """The graph and those around it as TensorFlow built them, for the duration of the context.

    (Differentiation in a branch, a loop or a function walks on into the graphs that it captures from.) Contexts nest:
    TensorFlow differentiates a call, a branch or a loop in the middle of its walk through the graph around it, which the
    end of the inner context must not give its edits back.
    """
    edits = [e for g in enclosing_graphs(graph) for e in getattr(g, _ATTRIBUTE, ())]
    with ExitStack() as stack:
        for rewiring in reversed(edits):
            stack.enter_context(rewiring.undone())
        yield


def install() -> None:
    """Wrap TensorFlow's graph differentiation; does nothing the second time."""
    inner = differentiate()
    if getattr(inner, "_memsaving_guard", False):
        return

    def guarded(*args: Any, **kwargs: Any) -> Any:
        graph = kwargs.get("src_graph") or (args[9] if len(args) > 9 else None)
        with as_built(graph if graph is not None else tf.compat.v1.get_default_graph()):
            return inner(*args, **kwargs)

    guarded._memsaving_guard = True  # type: ignore[attr-defined]
    replace_differentiate(guarded)
