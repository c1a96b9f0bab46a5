"""The root of every error that this project raises on purpose."""

from __future__ import annotations

__all__ = ["CacheWarning", "GraphError", "GraphToolsError"]


class GraphToolsError(Exception):
    """Base class of all errors of ``graph_tools`` and of the packages that build on it."""

    #: AutoGraph re-raises errors as types of its own, without their attributes, unless this is set.
    ag_pass_through = True


class GraphError(GraphToolsError, ValueError):
    """A graph cannot be captured, ordered or edited as requested."""


class CacheWarning(UserWarning):
    """Measured costs cannot be read from disk or written there; results do not depend on that."""
