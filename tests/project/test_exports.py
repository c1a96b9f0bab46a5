"""Every name that a module imports from another one is in that module's ``__all__``, if it has
one; so ``__all__`` lists what other modules use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.sources import ROOT, SOURCES


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {_module(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def _exports(tree: ast.Module) -> set[str] | None:
    """Return the names in ``__all__``; ``None``: the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {str(name) for name in ast.literal_eval(node.value)}
    return None


def _used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each use of a name of another module: by a ``from`` import,
    or as an attribute of an imported module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in TREES:
            for alias in node.names:
                if (whole := f"{node.module}.{alias.name}") in TREES:
                    modules[alias.asname or alias.name] = whole
                else:
                    yield node.module, alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield modules[ast.unparse(node.value)], node.attr


def test_names_that_other_modules_use_are_exported() -> None:
    exports = {module: _exports(tree) for module, tree in TREES.items()}
    found = {
        f"{module}.{name}"
        for user, tree in TREES.items()
        for module, name in _used(tree)
        if (known := exports[module]) is not None and name not in {"__all__", *known}
    }
    assert sorted(found) == []
