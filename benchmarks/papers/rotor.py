"""Beaumont et al. 2019 (arXiv 1911.13214): throughput at the memory of periodic checkpoints.

Four networks of the paper's families are cut into equal segments, for every number of segments up
to 2√n, as by PyTorch's ``checkpoint_sequential`` (`benchmarks.planning.periodic`). Only periodic
plans that are the fastest for their memory count. Ours is planned at each of these memories.
Nothing runs.

For one number of segments of each network both are measured as well, in turn in one process: a list
of layers to keep, and a budget of the bytes of that list's plan. Our rewriter recomputes in both;
``checkpoint_sequential`` recomputes whole segments, which is slower still.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import memsaving_gradients as ms
from benchmarks.experiment import Results
from benchmarks.papers.rows import Line, Work, in_process
from benchmarks.planning import periodic
from benchmarks.planning.periodic import (
    Network,
    beside,
    captured_step,
    cuts,
    named_ends,
    periodic_plans,
)
from benchmarks.steps import make_step
from graph_tools.memory.measure import time_ratio

#: The published gain of throughput: the mean over networks, images and memories.
FASTER = 0.172
NETWORKS: dict[str, Network] = {
    "resnet101": periodic.NETWORKS["resnet101"],
    "densenet121": periodic.NETWORKS["densenet121"],
    "inception": Network(
        "application",
        {"name": "InceptionV3", "batch": 8, "image": 299},
        r"activation_[0-4]|max_pooling2d(_1)?|mixed\d+(_\d)?",
    ),
    "vgg19": Network("application", {"name": "VGG19", "batch": 8}, r"block\d_(conv\d|pool)"),
}
#: Smaller images and batches for measurements, so that a step takes a second.
SMALLER: dict[str, Any] = {"batch": 4, "image": 128}
PAIRS = 15


def planned(name: str, planner: str = "auto") -> dict[str, Any]:
    """Plan ours at the memory of each periodic plan that is the fastest for its memory."""
    network = NETWORKS[name]
    step = captured_step(network.model, network.options, profile=False)
    ends = list(named_ends(step, network.blocks).values())
    every = dict(periodic_plans(step.graph, ends))
    found = {str(k): beside(step.graph, every[k], planner) for k in fastest(every)}
    return {"segments": found, "tried": len(every)}


def fastest(rows: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the numbers of segments whose memory no other number meets in as little time.

    Examples
    --------
    >>> fastest({
    ...     2: {"peak": 9, "literal_extra": 1}, 3: {"peak": 5, "literal_extra": 2},
    ...     4: {"peak": 5, "literal_extra": 3}})
    [2, 3]
    """
    found: list[int] = []
    least = math.inf
    # From the fastest to the slowest: each must take less memory than all before it.
    for k in sorted(rows, key=lambda k: (rows[k]["literal_extra"], rows[k]["peak"])):
        if rows[k]["peak"] < least:
            found.append(k)
            least = rows[k]["peak"]
    return sorted(found)


def timed(name: str, pairs: int = PAIRS) -> dict[str, Any]:
    """Time steps with √n segments and ours in the same memory (in a process of its own)."""
    network = NETWORKS[name]
    options = {**network.options, **SMALLER}
    layers = list(named_ends(captured_step(network.model, options, profile=False), network.blocks))
    segments = round(math.sqrt(len(layers) + 1))
    kept = cuts(layers, segments)
    periodic = make_step(network.model, options, kept, ours=True)
    (theirs,) = ms.plans(periodic.graph)
    # A budget leaves a margin for chance, which a list of layers does not.
    settings = {"budget": theirs.allocated}
    step = make_step(network.model, options, ours=True, settings=settings)
    (plan,) = ms.plans(step.graph)
    ratio = time_ratio(periodic.run, step.run, pairs=pairs)
    return {
        **dataclasses.asdict(ratio),
        "segments": segments,
        "kept": kept,
        "allocated": {
            "plain": theirs.allocated_plain,
            "periodic": theirs.allocated,
            "ours": plan.allocated,
        },
    }


def throughputs(rows: Iterable[Mapping[str, Any]], of: str) -> list[float]:
    """Return our gain over plans ``of`` kind: ``"literal"`` (whole segments) or ``"periodic"``."""
    return [(1 + row[f"{of}_extra"]) / (1 + row["ours_extra"]) - 1 for row in rows]


def lines(results: Results) -> list[Line]:
    """Return the lines: by network, planned and measured, and on average."""
    found: list[Line] = []
    every: list[float] = []
    for name in NETWORKS:
        if result := results.get(f"rotor-{name}"):
            tried: list[Mapping[str, Any]] = list(result["segments"].values())
            rows = [row for row in tried if row["ours"] <= row["peak"]]
            gains = throughputs(rows, "literal")
            every += gains
            notes = []
            if rows:
                at = ", ".join(f"{row['peak'] / row['plain']:.0%}" for row in rows)
                lean = statistics.fmean(throughputs(rows, "periodic"))
                notes += [
                    f"at {at} of the plain peak",
                    f"against a periodic plan that recomputes only values it reads: {lean:+.1%}",
                ]
            if len(rows) < len(tried):
                notes.append(f"none of our plans fits at {len(tried) - len(rows)} more")
            mean = statistics.fmean(gains) if gains else None
            note = "; ".join(notes)
            found.append(Line(f"{name}: throughput", None, mean, "%", "planned", note=note))
        if result := results.get(f"rotor-{name}-measured"):
            bytes_of = result["allocated"]
            shares = [bytes_of[side] / bytes_of["plain"] for side in ("periodic", "ours")]
            note = (
                f"batch 4, 128 x 128, {result['segments']} segments: {shares[0]:.0%} of the plain"
                f" memory, ours {shares[1]:.0%}; against a periodic plan that recomputes only"
                f" values it reads; this plan against itself {result['control']:.3f}"
            )
            found.append(Line(f"{name}: throughput", None, result["ratio"] - 1, "%", note=note))
    # The mean over only some networks would be another figure.
    if every and all(f"rotor-{name}" in results for name in NETWORKS):
        note = (
            f"{len(every)} memories of {len(NETWORKS)} networks; the published mean covers more"
            " networks, images and batches"
        )
        whole = statistics.fmean(every)
        found.insert(0, Line("mean throughput", FASTER, whole, "%", "planned", note=note))
    return found


WORK = Work(
    key="rotor",
    title="Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains (rotor)",
    source=(
        "arXiv 1911.13214; the mean is from summaries of the paper, since figures by network were"
        " not found as numbers"
    ),
    about=(
        "Each figure is the gain in throughput over PyTorch's `checkpoint_sequential` at the same"
        " memory, with the best number of segments for that memory. The paper measured its figure"
        " on a V100. Ours are planned from shapes with estimated costs, at batch 8. For one number"
        " of segments of each network, ours are also measured on a CPU."
    ),
    jobs={
        **{f"rotor-{name}": in_process("papers.rotor:planned", name=name) for name in NETWORKS},
        **{
            f"rotor-{name}-measured": in_process("papers.rotor:timed", name=name)
            for name in NETWORKS
        },
    },
    lines=lines,
)
