"""Libraries that only reports need: imported on first use, with an error that says what to install
where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from memsaving_gradients.errors import MissingExtraError

__all__ = ["EXTRA", "needed"]

#: The extra of this package that installs these libraries.
EXTRA = "plot"


def needed(module: str, purpose: str) -> Any:
    """Import ``module`` of an extra, and return it.

    Raises
    ------
    MissingExtraError
        If its library is not installed; the error says what to install for ``purpose``.

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
            # The library is installed, but a library that it needs is not.
            raise
        raise MissingExtraError(purpose, library, EXTRA) from error
