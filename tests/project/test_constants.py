"""Constants that hold chosen numbers: how many there are, and that each one's comment explains it.

A module-level constant that holds a number is one of three kinds. The comment above a fact begins
with ``Fact:`` (a format, a rule of TensorFlow, a measured figure). The comment above a measure of
what people see begins with ``Layout:``. All others are tuning constants. Their comments say what
the number decides, its unit, and how it was measured; a number without a measurement was chosen by
judgement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.sources import ROOT, SOURCES

#: The number of tuning constants. Lower it when one goes; raise it only for a number that can
#: neither be derived nor shared with another place.
MOST = 120


def _constants(text: str) -> Iterator[tuple[list[str], int]]:
    """Yield the names in each module-level assignment of numbers to constants, and its line."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        else:
            continue
        elements = target.elts if isinstance(target, ast.Tuple) else [target]
        names = [name.id for name in elements if isinstance(name, ast.Name)]
        assert node.value is not None
        numbers = (
            type(part.value) in (int, float)
            for part in ast.walk(node.value)
            if isinstance(part, ast.Constant)
        )
        if any(numbers) and (constants := [n for n in names if n.strip("_").isupper()]):
            yield constants, node.lineno


def _comment(lines: list[str], line: int) -> str:
    """Return the comment above a line, or above the constants right before it; or else the string
    below it."""
    first = line - 1
    while first and not lines[first - 1].startswith("#") and lines[first - 1].strip():
        first -= 1
    begin = first
    while begin and lines[begin - 1].startswith("#"):
        begin -= 1
    return " ".join(text.lstrip("#: ") for text in lines[begin:first]) or _string(lines[line:])


def _string(lines: list[str]) -> str:
    return lines[0].strip('"') if lines and lines[0].startswith('"""') else ""


def _tuning(path: Path) -> list[tuple[str, str]]:
    """Return the tuning constants of a module and their comments."""
    text = path.read_text()
    found = [
        (name, _comment(text.splitlines(), at)) for names, at in _constants(text) for name in names
    ]
    return [(name, why) for name, why in found if not why.startswith(("Fact:", "Layout:"))]


def test_tuning_constants_do_not_grow() -> None:
    found = [f"{path.relative_to(ROOT)} {name}" for path in SOURCES for name, _ in _tuning(path)]
    assert len(found) <= MOST, "\n".join(found)
    assert len(found) == MOST, f"there are {len(found)} left: say so in MOST"


def test_each_tuning_constant_says_what_it_is() -> None:
    silent = [
        f"{path.relative_to(ROOT)} {name}"
        for path in SOURCES
        for name, why in _tuning(path)
        if len(why) < 20
    ]
    assert silent == []
