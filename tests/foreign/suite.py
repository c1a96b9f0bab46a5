"""The tests that Keras' wheel ships, and the places of their results. Folders without gradients are
left out."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from tests.foreign.modes import PLAIN

__all__ = ["FOLDERS", "files_of", "keras_sources", "key_of", "written_to"]

LIBRARY = Path(__file__).resolve().parents[2]

#: Folders of Keras whose tests differentiate, in the order of the run.
FOLDERS = (
    *("layers/rnn", "trainers", "callbacks", "optimizers", "models", "layers/attention"),
    *("layers/convolutional", "layers/normalization", "layers/core", "losses", "saving"),
    *("backend/tensorflow", "layers/activations", "layers/merging", "layers/pooling"),
    *("layers/regularization", "layers/reshaping", "layers/preprocessing", "layers"),
    *("distillation", "metrics", "wrappers", "export", "quantizers", "legacy", "utils", "ops"),
)


def keras_sources() -> Path:
    """Return the folder of Keras' sources, without importing Keras."""
    found = importlib.util.find_spec("keras")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "src"


def files_of(root: Path, folders: Iterable[str], only: Iterable[str] = ()) -> list[Path]:
    """Return files of tests in ``folders`` of ``root``, in that order; ``only``: files with one of
    these in their names."""
    patterns = list(only)
    found = [file for folder in folders for file in sorted((root / folder).rglob("*_test.py"))]
    return [
        file
        for file in dict.fromkeys(found)
        if not patterns or any(pattern in str(file.relative_to(root)) for pattern in patterns)
    ]


def written_to(cache: Path, root: Path, file: Path, mode: str) -> Path:
    """Return the file of results for the tests of ``file``."""
    return cache / mode / file.relative_to(root).with_suffix(".jsonl")


def key_of(mode: str) -> str:
    """Return a key of all that results depend on: versions, and in `PATCHED` modes this library."""
    names = ("tensorflow", "keras", "numpy")
    key = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return key if mode == PLAIN else f"{key}, {_digest()}"


def _digest() -> str:
    digest = hashlib.sha256()
    for package in ("graph_tools", "memsaving_gradients"):
        for file in sorted((LIBRARY / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
