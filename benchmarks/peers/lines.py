"""Counts the lines that a user adds to plain training for a way to save memory.

Functions are parsed and unparsed, so that each statement is one line, however it was wrapped, and
docstrings and comments disappear. The count is the number of lines that differ from the plain
function's: added or changed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def code_lines(function: Callable[..., Any]) -> list[str]:
    """Return the lines of a function's body, one a statement, without docstrings and comments.

    Examples
    --------
    >>> code_lines(added_lines)[-1].strip()
    'return sum((line.startswith("+ ") for line in difference))'
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    body = tree.body[0]
    assert isinstance(body, ast.FunctionDef)
    return ast.unparse(ast.Module(body.body, [])).replace("'", '"').splitlines()


def added_lines(function: Callable[..., Any], *others: Callable[..., Any], to: Any) -> int:
    """Count the lines of ``function``, and of ``others`` that it calls, that are not in ``to``."""
    lines = [line for each in (function, *others) for line in code_lines(each)]
    difference = difflib.ndiff(code_lines(to), lines)
    return sum(line.startswith("+ ") for line in difference)
