"""What a user can ask for, checked once and passed on as one value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memsaving_gradients.errors import ArgumentError

__all__ = ["MODES", "Options"]

#: Ways to choose checkpoints automatically.
MODES = ("auto", "memory", "speed", "collection")

#: Larger batches would overflow the bytes of tensors.
MOST_EXAMPLES = 10**9


@dataclass(frozen=True)
class Options:
    """How to save memory.

    Attributes
    ----------
    checkpoints
        One of `MODES`; or tensors, operations, names or glob patterns of names; or ``None`` (or nothing) to
        recompute everything from the inputs.
    hold_gradients
        Whether gradients stay alive until all of them are made (global norm clipping, loss scaling). Affects
        planning only.
    xla
        Whether the graph is compiled by XLA; ``None`` finds out from the function being traced.
    batch_size
        Stands in for an unknown batch dimension when bytes are estimated.

    Examples
    --------
    >>> Options(checkpoints="memory").checkpoints
    'memory'
    >>> Options(checkpoints="memroy")
    Traceback (most recent call last):
        ...
    memsaving_gradients.errors.ArgumentError: checkpoints='memroy': unknown mode; did you mean 'memory'? \
Modes are 'auto', 'memory', 'speed', 'collection'; to name tensors, give a list: ['memroy']
    """

    checkpoints: Any = "auto"
    hold_gradients: bool = False
    xla: bool | None = None
    batch_size: int = 32

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """Options from keyword arguments that were passed on; an unknown one is an error that names it."""
        known = [field.name for field in fields(cls)]
        for name, value in keywords.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ArgumentError(
                    name, value, f"no such option; {hint}Options are {_listed(known)}"
                )
        return cls(**keywords)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", _checked(self.checkpoints))
        if not isinstance(self.hold_gradients, bool):
            raise ArgumentError("hold_gradients", self.hold_gradients, "give True or False")
        if self.xla is not None and not isinstance(self.xla, bool):
            raise ArgumentError("xla", self.xla, "give True, False or None (find out)")
        whole = isinstance(self.batch_size, (int, np.integer))
        whole = whole and not isinstance(self.batch_size, bool)
        if not whole or not 1 <= self.batch_size <= MOST_EXAMPLES:
            raise ArgumentError(
                "batch_size",
                self.batch_size,
                f"give a number of examples from 1 to {MOST_EXAMPLES:,}",
            )


def _checked(checkpoints: Any) -> str | tuple[Any, ...]:
    if checkpoints is None:
        return ()
    if isinstance(checkpoints, str):
        if checkpoints in MODES:
            return checkpoints
        close = difflib.get_close_matches(checkpoints, MODES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ArgumentError(
            "checkpoints",
            checkpoints,
            f"unknown mode; {hint}Modes are {_listed(MODES)}; to name tensors, give a list: "
            f"[{checkpoints!r}]",
        )
    if isinstance(checkpoints, (bytes, dict)) or not isinstance(checkpoints, Iterable):
        raise ArgumentError(
            "checkpoints",
            checkpoints,
            f"give one of {_listed(MODES)}, None, or a list",
        )
    if hasattr(checkpoints, "dtype"):
        raise ArgumentError(
            "checkpoints", checkpoints, "a single tensor; put it in a list: checkpoints=[tensor]"
        )
    return tuple(checkpoints)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
