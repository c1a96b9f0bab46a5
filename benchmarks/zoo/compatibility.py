"""Networks that other people wrote, trained within budgets.

Every architecture of ``keras.applications``, the backbones of KerasHub, TensorFlow models of
``transformers``, and Keras 2 (:mod:`benchmarks.zoo.families`), at small sizes. For each: the
gradients of a step with the default plan, and within a budget of 45 %, beside TensorFlow's own, to
the last bit, with the state after the step; the measured peak of plain training, of the default
plan, and within 45 and 40 % of what plain training takes, or within the least budget that is named
where no plan fits.

Each figure has a process of its own, and a plan for a budget a minute to be searched for. A row
takes one to five minutes. ``--again`` measures rows whose code was another. Needs the extra
``models``.
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

from benchmarks.claims.budgets import planned
from benchmarks.experiment import Experiment, Figure, Job, Page, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.settings import pairs, shares
from benchmarks.zoo import families
from benchmarks.zoo.page import COLUMNS, failures, notes, page
from graph_tools.errors import GraphToolsError

ROOT = Path(__file__).parents[2]
#: Of what plain training takes; the first one's plan is the one whose gradients are compared.
SHARES = (0.45, 0.40)
#: How long a plan for a budget is searched for, at most.
PLANNING_SECONDS = 60.0
#: Distributions whose versions stand in the results.
LIBRARIES = ("tensorflow", "keras", "keras-hub", "transformers", "tf-keras")


def run(job: Job) -> dict[str, Any]:
    """Measure what a row lacks; what was measured with this code stays."""
    begun, code = time.perf_counter(), code_version()
    known = job.known if job.known.get("code") == code else {}
    result = measure(job.row, job.settings["budgets"], known=known, pairs=job.settings["pairs"])
    minutes = (time.perf_counter() - begun) / 60 + known.get("minutes", 0)
    job.say(f"{job.row}: {'; '.join(failures(result)) or 'pass'}")
    return result | {"code": code, "libraries": libraries(), "minutes": round(minutes, 1)}


def due(result: Mapping[str, Any], settings: Settings, again: bool) -> bool:
    """Return whether a row lacks a budget; with ``again``, whether its code was another as well."""
    other = again and result.get("code") != code_version()
    return other or bool(_lacking(result, settings["budgets"]))


def bars(results: Results) -> list[Figure]:
    """Return how much each row misses."""
    return [Figure(f"{row}: misses", len(failures(one)), 0) for row, one in results.items()]


def _lacking(result: Mapping[str, Any], shares: Sequence[float]) -> list[float]:
    """Return the shares to ask for, the largest first.

    None is below one that is refused, and there is none where plain training fails.
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
    """Return the library that is not installed and may have rows that the glob names."""
    try:
        families.rows(glob)
    except families.MissingLibraryError as error:
        return str(error)
    return None


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
    """Measure all figures of a row.

    A part that cannot be measured has its error in ``"failed"``, and costs the other parts nothing.
    ``known``: figures that stay; ``sizes``: of an application, other ones
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
    """A step within a share of what plain training takes, or the least budget; saves its plan."""
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
        "budgets": Setting(list(SHARES), shares, "shares of what plain training takes: 0.45"),
        "pairs": pairs(0),
    },
)
