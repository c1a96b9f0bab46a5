"""Networks that other people wrote: the rows of `benchmarks.zoo.compatibility`.

A row is named ``family/network``. Most families list the networks of the installed library, so that
a new version brings its new networks. Their sizes follow from rules about names of parameters and
shapes of outputs, not from a list of cases. All weights are random: nothing is downloaded.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from benchmarks.networks.base import Model


@dataclass(frozen=True)
class Family:
    """A source of networks: one library.

    Attributes
    ----------
    module
        Module of this package that has ``names()`` and ``build(name)``.
    library
        Library that the module imports.
    """

    module: str
    library: str


FAMILIES: dict[str, Family] = {
    "applications": Family("applications", "keras"),
    "transformers": Family("hugging_face", "transformers"),
    "tf_keras": Family("keras2", "tf_keras"),
    "hub": Family("hub", "keras_hub"),
}


class MissingLibraryError(ImportError):
    """The error if the library of a requested family is not installed."""


def rows(only: str = "*") -> list[str]:
    """Return the names of all rows that match a glob.

    Raises
    ------
    MissingLibraryError
        A library that may have matching rows is not installed: no row is left out silently.
    """
    family_glob = only.partition("/")[0] if "/" in only else "*"
    found: list[str] = []
    for name, family in FAMILIES.items():
        if not fnmatch.fnmatch(name, family_glob):
            continue
        if importlib.util.find_spec(family.library) is None:
            raise MissingLibraryError(
                f"{only!r} may match networks {name}/* of {family.library}, which is not installed;"
                " run pip install memsaving-gradients[models], or name another family, as in"
                " --only 'compatibility/applications/*'"
            )
        found += (f"{name}/{network}" for network in _module(family).names())
    return [row for row in found if fnmatch.fnmatch(row, only)]


def build(row: str) -> Model:
    """Make the network of a row."""
    family, _, network = row.partition("/")
    if family not in FAMILIES:
        raise ValueError(f"row={row!r}: unknown family; the families are {', '.join(FAMILIES)}")
    model: Model = _module(FAMILIES[family]).build(network)
    return model


def _module(family: Family) -> Any:
    return importlib.import_module(f"benchmarks.zoo.{family.module}")
