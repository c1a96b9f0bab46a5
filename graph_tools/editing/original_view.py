"""A view of a rewritten graph as it was built, which keeps later differentiation exact.

`tf.gradients` walks the graph from ys back to xs. In a rewritten graph that walk would pass through
clones. A second-order gradient with respect to a recomputed tensor, or with ``stop_gradients`` at
one, would silently miss the part that flows through the clone. While TensorFlow differentiates, a
rewritten graph therefore undoes its edits, and redoes them afterwards. (Tapes need no such view:
they remember the inputs that ops had when they were created.)

The first edit of any graph sets up the view, around the one function that all flavors of
`tf.gradients` and the gradients of functions call.
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
    """Restore the graph and those around it as TensorFlow built them, while the context is open.

    (Differentiation in a branch, a loop or a function continues into the graphs that it captures
    from.) Contexts nest: TensorFlow differentiates a call, a branch or a loop in the middle of its
    walk through the graph around it. The end of the inner context must not redo the outer edits.
    """
    edits = [e for g in enclosing_graphs(graph) for e in notes(g, _Edits).rewirings]
    with ExitStack() as stack:
        for rewiring in reversed(edits):
            stack.enter_context(rewiring.undone())
        yield


@cache
def _set_up() -> None:
    def differentiate(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with as_built(hooks.source_graph(*args, **kwargs)):
            return inner(*args, **kwargs)

    # Other wrappers of the differentiation edit graphs; the view must not undo their edits.
    hooks.differentiation.wrap(differentiate, innermost=True)
