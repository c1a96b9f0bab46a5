"""Networks that other people wrote: what `benchmarks.zoo.compatibility` trains, a row for each.

A row is named ``family/network``. What there is in a family is read off the library that ships it,
so that a new version of the library brings its new networks; sizes follow from rules about names of
parameters and shapes of outputs, not from a list of cases. All weights are random: nothing is
downloaded.
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
    """Where the networks of one library are made.

    Attributes
    ----------
    module
        Of this package: has ``names()`` and ``build(name)``.
    library
        What it imports.
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
    """A family is asked for whose library is not installed."""


def rows(only: str = "*") -> list[str]:
    """Names of all rows that match a glob.

    Raises
    ------
    MissingLibraryError
        A row that matches may be of a library that is not installed: no row is left out in silence.
    """
    family_glob = only.partition("/")[0] if "/" in only else "*"
    found: list[str] = []
    for name, family in FAMILIES.items():
        if not fnmatch.fnmatch(name, family_glob):
            continue
        if importlib.util.find_spec(family.library) is None:
            raise MissingLibraryError(
                f"{family.library} is not installed, which has the networks {name}/* that {only!r}"
                " may mean some of: pip install memsaving-gradients[models], or name another"
                " family, as in --only 'compatibility/applications/*'"
            )
        found += (f"{name}/{network}" for network in _module(family).names())
    return [row for row in found if fnmatch.fnmatch(row, only)]


def build(row: str) -> Model:
    """Make the network of a row."""
    family, _, network = row.partition("/")
    if family not in FAMILIES:
        raise ValueError(f"row={row!r}: there is no such family; there are {', '.join(FAMILIES)}")
    model: Model = _module(FAMILIES[family]).build(network)
    return model


def _module(family: Family) -> Any:
    return importlib.import_module(f"benchmarks.zoo.{family.module}")
