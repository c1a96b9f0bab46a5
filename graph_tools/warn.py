"""Warnings that point at the user's line, not at ours or at TensorFlow's."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from functools import lru_cache
from typing import Any

from graph_tools.tf_private import graphs

__all__ = ["warn"]

#: A warning never points at a line in one of these packages.
PACKAGES = ("graph_tools", "memsaving_gradients", "tensorflow", "keras")

#: For each file, its warnings so far, which filters need to show each warning only once.
_said: dict[str, dict[Any, Any]] = {}


def warn(message: str, category: type[Warning]) -> None:
    """Warn, as ``warnings.warn`` does, at the innermost line outside of `PACKAGES`.

    (``skip_file_prefixes`` needs Python 3.12, and does not see through the code that AutoGraph
    generates.)

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as found:
    ...     warnings.simplefilter("always")
    ...     warn("mind the gap", UserWarning)
    >>> found[0].filename.startswith("<doctest")
    True
    """
    file, line = _users_line()
    warnings.warn_explicit(message, category, file, line, registry=_said.setdefault(file, {}))


def _users_line() -> tuple[str, int]:
    stack = graphs.stack()
    for file, line in reversed(stack):
        if not _is_ours(file):
            return file, line
    # The stack is a thread of TensorFlow's, without code of the user.
    return stack[0]


@lru_cache(maxsize=1024)
def _is_ours(file: str) -> bool:
    if file.startswith("<frozen") or file == contextlib.__file__:
        return True
    folders = (
        os.path.dirname(getattr(sys.modules.get(name), "__file__", None) or "") for name in PACKAGES
    )
    return file.startswith(tuple(os.path.join(folder, "") for folder in folders if folder))
