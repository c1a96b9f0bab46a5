"""The documentation is complete, builds without a warning, and its statements are true."""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import subprocess
import sys
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import memsaving_gradients as ms
from memsaving_gradients.cli.arguments import PROGRAM, parse
from memsaving_gradients.engine.options import Options
from tests.helpers.documented import PAGES, ROOT, Block, blocks
from tests.helpers.fresh import fresh
from tests.helpers.public import public_names

PYTHON = [block for block in blocks(*PAGES) if block.kind == "python"]
#: The programs of these pages take long, and repeat `test_explain`, `test_largest_batch` and
#: `test_fitting`.
LONG = ("seeing.md", "fit-to.md")
RUNNABLE = [
    pytest.param(page, marks=pytest.mark.slow if page.name in LONG else [])
    for page in PAGES
    if any(block.stands_alone for block in blocks(page))
]
COMMANDS = [
    (block.place, line)
    for block in blocks(*PAGES)
    if block.kind == "sh"
    for line in block.text.splitlines()
    if line.startswith(PROGRAM)
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in a folder of its own, and return the folder."""
    folder = tmp_path_factory.mktemp("documentation") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {
        page.relative_to(ROOT / "docs").with_suffix(".html")
        for page in PAGES
        if ROOT / "docs" in page.parents
    }
    missing = {str(page) for page in pages if not (site / page).is_file()}
    assert pages and not missing
    assert "rewires the backward graph" in (site / "index.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    for attribute in ('src="', 'rel="stylesheet" href="'):
        parts = page.split(attribute)[1:]
        assert parts and not [part[:60] for part in parts if part.startswith(("http", "//"))]


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    _, body = (site / "objects.inv").read_bytes().split(b"using zlib.\n", 1)
    known = {line.split()[0] for line in zlib.decompress(body).decode().splitlines()}
    public = public_names()
    assert len(public) > 70
    assert [name for name, what in public.items() if not {name, _place(what)} & known] == []


def _place(what: Any) -> str:
    """Return where something is defined; a function may have the name of its module."""
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', '')}"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_is_python_and_names_what_there_is(block: Block) -> None:
    """Programs in the text compile. The names of this package in them exist and take the given
    arguments."""
    options = {field.name for field in fields(Options)}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute):
            _named(node)
        if not isinstance(node, ast.Call) or (called := _named(node.func)) is None:
            continue
        takes = inspect.signature(called).parameters
        more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        given = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        assert given <= takes.keys() | (options if more else set()), block.place


def _named(node: ast.expr) -> Any:
    """Return the object that ``ms.…`` names, ``None`` for other expressions; fail if there is no
    such object."""
    if isinstance(node, ast.Name):
        return ms if node.id == "ms" else None
    if not isinstance(node, ast.Attribute):
        return None
    of = _named(node.value)
    return None if of is None else getattr(of, node.attr)


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_stands_alone_runs(page: Path, tmp_path: Path) -> None:
    """A fresh process runs each page's programs. They print the page's output, and warn only as the
    page says."""
    alone = [block for block in blocks(page) if block.stands_alone]
    files = [tmp_path / f"line_{block.line}.py" for block in alone]
    for file, block in zip(files, alone, strict=True):
        file.write_text(block.text, encoding="utf-8")
    printed = fresh("tests.helpers.documented:run", files=files)
    for block, said in zip(alone, printed, strict=True):
        assert block.prints is None or said == block.prints, block.place


@pytest.mark.parametrize(("place", "line"), COMMANDS)
def test_commands_are_understood(place: str, line: str) -> None:
    arguments = shlex.split(line)[len(PROGRAM.split()) :]
    assert parse(arguments).command == "explain"
