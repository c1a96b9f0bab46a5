"""Private names of TensorFlow and Keras are in `graph_tools.tf_private` and
`memsaving_gradients._keras` alone; a subclass may also use private names of its base."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.helpers.sources import ROOT, SOURCES

PLACES = ("graph_tools/tf_private/", "memsaving_gradients/_keras.py")
#: Public functions of Python with an underscore.
PUBLIC = {"_exit"}


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _own(node):
            yield node.attr


def _own(node: ast.Attribute) -> bool:
    """Return whether this is an attribute of ``self``, ``cls`` or ``super()``."""
    of = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(of, ast.Name) and of.id in ("self", "cls", "super")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of a private name of another library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _own(node):
            if node.attr not in own | PUBLIC:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in node.names:
                full = f"{module}.{name.name}"
                if "tensorflow.python" in full or "keras.src" in full:
                    yield node.lineno, full


def test_private_names_of_other_libraries_are_in_one_place() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    places = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    found = {
        f"{places[path]}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in _foreign(tree, own)
    }
    assert any(use.startswith(PLACES) for use in found)
    assert sorted(use for use in found if not use.startswith(PLACES)) == []
