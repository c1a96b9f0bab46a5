"""Networks that other people wrote, trained within budgets.

The networks are every architecture of ``keras.applications``, the backbones of KerasHub, TensorFlow
models of ``transformers``, and Keras 2 (:mod:`benchmarks.zoo.families`), at small sizes. Each row
compares the gradients of a step, and the state after it, with TensorFlow's own, to the last bit:
with the default plan, and within a budget of 45 %. It measures the peak of plain training, of the
default plan, and within 45 and 40 % of plain training. If no plan fits, it uses the least budget
that the error names.

Each figure has a process of its own; the search for a plan may take a minute. A row takes one to
five minutes. ``--again`` measures rows of other versions of the code. Needs the extra ``models``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.claims.budgets import LeastRefusedError, planned
from benchmarks.experiment import Experiment, Figure, Job, Page, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.settings import pairs, shares
from benchmarks.zoo import families
from benchmarks.zoo.page import COLUMNS, failures, notes, page
from graph_tools.errors import GraphToolsError

ROOT = Path(__file__).parents[2]
#: Budgets as shares of plain training; the gradients of the first one's plan are compared.
SHARES = (0.45, 0.40)
#: The most seconds to search for a plan within a budget.
PLANNING_SECONDS = 60.0
#: Distributions whose versions the results record.
LIBRARIES = ("tensorflow", "keras", "keras-hub", "transformers", "tf-keras")


def run(job: Job) -> dict[str, Any]:
    """Measure the figures that a row lacks; keep figures measured with the same code."""
    begun, code = time.perf_counter(), code_version()
    known = job.known if job.known.get("code") == code else {}
    result = measure(job.row, job.settings["budgets"], known=known, pairs=job.settings["pairs"])
    minutes = (time.perf_counter() - begun) / 60 + known.get("minutes", 0)
    job.say(f"{job.row}: {'; '.join(failures(result)) or 'pass'}")
    return result | {"code": code, "libraries": libraries(), "minutes": round(minutes, 1)}


def due(result: Mapping[str, Any], settings: Settings, again: bool) -> bool:
    """Return whether a row lacks a budget or, with ``again``, is from another code version."""
    other = again and result.get("code") != code_version()
    return other or bool(_lacking(result, settings["budgets"]))


def bars(results: Results) -> list[Figure]:
    """Return the bars: the number of failures of each row."""
    return [Figure(f"{row}: misses", len(failures(one)), 0) for row, one in results.items()]


def _lacking(result: Mapping[str, Any], shares: Sequence[float]) -> list[float]:
    """Return the shares that are still to be measured, the largest first.

    Shares below a refused one are left out, and all shares if plain training fails.
    """
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


def installed() -> list[str]:
    """Return the rows of the libraries that are installed."""
    found: list[str] = []
    for family in families.FAMILIES:
        with contextlib.suppress(families.MissingLibraryError):
            found += families.rows(f"{family}/*")
    return found


def missing(settings: Settings, glob: str) -> str | None:
    """Return the message about a missing library that may have rows that the glob matches."""
    try:
        families.rows(glob)
    except families.MissingLibraryError as error:
        return str(error)
    return None


@functools.cache
def code_version() -> str:
    """Return a hash of the sources of both packages."""
    digest = hashlib.sha256()
    for package in ("graph_tools", "memsaving_gradients"):
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def libraries() -> dict[str, str]:
    """Return the versions of the installed `LIBRARIES`."""
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
    """Measure all figures of a row.

    If a part fails, its error is in ``"failed"``, and the other parts are still measured.
    ``known``: figures to keep; ``sizes``: other sizes of an application
    (`benchmarks.zoo.applications.build_small`).
    """
    what: dict[str, Any] = {"model": "foreign", "options": {"row": row, **(sizes or {})}}
    result: dict[str, Any] = {"budgets": {}, "failed": {}, **copy.deepcopy(dict(known or {}))}

    def part(name: str, target: str, **kwargs: Any) -> Any:
        try:
            return fresh(target, **what, **kwargs)
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
                more = {"plan": str(plan), "pairs": pairs, "profile": False}
                timed = part(f"{name} time", "probes:budget_ratio", **more)
                result["budgets"][name]["time"] = timed
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
    """Measure a step within a share of plain training, or the least budget, and save its plan."""
    settings = {"planning_seconds": PLANNING_SECONDS}
    ours, refused = planned(what, share, settings, str(plan), requested=False)
    if refused is not None and "refused" in ours:
        raise LeastRefusedError(refused["least"], ours["refused"]["least"])
    return {"ours": ours, "refused": refused, "allowed": int(share * plain), "time": None}


def _brief(error: Exception) -> str:
    """Return the last lines of a process's error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[-6:])[-1500:]


EXPERIMENT = Experiment(
    "compatibility",
    rows=lambda settings: installed(),
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    bars_in_columns=True,
    due=due,
    missing=missing,
    notes=notes,
    page=Page("compatibility.md", lambda results: page(results, installed())),
    settings={
        "budgets": Setting(list(SHARES), shares, "shares of plain training's peak: 0.45"),
        "pairs": pairs(0),
    },
)
