"""Tables 1 and 2 of Meng et al. 2017, Training deeper models by GPU memory optimization.

*Table 1*: larger batches, or less memory, by swapping to the host at a loss of less than 10 %. In a
batch r times as large, each example must take 1/r of the bytes. So a step is planned at this share
of its plain peak, on the card and the link of `benchmarks.techniques.offload` (an M40 with PCIe 3).
The figures are the extra times of offloading, of recomputing, and of both together. If plain
training was out of memory on their card, there is no share: a plan that recomputes must fit the
published bytes minus the parameters.

*Table 2*: the largest batches of stacked LSTMs and of an encoder-decoder with additive attention in
blocks (`benchmarks.techniques.attention`) in the same memory, measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.experiment import Results
from benchmarks.measuring import peak
from benchmarks.papers.rows import Line, Work, in_process
from benchmarks.planning import paper
from benchmarks.running import rows_of
from benchmarks.techniques import attention
from benchmarks.techniques.offload import hybrid

#: The largest published loss of speed.
LOSS = 0.10
#: Table 1a: the largest batches, plain and swapped, with the network and batch to plan; ``None``:
#: its sizes are not known.
BATCHES: dict[str, tuple[int, int, tuple[str, dict[str, Any]] | None]] = {
    "ResNet-50": (144, 664, ("application", {"name": "ResNet50", "batch": 32})),
    "Inception-V3": (208, 548, ("application", {"name": "InceptionV3", "batch": 32, "image": 299})),
    "GAN": (24, 48, None),
    "NMT": (496, 824, None),
}
#: Table 1b: peaks at batch 32, MB, plain and swapped, and the depth; ``None``: out of memory.
PEAKS: dict[str, tuple[int | None, int, int]] = {
    "ResNet-101": (5815, 2660, 101),
    "ResNet-200": (10662, 3052, 200),
    "ResNet-1001": (None, 5979, 1001),
    "ResNet-2000": (None, 10650, 2000),
}
#: The largest batches. Table 2a: by layers of an LSTM. Table 2b: by steps of an encoder-decoder.
LAYERS = {1: (1800, 3000), 4: (750, 1500), 8: (350, 900), 16: (75, 280)}
STEPS = {50: (350, 1100), 100: (90, 550), 200: (20, 230), 400: (2, 60)}
#: Steps and units of our LSTMs; the limit, bytes; batches to try after the first two.
LENGTH, WIDTH = 50, 256
LIMIT, TRIES = 300_000_000, 3
#: Approximate bytes of plain training for an example, a step and a cell.
CELL = 14_000


def at_share(kind: str, name: str) -> dict[str, Any]:
    """Return extra time at the published share of the plain peak (in a process of its own)."""
    if kind == "1a":
        base, optimized, network = BATCHES[name]
        assert network is not None
        model, options = network
    else:
        plain, optimized_, depth = PEAKS[name]
        assert plain is not None
        base, optimized = optimized_, plain
        model, options = "deep", {"depth": depth, "batch": 32}
    return {"share": base / optimized, **hybrid(model, options, base / optimized)}


def in_bytes(name: str, planner: str = "chen") -> dict[str, Any]:
    """Plan recomputation within the published bytes minus the parameters (in a fresh process)."""
    _, megabytes, depth = PEAKS[name]
    found = paper.planned(depth, 32, planner, lambda parameters: megabytes * 10**6 - parameters)
    rows = {row["name"]: row for row in found["rows"]}
    return {
        "parameters": found["parameters"],
        "plain": rows["sharing"]["peak"],
        **{key: found["rows"][-1][key] for key in ("peak", "extra")},
    }


def layers_of_lstm(layers: int, again: bool) -> dict[str, Any]:
    """Find the largest batches within the limit, plain and ours."""
    found: dict[str, dict[str, Any]] = {}
    for side in ("plain", "ours"):
        first = (
            LIMIT // (3 * CELL * LENGTH * layers) if side == "plain" else found["plain"]["batch"]
        )

        settings = {"checkpoints": "memory", "loops": "treeverse"} if side == "ours" else None

        def bytes_of(batch: int, settings: dict[str, Any] | None = settings) -> int:
            options = {"length": LENGTH, "hidden": WIDTH, "batch": batch, "cells": layers}
            return int(peak("recurrence", options, settings)["peak"])

        found[side] = attention.largest_within(LIMIT, max(1, first), bytes_of, TRIES)
    return found


def sentences(length: int, again: bool) -> dict[str, Any]:
    """Return the largest batches of the encoder-decoder within its limit."""
    row = f"additive-{length}"
    measured = rows_of(attention.EXPERIMENT, [row], again=again)[row]
    return {side: measured[side]["batch"] for side in ("plain", "ours")}


def lines(results: Results) -> list[Line]:
    """Return the lines of both tables."""
    found = []
    for name, (base, optimized, network) in BATCHES.items():
        ratio = optimized / base
        if network is None:
            note = (
                f"not run: published {base} → {optimized}; the sizes of its network were not found"
            )
            found.append(Line(f"1a, {name}: times the batch", ratio, None, note=note))
        elif result := results.get(f"meng-1a-{name}"):
            what = f"1a, {name}: {ratio:.2f} x the batch ({base} → {optimized}): extra time"
            found.append(_of_share(what, result))
    for name, (plain, saved, _) in PEAKS.items():
        result = results.get(f"meng-1b-{name}")
        if result and plain:
            what = f"1b, {name}: 1/{plain / saved:.2f} of the memory: extra time"
            found.append(_of_share(what, result))
        elif result:
            whole = (result["peak"] + result["parameters"]) / 1e6
            note = (
                "recomputed, nothing swapped; plain training"
                f" {(result['plain'] + result['parameters']) / 1e6:,.0f} MB; extra time"
                f" {result['extra']:.1%}"
            )
            found.append(Line(f"1b, {name}, batch 32", saved, whole, "MB", "planned", "less", note))
    for layers, (base, optimized) in LAYERS.items():
        if result := results.get(f"meng-2a-{layers}"):
            plain, ours = (result[side]["batch"] for side in ("plain", "ours"))
            note = (
                f"published {base} → {optimized}; here {plain} → {ours} in {LIMIT / 1e6:.0f} MB,"
                f" {WIDTH} units, {LENGTH} steps"
            )
            what = f"2a, LSTM of {layers} layer{'s' * (layers > 1)}: times the batch"
            found.append(Line(what, optimized / base, ours / max(plain, 1), note=note))
    for steps, (base, optimized) in STEPS.items():
        if result := results.get(f"meng-2b-{steps}"):
            note = (
                f"published {base} → {optimized}; here {result['plain']} → {result['ours']} in"
                " 1 GB, small vocabulary"
            )
            what = f"2b, NMT of {steps} steps: times the batch"
            found.append(
                Line(what, optimized / base, result["ours"] / max(result["plain"], 1), note=note)
            )
    return found


def _of_share(what: str, result: Any) -> Line:
    ways = ("recompute", "offload", "both")
    shown = {way: "does not fit" if result[way] is None else f"{result[way]:.1%}" for way in ways}
    fits = [result[way] for way in ways if result[way] is not None]
    note = f"recomputing {shown['recompute']}, swapping {shown['offload']}, both {shown['both']}"
    best = min(fits) if fits else None
    return Line(what, LOSS, best, "%", "planned", "less", note, failed=not fits)


WORK = Work(
    key="meng",
    title="Meng et al. 2017, Training deeper models by GPU memory optimization on TensorFlow",
    source="NIPS 2017 workshop on ML systems, tables 1 and 2; swapping costs less than 10 %",
    about=(
        "Table 1 is planned for a card like the paper's (an M40 behind PCIe 3), with estimated"
        " costs. Each figure is our extra time at the memory of the paper's figure, against the"
        " paper's 10 %. Table 2 is measured on a CPU, as batches in a memory that fits a CPU. The"
        " sizes of the paper's LSTMs and of its encoder-decoder were not found, so only ratios can"
        " be compared."
    ),
    jobs={
        **{
            f"meng-1a-{name}": in_process("papers.meng:at_share", kind="1a", name=name)
            for name, (*_, network) in BATCHES.items()
            if network
        },
        **{
            f"meng-1b-{name}": (
                in_process("papers.meng:at_share", kind="1b", name=name)
                if plain
                else in_process("papers.meng:in_bytes", name=name)
            )
            for name, (plain, *_) in PEAKS.items()
        },
        **{f"meng-2a-{layers}": partial(layers_of_lstm, layers) for layers in LAYERS},
        **{f"meng-2b-{steps}": partial(sentences, steps) for steps in STEPS},
    },
    lines=lines,
)
