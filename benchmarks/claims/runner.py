"""Runs one case in fresh processes and works its figures out."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.claims import xla
from benchmarks.claims.cases import Bar, Case
from graph_tools.memory.measure import in_fresh_process

__all__ = ["figures", "run", "simulation_errors", "verdicts"]

# A benchmark of the CPU: a GPU in the machine would take over the kernels, and Keras would turn
# XLA on.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}


def run(case: Case) -> dict[str, Any]:
    """Measure a case: the plain peak, ours, and the ratio of times if it has one.

    Returns
    -------
    dict
        ``"plain"`` and ``"ours"`` as from `benchmarks.probes.peak`, ``"time"`` as from
        `benchmarks.probes.ratio` or ``None``, ``"figures"`` and ``"errors"``.
    """
    what = {"model": case.model, "options": case.options, "how": case.how}
    result: dict[str, Any] = {"plain": _peak(what, False), "time": None}
    result["ours"] = _peak({**what, "checkpoints": case.checkpoints}, True)
    if case.pairs:
        result["time"] = in_fresh_process(
            "benchmarks.probes:ratio",
            {**what, "checkpoints": case.checkpoints, "pairs": case.pairs},
            ENVIRONMENT,
        )
    result["figures"] = figures(case, result)
    result["errors"] = simulation_errors(result)
    return result


def _peak(what: dict[str, Any], ours: bool) -> dict[str, Any]:
    kwargs = {**what, "ours": ours}
    environment = dict(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="xla-") as dump:
        if what["how"] == "xla":
            kwargs["dump"] = dump
            environment["XLA_FLAGS"] = xla.flags(dump)
        result: dict[str, Any] = in_fresh_process("benchmarks.probes:peak", kwargs, environment)
    return result


def figures(case: Case, result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure that a bar may ask for and this case has."""
    plain, ours = result["plain"], result["ours"]
    added = ours["seconds"]["gradients"] - ours["seconds"]["tensorflow"]
    values: dict[str, float] = {
        "MB": ours["peak"] / 1e6,
        "peak": ours["peak"] / plain["peak"],
        "planning": added / ours["seconds"]["tensorflow"],
    }
    if case.model.endswith("_chain"):
        values["units"] = ours["peak"] / (4 * case.options.get("size", 2**18))
    if result["time"]:
        values["time"] = result["time"]["ratio"]
    if case.how == "xla":
        values["XLA's largest"] = ours["xla"]["largest"] / plain["xla"]["largest"]
    if case.instruction:
        counts = [side["xla"]["instructions"].get(case.instruction, 0) for side in (ours, plain)]
        values["clones"] = float(counts[0] - counts[1])
    return values


def simulation_errors(result: Mapping[str, Any]) -> dict[str, float]:
    """How far the simulated peaks are from the measured ones, as fractions of these.

    Negative: the simulation promised less than was taken.  Both count the allocator's chunks.
    Under XLA the measured figure is its largest allocation, which the allocator has not rounded.
    """
    plan = result["ours"]["plan"]
    if plan is None:
        return {}
    errors = {}
    for side, suffix in (("plain", "_plain"), ("ours", "")):
        largest = result[side].get("xla", {}).get("largest")
        if largest:
            errors[side] = plan["peak" + suffix] / largest - 1
        else:
            errors[side] = plan["allocated" + suffix] / result[side]["peak"] - 1
    return errors


def verdicts(case: Case, result: Mapping[str, Any]) -> list[tuple[Bar, float, bool]]:
    """Each bar of a case with the figure and whether it clears the bar."""
    values = result["figures"]
    return [(bar, values[bar.figure], bar.passed(values[bar.figure])) for bar in case.bars]
