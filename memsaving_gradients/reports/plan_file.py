"""Files of plans: JSON with a version, a checksum, and the fingerprint of the graph that the plan
is for.

A schedule is a list of entries: ``[first, last]`` for original ops that run one after the other and
read originals, ``[op, copy, [copies read]]`` for any other execution. Types of ops are numbers into
a table, and their checksums are numbers: the file of a step of 100,000 ops takes a few megabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from memsaving_gradients.capture.fingerprint import Fingerprint
from memsaving_gradients.errors import PlanError
from memsaving_gradients.reports.plan_values import Decision, PlanValues
from memsaving_gradients.schedules.schedule import LAG, Schedule, Step
from memsaving_gradients.schedules.storage import Stored

__all__ = ["load", "packed_steps", "save", "unpacked_steps"]

AnyPlan = TypeVar("AnyPlan", bound=PlanValues)

FORMAT = "memsaving_gradients plan"
#: Fact: the version of the file format.
VERSION = 1

#: Fields of a plan that are written as they are.
_PLAIN = (
    "mode planner budget planned_for peak_plain peak extra_time lower_bound optimal complete clones"
    " gating packed"
).split()


def save(plan: PlanValues, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` to a file; an older file is replaced only when the new one is complete."""
    body = _body(plan)
    text = json.dumps(
        {"format": FORMAT, "version": VERSION, "checksum": _checksum(body), "plan": body},
        separators=(",", ":"),
    )
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)


def load(path: str | os.PathLike[str], make: type[AnyPlan]) -> AnyPlan:
    """Read a plan, as an instance of ``make``.

    Raises
    ------
    PlanError
        If the file cannot be read, is no plan, is damaged, or has another version.
    """
    shown = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanError("plan", shown, f"cannot be read: {error}") from error
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            "plan", shown, f"is damaged or not a plan: {error}; save it again with Plan.save(path)"
        ) from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise PlanError("plan", shown, "is not a plan; give a file written by Plan.save(path)")
    if whole.get("version") != VERSION:
        raise PlanError(
            "plan",
            shown,
            f"has version {whole.get('version')!r} of the format, but this memsaving_gradients"
            f" reads version {VERSION}; plan again, or install the version that wrote it",
        )
    body: Any = whole.get("plan")
    if whole.get("checksum") != _checksum(body):
        raise PlanError(
            "plan", shown, "is damaged: its checksum is wrong; save it again with Plan.save(path)"
        )
    try:
        return _plan(dict(body), str(shown), make)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(
            "plan", shown, f"is damaged: {error!r}; save it again with Plan.save(path)"
        ) from error


def _checksum(body: Any) -> str:
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _body(plan: PlanValues) -> dict[str, Any]:
    mark = plan.fingerprint
    if mark is None or plan.schedule is None:
        raise PlanError("plan", plan, "was not made for a graph and cannot be saved")
    kinds = {kind: k for k, kind in enumerate(dict.fromkeys(mark.types))}
    return {
        **{name: getattr(plan, name) for name in _PLAIN},
        "chunks": [plan.allocated_plain, plan.allocated],
        "assumed_batch": plan.assumed_batch,
        "assumed_steps": plan.assumed_steps,
        "assumed_rows": plan.assumed_rows,
        "activations": [plan.activations_plain, plan.activations],
        "loops": plan.loops,
        "attention": [list(plan.attention), [list(entry) for entry in plan.attention_kept]],
        "checkpoints": list(plan.checkpoints),
        "decisions": [
            [d.tensor, d.bytes, d.fate, d.reason, d.op_type, d.source] for d in plan.decisions
        ],
        "reasons": [[storage, why] for storage, why in plan.reasons.items()],
        "steps": list(packed_steps(plan.schedule.steps)),
        "chained": sorted(plan.schedule.chained),
        "lag": plan.schedule.lag,
        "stored": [[op, *how] for op, how in plan.schedule.stored.items()],
        "graph": {
            "digest": mark.digest,
            "first_backward": mark.first_backward,
            "batch": mark.batch,
            "kinds": list(kinds),
            "types": [kinds[kind] for kind in mark.types],
            "ops": list(mark.ops),
        },
    }


def _plan(body: dict[str, Any], file: str, make: type[AnyPlan]) -> AnyPlan:

    graph = body["graph"]
    attention, attention_kept = body.get("attention", ((), ()))
    activations_plain, activations = body.get("activations", (0, 0))
    return make(
        **{name: body[name] for name in _PLAIN},
        file=file,
        assumed_batch=body.get("assumed_batch"),
        assumed_steps=body.get("assumed_steps"),
        assumed_rows=body.get("assumed_rows"),
        loops=str(body.get("loops", "")),
        activations_plain=int(activations_plain),
        activations=int(activations),
        attention=tuple(map(str, attention)),
        attention_kept=tuple((str(name), str(why)) for name, why in attention_kept),
        chunks=(int(body["chunks"][0]), int(body["chunks"][1])),
        checkpoints=tuple(body["checkpoints"]),
        decisions=tuple(Decision(*fields) for fields in body["decisions"]),
        reasons={int(storage): str(why) for storage, why in body["reasons"]},
        schedule=Schedule(
            tuple(unpacked_steps(body["steps"])),
            frozenset(int(op) for op in body["chained"]),
            {int(op): Stored(*how) for op, *how in body.get("stored", ())},
            float(body.get("lag", LAG)),
        ),
        fingerprint=Fingerprint(
            digest=graph["digest"],
            first_backward=int(graph["first_backward"]),
            batch=int(graph["batch"]),
            types=tuple(graph["kinds"][k] for k in graph["types"]),
            ops=tuple(graph["ops"]),
        ),
    )


def packed_steps(steps: Iterable[Step]) -> Iterator[list[Any]]:
    """Yield the entries of a file for the steps of a schedule.

    Examples
    --------
    >>> steps = [Step(0), Step(1), Step(2), Step(1, 1, (0,)), Step(3, 0, (1, 0))]
    >>> list(packed_steps(steps))
    [[0, 2], [1, 1, [0]], [3, 0, [1, 0]]]
    """
    run: list[int] = []
    for op, copy, reads in steps:
        usual = not copy and not any(reads)
        if run and not (usual and op == run[1] + 1):
            yield run
            run = []
        if not usual:
            yield [op, copy, list(reads)]
        elif run:
            run[1] = op
        else:
            run = [op, op]
    if run:
        yield run


def unpacked_steps(entries: Iterable[list[Any]]) -> Iterator[Step]:
    """Yield the steps of a schedule from the entries of a file.

    Examples
    --------
    >>> list(unpacked_steps([[0, 1], [1, 1, [0]]]))
    [Step(op=0, copy=0, reads=()), Step(op=1, copy=0, reads=()), Step(op=1, copy=1, reads=(0,))]
    """
    for entry in entries:
        if len(entry) == 2:
            first, last = entry
            yield from (Step(op) for op in range(first, last + 1))
        else:
            op, copy, reads = entry
            yield Step(int(op), int(copy), tuple(int(k) for k in reads))
