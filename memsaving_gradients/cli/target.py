"""A training step to explain, as a value, and the cause of an error in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Target", "cause"]

#: Layout: the most letters of a cause that are shown.
MOST_LETTERS = 400


@dataclass(frozen=True)
class Target:
    """A training step to explain.

    Attributes
    ----------
    step
        A function that asks for gradients, or a compiled Keras model.
    args
        The arguments of the step, as shapes and dtypes.
    options
        Options of `memsaving_gradients.explain`.
    assumed
        The assumptions made, each with the command-line option that changes it.
    """

    step: Any
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def cause(error: BaseException) -> str:
    """Return the text of an error in one line.

    Examples
    --------
    >>> cause(ValueError("the shapes\\n  do not match"))
    'ValueError: the shapes do not match'
    """
    text, name = str(error).strip(), type(error).__name__
    if text.startswith("in user code:"):
        # AutoGraph's own traceback, and its own type; the cause comes last.
        text, name = re.split(r"\n\s*\n", text)[-1], ""
    said = " ".join(text.split())
    if len(said) > MOST_LETTERS:
        said = said[: MOST_LETTERS - 1] + "…"
    return f"{name}: {said}" if name and said else name or said
