"""Every public name has a test: a test, or an example that runs, contains the name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.public import public_names
from tests.helpers.sources import ROOT, SOURCES

THIS = Path(__file__)


def test_every_public_name_is_in_a_test_or_an_example() -> None:
    names = public_names()
    texts = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != THIS
    ]
    texts += [
        line.strip()
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith((">>> ", "... "))
    ]
    words = {*re.findall(r"\w+", "\n".join(texts))}
    assert [name for name in names if name.rpartition(".")[2] not in words] == []
