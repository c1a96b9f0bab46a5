"""Files of results: a JSON entry for each row, with versions, processor and time of its run."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.experiment import Judged

RESULTS = Path(__file__).parent / "results"


def stamp() -> dict[str, str]:
    """Return the time, the versions and the machine of a result."""
    return {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tensorflow": version("tensorflow"),
        "keras": version("keras"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file by row; a file without rows is one row, named like the file.

    Rows of old files that have an error message in place of a result are left out.
    """
    if not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = document.get("cases", {path.stem: document})
    return {row: one for row, one in found.items() if not isinstance(one.get("failed"), str)}


def write(
    path: Path, results: Mapping[str, Mapping[str, Any]], figures: Iterable[Judged] | None = None
) -> None:
    """Write results into a file, which keeps its other rows, and its figures if none are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = old.get("figures", []) if figures is None else [_judged(figure) for figure in figures]
    made = {name: {**result, **stamp()} for name, result in results.items()}
    document = {"cases": {**read(path), **made}, "figures": kept}
    text = json.dumps(document, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _judged(figure: Judged) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(figure).items() if value is not None}
    return {**fields, "passed": figure.passed}
