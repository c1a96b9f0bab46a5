"""Libraries that only reports need: imported when they are asked for, and missed with a word about
how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from memsaving_gradients.errors import MissingExtraError

__all__ = ["EXTRA", "needed"]

#: What to install this package with.
EXTRA = "plot"


def needed(module: str, purpose: str) -> Any:
    """Import ``module`` of an extra.

    Raises
    ------
    MissingExtraError
        If its library is not installed; it says what to install for ``purpose``.

    Examples
    --------
    >>> needed("no_such_library.parts", "Plan.plot")
    Traceback (most recent call last):
        ...
    memsaving_gradients.errors.MissingExtraError: Plan.plot needs no_such_library, which \
is not installed: pip install memsaving-gradients[plot]
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != library:
            # It is there, and something that it needs itself is not.
            raise
        raise MissingExtraError(purpose, library, EXTRA) from error
