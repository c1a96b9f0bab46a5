"""Counts the lines that a user adds to plain training for a way to save memory.

Functions are parsed and written out again, so that a line is a statement however it was wrapped;
docstrings and comments are gone. What is compared with the plain function's lines is counted if it
was added or changed.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def code_lines(function: Callable[..., Any]) -> list[str]:
    """The lines of a function's body, without docstrings and comments, one for each statement.

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
    """Lines of ``function``, and of what it calls (``others``), that are not in ``to``."""
    lines = [line for each in (function, *others) for line in code_lines(each)]
    difference = difflib.ndiff(code_lines(to), lines)
    return sum(line.startswith("+ ") for line in difference)
