"""Keeps later differentiation of a rewritten graph exact.

`tf.gradients` walks the graph from ys back to xs. In a rewritten graph that walk would pass through
clones: a second order gradient with respect to a tensor that is recomputed, or with
``stop_gradients`` at one, would miss what flows through the clone, silently. While TensorFlow
differentiates, a rewritten graph therefore takes back its edits, and makes them again afterwards.
(Tapes are not concerned: they remember the inputs that ops had when they were made.)

The view is set up when the first graph is edited, around the one function that all flavors of
`tf.gradients` and the gradients of functions go through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.notes import notes
from graph_tools.tf_private import hooks
from graph_tools.tf_private.autodiff import enclosing_graphs

__all__ = ["as_built", "forget", "remember"]


@dataclass(eq=False)
class _Edits:
    """The edits of a graph, oldest first."""

    rewirings: list[Rewiring] = field(default_factory=list)


def remember(graph: tf.Graph, rewiring: Rewiring) -> None:
    """Note that ``graph`` was edited by ``rewiring``."""
    _set_up()
    notes(graph, _Edits).rewirings.append(rewiring)


def forget(graph: tf.Graph, rewiring: Rewiring) -> None:
    """Note that ``rewiring`` was undone for good."""
    edits = notes(graph, _Edits)
    edits.rewirings = [edit for edit in edits.rewirings if edit is not rewiring]


@contextmanager
def as_built(graph: tf.Graph) -> Iterator[None]:
    """The graph and those around it as TensorFlow built them, for the duration of the context.

    (Differentiation in a branch, a loop or a function walks on into the graphs that it captures
    from.) Contexts nest: TensorFlow differentiates a call, a branch or a loop in the middle of its
    walk through the graph around it, which the end of the inner context must not give its edits
    back.
    """
    edits = [e for g in enclosing_graphs(graph) for e in notes(g, _Edits).rewirings]
    with ExitStack() as stack:
        for rewiring in reversed(edits):
            stack.enter_context(rewiring.undone())
        yield


@cache
def _set_up() -> None:
    def differentiate(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # src_graph, the tenth parameter: the graph that is differentiated, where it is not the
        # current one.
        graph = kwargs.get("src_graph") or (args[9] if len(args) > 9 else None)
        with as_built(graph if graph is not None else tf.compat.v1.get_default_graph()):
            return inner(*args, **kwargs)

    # Whoever else wraps the differentiation edits graphs, which the view must not undo.
    hooks.differentiation.wrap(differentiate, innermost=True)
