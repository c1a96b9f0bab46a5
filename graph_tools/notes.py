"""Notes about a graph or an op, kept for as long as it lives.

Notes are attributes of the graph or op itself. Many of them refer back to it, so a table of them,
weak or not, would keep it alive.
"""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

__all__ = ["has_notes", "nearest_notes", "notes"]

_ATTRIBUTE = "_memsaving_gradients"

Notes = TypeVar("Notes")


def notes(owner: tf.Graph | tf.Operation, kind: type[Notes]) -> Notes:
    """Return the notes of a kind on ``owner``: an instance of ``kind``, created without arguments
    by the first call.

    Examples
    --------
    >>> graph = tf.Graph()
    >>> notes(graph, dict)["seen"] = True
    >>> notes(graph, dict), has_notes(graph, list)
    ({'seen': True}, False)
    """
    known = getattr(owner, _ATTRIBUTE, None)
    if known is None:
        known = {}
        setattr(owner, _ATTRIBUTE, known)
    if kind not in known:
        known[kind] = kind()
    found: Notes = known[kind]
    return found


def has_notes(owner: tf.Graph | tf.Operation, kind: type) -> bool:
    """Return whether there are notes of a kind on ``owner``."""
    return kind in getattr(owner, _ATTRIBUTE, ())


def nearest_notes(graph: Any, kind: type[Notes]) -> Notes | None:
    """Return the notes of a kind on ``graph``, or on the nearest graph around it that has some;
    ``None`` if none has."""
    while graph is not None and not has_notes(graph, kind):
        graph = getattr(graph, "outer_graph", None)
    return None if graph is None else notes(graph, kind)
