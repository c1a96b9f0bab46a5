"""Sohoni et al. 2019 (arXiv 1904.10631): four techniques together, and the loss of accuracy."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.experiment import Results
from benchmarks.papers.rows import Line, Work
from benchmarks.records import RESULTS
from benchmarks.running import rows_of
from benchmarks.techniques import low_memory

#: By network: plain memory over memory with all techniques.
PUBLISHED = {"wide-resnet": 60.7, "dynamic-conv": 8.7}
NAMES = {
    "wide-resnet": "WideResNet-28-2, batch 100",
    "dynamic-conv": "DynamicConv Transformer, batch 128",
}
#: The published loss of accuracy on CIFAR-10, as a fraction.
LOST = 0.004
#: Results of ``examples/low_memory.py`` for five seeds.
TRAINED = RESULTS / "trained.json"


def network(name: str, again: bool) -> dict[str, Any]:
    """Return the bytes of two trainings, in the paper's accounting and measured."""
    names = {run: f"{name}, {run}" for run in ("float32", "all")}
    rows = rows_of(low_memory.EXPERIMENT, names.values(), again=again)
    return {
        run: {
            "counted": low_memory.counted_as_published(rows[row]),
            "held": low_memory.held_bytes(rows[row]),
        }
        for run, row in names.items()
    }


def accuracy(again: bool) -> dict[str, Any]:
    """Return the mean accuracy on digits over the seeds of the example's results."""
    runs = json.loads(TRAINED.read_text(encoding="utf-8"))["digits"]
    return {
        name: statistics.fmean(run["quality"] for run in runs[name]) for name in ("float32", "all")
    }


def lines(results: Results) -> list[Line]:
    """Return the lines: memory of each network in both accountings, and the accuracy."""
    found = []
    for name, published in PUBLISHED.items():
        if result := results.get(f"sohoni-{name}"):
            plain, every = result["float32"], result["all"]
            what = f"{NAMES[name]}: memory, all techniques"
            counted, held = (plain[how] / every[how] for how in ("counted", "held"))
            shown = {
                how: f"{plain[how] / 1e6:,.1f} → {every[how] / 1e6:,.2f} MB"
                for how in ("counted", "held")
            }
            found += [
                Line(f"{what}, the paper's sum", published, counted, note=shown["counted"]),
                Line(f"{what}, held by the allocator", None, held, note=shown["held"]),
            ]
    if result := results.get("sohoni-accuracy"):
        lost = max(0.0, result["float32"] - result["all"])
        note = (
            f"digits as 32 x 32 images, mean of five seeds: {result['float32']:.2%} →"
            f" {result['all']:.2%}; published for CIFAR-10"
        )
        found.append(
            Line("WideResNet-28-2: accuracy lost", LOST, lost, "%", better="less", note=note)
        )
    return found


WORK = Work(
    key="sohoni",
    title="Sohoni et al. 2019, Low-memory neural network training",
    source="arXiv 1904.10631, abstract",
    about=(
        "The techniques are sparse weights, 16 bits, microbatches and checkpoints. The paper adds"
        " up model, optimizer and activations. The allocator also holds gradients of activations,"
        " scratch space, and the bytes that it adds by rounding up. `python -m benchmarks --only"
        " low_memory` also measures each technique alone. The translation task was not trained to a"
        " BLEU score here."
    ),
    jobs={
        "sohoni-wide-resnet": lambda again: network("wide-resnet", again),
        "sohoni-dynamic-conv": lambda again: network("dynamic-conv", again),
        "sohoni-accuracy": accuracy,
    },
    lines=lines,
)
