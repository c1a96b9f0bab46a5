"""``python -m benchmarks.zoo.compatibility``: networks that other people wrote, trained within budgets.

Every architecture of ``keras.applications``, the backbones of KerasHub, TensorFlow models of ``transformers``, and Keras 2 (:mod:`benchmarks.zoo.families`),
at small sizes. For each: the gradients of a step with the default plan, and within a budget of 45 %, beside TensorFlow's own, to the last bit, with the state after
the step; the measured peak of plain training, of the default plan, and within 45 and 40 % of what plain training takes, or within the least
budget that is named where no plan fits.

Each figure has a process of its own, and a plan for a budget a minute to be searched for. Results are written after each row, and what is
there is not measured again: ``--again`` measures those whose code was another. A row takes one to five minutes. ``docs/compatibility.md`` is made
of the results at the end, and by ``--only ''`` at once. Needs the extra ``models``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arguments import at_least_one, count, new_file
from benchmarks.arguments import shares as parse_shares
from benchmarks.bars import options_for, write
from benchmarks.claims.budgets import planned
from benchmarks.claims.runner import ENVIRONMENT
from benchmarks.zoo import families as foreign
from benchmarks.zoo.page import failures, page, print_results
from graph_tools.errors import GraphToolsError
from graph_tools.memory.measure import in_fresh_process

__all__ = ["LIBRARIES", "SHARES", "code_version", "main", "measure", "pending"]

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
#: Of what plain training takes; the first one's plan is the one whose gradients are compared.
SHARES = (0.45, 0.40)
#: How long a plan for a budget is searched for, at most.
PLANNING_SECONDS = 60.0
#: Distributions whose versions stand in the results.
LIBRARIES = ("tensorflow", "keras", "keras-hub", "transformers", "tf-keras")


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows asked for, print all that are known, write the page; 1 if a row of those asked for fails."""
    options = _parse(arguments)
    try:
        rows = foreign.rows(options.only) if options.only else []
    except foreign.MissingLibraryError as error:
        print(error, file=sys.stderr)
        return 2
    if options.only and not rows:
        print(f"--only {options.only!r} matches no row; see --list", file=sys.stderr)
        return 2
    if options.list:
        print(*rows, sep="\n")
        return 0
    results = _known(options.json)
    code = code_version()
    console, lock = Console(stderr=True), threading.Lock()

    def one(row: str) -> None:
        begun = time.perf_counter()
        # What was measured with this code stays.
        old = results.get(row, {})
        known = old if old.get("code") == code else {}
        result = measure(row, options.budgets, known=known, pairs=options.pairs)
        minutes = (time.perf_counter() - begun) / 60 + known.get("minutes", 0)
        result |= {"code": code, "libraries": libraries(), "minutes": round(minutes, 1)}
        said = "; ".join(failures(result)) or "pass"
        with lock:
            results[row] = result
            write(options.json, {row: result})
            console.print(
                f"{row}: {said}, {result['minutes']} min",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    todo = pending(rows, results, code, options.budgets, again=options.again)
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(one, row) for row in todo]:
            done.result()
    print_results(results, Console(width=180))
    if options.page is not None:
        known = _known(options.json)
        options.page.write_text(page(known, _lacking_rows(known)), encoding="utf-8")
    return int(any(failures(results[row]) for row in rows))


def pending(
    rows: Sequence[str],
    results: Mapping[str, Mapping[str, Any]],
    code: str,
    shares: Sequence[float],
    *,
    again: bool,
) -> list[str]:
    """The rows that lack results for some of ``shares``; with ``again``, those of another code as well."""
    return [
        row
        for row in rows
        if row not in results
        or _lacking(results[row], shares)
        or (again and results[row].get("code") != code)
    ]


def _lacking(result: Mapping[str, Any], shares: Sequence[float]) -> list[float]:
    """The shares that are still to be asked for, the largest first: none below one that is refused, and none where plain training fails."""
    done = {**result.get("budgets", {}), **result.get("failed", {})}
    refused = [share for share in shares if done.get(_name(share), {}) and _refused(done, share)]
    least = max(refused, default=0.0)
    return sorted(
        (s for s in shares if _name(s) not in done and "plain" not in done and s > least),
        reverse=True,
    )


def _refused(done: Mapping[str, Any], share: float) -> bool:
    found = done[_name(share)]
    return not isinstance(found, str) and found["refused"] is not None


def _name(share: float) -> str:
    return f"{share:.0%}"


def _lacking_rows(results: Mapping[str, Any]) -> list[str]:
    """All rows without results, of the libraries that are installed."""
    found = []
    for family in foreign.FAMILIES:
        with contextlib.suppress(foreign.MissingLibraryError):
            found += [row for row in foreign.rows(f"{family}/*") if row not in results]
    return found


@functools.cache
def code_version() -> str:
    """What the packages' sources are, all of them; the same for the same text."""
    digest = hashlib.sha256()
    for package in ("graph_tools", "memsaving_gradients"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def libraries() -> dict[str, str]:
    """Versions of what is installed of `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(
    row: str,
    shares: Sequence[float] = SHARES,
    *,
    known: Mapping[str, Any] | None = None,
    pairs: int = 0,
    sizes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All figures of a row; what cannot be measured stands in ``"failed"`` by part, and costs the other parts nothing.

    ``known``: figures that stay; ``sizes``: of an application, other ones (`benchmarks.zoo.applications.build_small`).
    """
    what: dict[str, Any] = {"model": "foreign", "options": {"row": row, **(sizes or {})}}
    result: dict[str, Any] = {"budgets": {}, "failed": {}, **copy.deepcopy(dict(known or {}))}

    def part(name: str, target: str, **kwargs: Any) -> Any:
        try:
            return in_fresh_process(f"benchmarks.{target}", {**what, **kwargs}, ENVIRONMENT)
        except GraphToolsError as error:
            result["failed"][name] = _brief(error)
            return None

    if "plain" not in result:
        result["plain"] = part("plain", "probes:peak", ours=False)
    if result["plain"] is None:
        return result
    if "default" not in result:
        result["default"] = part("default", "probes:peak", ours=True, checkpoints="auto")
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        plan = Path(folder, "plan.json")
        while lacking := _lacking(result, shares):
            name = _name(lacking[0])
            try:
                result["budgets"][name] = _within(what, lacking[0], result["plain"]["peak"], plan)
            except GraphToolsError as error:
                result["failed"][name] = _brief(error)
                continue
            if pairs:
                result["budgets"][name]["time"] = part(
                    f"{name} time",
                    "probes:budget_ratio",
                    plan=str(plan),
                    pairs=pairs,
                    profile=False,
                )
            if "gradients" not in result:
                budget = result["budgets"][name]["ours"]["plan"]["budget"]
                ours = [{}, [{"plan": str(plan)}, {"budget": budget}]]
                result["gradients"] = part("gradients", "zoo.sameness:compare", ours=ours)
                if result["gradients"] and not all(r["equal"] for r in result["gradients"]):
                    result["spread"] = part("spread", "zoo.sameness:spread", ours=ours)
    if "gradients" not in result:
        result["gradients"] = part("gradients", "zoo.sameness:compare", ours=[{}])
    return result


def _within(what: Mapping[str, Any], share: float, plain: int, plan: Path) -> dict[str, Any]:
    """A step within a share of what plain training takes, or within the least budget; its plan is saved."""
    settings = {"planning_seconds": PLANNING_SECONDS}
    ours, refused = planned(what, share, settings, str(plan), requested=False)
    if refused is not None and "refused" in ours:
        raise GraphToolsError(
            f"the least budget named, {refused['least']:,} bytes, is refused: "
            f"{ours['refused']['least']:,} bytes are named then"
        )
    return {"ours": ours, "refused": refused, "allowed": int(share * plain), "time": None}


def _brief(error: Exception) -> str:
    """The last lines of what a process died of."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[-6:])[-1500:]


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return found


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("compatibility", __doc__, RESULTS, "names of rows, with * and ?")
    parser.add_argument("--list", action="store_true", help="print the names of rows, and stop")
    parser.add_argument(
        "--again", action="store_true", help="also rows that were measured with other code"
    )
    parser.add_argument(
        "--budgets",
        default=list(SHARES),
        type=parse_shares,
        metavar="SHARES",
        help="of what plain training takes, such as 0.45; those that a row lacks are measured",
    )
    parser.add_argument("--jobs", type=at_least_one, default=1, metavar="N", help="rows at a time")
    parser.add_argument(
        "--pairs", type=count, default=0, metavar="N", help="of steps for times; 0: no times"
    )
    parser.add_argument(
        "--page", type=new_file, default=PAGE, metavar="PATH", help="what is written"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
