"""Examples of the documentation: finding them, and running complete programs.

A block of Python that begins with an import is a complete program, as the guide tells its readers.
A block of text right after it is its output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$(?:\n\n^```text\n(?P<prints>.*?)^```$)?", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes
    ----------
    page, line
        The place where its text begins.
    kind
        The language named after the fence.
    text
        Its text.
    prints
        Its output, if the page shows it.
    """

    page: Path
    line: int
    kind: str
    text: str
    prints: str | None

    @property
    def stands_alone(self) -> bool:
        """Whether readers may expect the block to run unchanged."""
        return self.kind == "python" and self.text.startswith(("import ", "from "))

    @property
    def place(self) -> str:
        """The page and the line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*pages: Path) -> Iterator[Block]:
    """Yield the blocks of ``pages``, in order."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("text")) + 1
            yield Block(page, line, found["kind"], found["text"], found["prints"])


def run(files: list[Path]) -> list[str]:
    """Run programs one after the other, as one reader would; return the output of each."""
    os.chdir(ROOT)
    # An import of Keras now avoids its warnings about later imports.
    import keras  # noqa: F401

    printed = []
    for file in files:
        said = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(said):
            warnings.simplefilter("error", UserWarning)
            if "Warning" in file.read_text(encoding="utf-8"):
                warnings.simplefilter("default", UserWarning)
            runpy.run_path(str(file), run_name="__main__")
        printed.append(said.getvalue())
    return printed
