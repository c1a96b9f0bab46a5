"""The errors and warnings of this package; each names the argument, the offending value and the way out."""

from __future__ import annotations

from typing import Any

from graph_tools.errors import GraphToolsError

__all__ = [
    "ArgumentError",
    "EagerExecutionError",
    "MemorySavingError",
    "NothingSavedWarning",
    "PatchError",
    "SelectionError",
]


class MemorySavingError(GraphToolsError):
    """Base class of the errors of ``memsaving_gradients``."""


class ArgumentError(MemorySavingError, ValueError):
    """An argument cannot be used.

    Attributes
    ----------
    argument
        Its name.
    value
        What was given.
    """

    def __init__(self, argument: str, value: Any, problem: str) -> None:
        super().__init__(f"{argument}={_show(value)}: {problem}")
        self.argument = argument
        self.value = value


class SelectionError(ArgumentError):
    """A checkpoint names nothing, or nothing that can be a checkpoint."""


class EagerExecutionError(MemorySavingError, RuntimeError):
    """Gradients were asked for outside of a graph, where nothing can be rewired."""


class PatchError(MemorySavingError, RuntimeError):
    """TensorFlow is patched already, or is not."""


class NothingSavedWarning(UserWarning):
    """Plain gradients were returned, or a plan was used that lowers no peak."""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
