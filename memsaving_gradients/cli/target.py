"""A training step that is to be explained, as a value, and the cause of an error in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Target", "cause"]

#: Layout: letters of a cause that are shown.
MOST_LETTERS = 400


@dataclass(frozen=True)
class Target:
    """A training step.

    Attributes
    ----------
    step
        A function that asks for gradients, or a compiled Keras model.
    args
        Its arguments, as shapes and dtypes.
    options
        How it is to be looked at: options of `memsaving_gradients.explain`.
    assumed
        What nobody said, each with what to say it with.
    """

    step: Any
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def cause(error: BaseException) -> str:
    """An error in one line.

    Examples
    --------
    >>> cause(ValueError("the shapes\\n  do not match"))
    'ValueError: the shapes do not match'
    """
    text, name = str(error).strip(), type(error).__name__
    if text.startswith("in user code:"):
        # AutoGraph's own traceback, and its own type; what went wrong stands at the end.
        text, name = re.split(r"\n\s*\n", text)[-1], ""
    said = " ".join(text.split())
    if len(said) > MOST_LETTERS:
        said = said[: MOST_LETTERS - 1] + "…"
    return f"{name}: {said}" if name and said else name or said
