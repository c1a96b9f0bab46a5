"""``python -m benchmarks``: measure the claims, print them beside their bars, keep them."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.claims.cases import CASES, Case
from benchmarks.claims.runner import run
from benchmarks.claims.table import missed, print_results
from graph_tools.errors import GraphToolsError

RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for; 1 if a bar is missed or a case fails."""
    options = _parse(arguments)
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, options.only)]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        print(f"--only {options.only!r} matches no case; there are {names}", file=sys.stderr)
        return 2
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    results: dict[str, Any] = {}
    console = Console(stderr=True)
    for i, case in enumerate(cases, start=1):
        start = time.perf_counter()
        console.print(f"[{i}/{len(cases)}] {case.name}", end=" ", markup=False, highlight=False)
        results[case.name] = _guarded(case)
        console.print(f"{time.perf_counter() - start:.0f} s", highlight=False)
        _write(options.json, results)
    print_results(cases, results)
    return 1 if missed(cases, results) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of cases, with * and ?")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="results file")
    parser.add_argument("--list", action="store_true", help="print the names of cases, and stop")
    return parser.parse_args(arguments)


def _guarded(case: Case) -> dict[str, Any]:
    """The result of a case, or what it died of: one bad case must not cost the others' hour."""
    try:
        return run(case)
    except GraphToolsError as error:
        return {"failed": str(error)}


def _write(path: Path, results: dict[str, Any]) -> None:
    """Put results into the file at `path`; cases that did not run keep their last ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    stamp = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tensorflow": version("tensorflow"),
        "keras": version("keras"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    new = {name: {**stamp, **result} for name, result in results.items()}
    text = json.dumps({"cases": {**old, **new}}, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
