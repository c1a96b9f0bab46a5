"""Examples of the documentation: finding them, and running those that stand alone.

A block of Python that begins with an import stands alone, as the guide tells its readers. A block
of text right behind it is what it prints.
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
        Where its text begins.
    kind
        The language that stands behind the fence.
    text
        What is in it.
    prints
        What it prints, as far as the page says so.
    """

    page: Path
    line: int
    kind: str
    text: str
    prints: str | None

    @property
    def stands_alone(self) -> bool:
        """Whether readers may expect that it runs as it is."""
        return self.kind == "python" and self.text.startswith(("import ", "from "))

    @property
    def place(self) -> str:
        """The page and the line, to be told."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*pages: Path) -> Iterator[Block]:
    """The blocks of ``pages``, in order."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("text")) + 1
            yield Block(page, line, found["kind"], found["text"], found["prints"])


def run(files: list[Path]) -> list[str]:
    """Run programs one after the other, as one reader would; what each has printed."""
    os.chdir(ROOT)
    # Keras imports what it would warn of later.
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
