"""The gradient-checkpointing project (Bulatov and Salimans 2018): ResNets by depth.

Six depths, batch 32, 224 x 224, are planned; two of them are measured as well, on the CPU. Our
peaks are transient peaks of steps that consume each gradient at once. Planned peaks are in
requested bytes, measured ones in the allocator's chunks. The published peaks come from the list of
allocations of a GPU's step, with the scratch space of its convolutions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.claims import deep
from benchmarks.experiment import Results
from benchmarks.measuring import peak
from benchmarks.networks.preactivation import SIZES
from benchmarks.papers.rows import Line, Work, in_process
from benchmarks.running import rows_of

#: By layers: MB with checkpoints and without.
PUBLISHED = {
    18: (505, 818),
    34: (661, 1166),
    50: (984, 2694),
    101: (1408, 4112),
    152: (1334, 5826),
    200: (1411, 8320),
}
MEASURED = (18, 50)
#: Published for feed-forward models: the ratios of layers and of the time of a step.
DEEPER, TIME = 10, 1.20
#: The row of `benchmarks.claims.deep`, and blocks a stage of a shallower network, with 92 layers.
DEEP, SHALLOW = f"{deep.NAME}-10", 10


def ten_times(again: bool) -> dict[str, Any]:
    """Measure the step of 1001 layers within a tenth, and the plain peak of 92 layers."""
    found = rows_of(deep.EXPERIMENT, [DEEP], again=again)[DEEP]
    options = {"blocks": SHALLOW, "batch": 8}
    shallow = peak("cifar_resnet", options, None)
    return {
        "shallow": shallow["peak"],
        "plain": found["plain"]["peak"],
        "ours": found["ours"]["peak"],
        "time": found["time"]["ratio"],
        "control": found["time"]["control"],
    }


def as_large_plainly(result: dict[str, Any] | Any) -> float:
    """Return the number of plain layers that fit our memory, by linear interpolation."""
    few, many = 9 * SHALLOW + 2, 9 * deep.BLOCKS + 2
    each = (result["plain"] - result["shallow"]) / (many - few)
    return float(few + (result["ours"] - result["shallow"]) / each)


def lines(results: Results) -> list[Line]:
    """Return the lines: plain and reduced memory by depth, and the deeper network."""
    found = []
    for size, (saved, plain) in PUBLISHED.items():
        what = f"ResNet-{size}, batch 32: plain / saving memory"
        published = f"published {plain:,} → {saved:,}"
        if result := results.get(f"checkpointing-{size}"):
            peaks = (result["peak_plain"], result["peak"])
            note = f"{_mb(*peaks)} ({published}), extra time {result['extra_time']:.0%}"
            found.append(Line(what, plain / saved, peaks[0] / peaks[1], how="planned", note=note))
        if result := results.get(f"checkpointing-{size}-measured"):
            peaks = (result["plain"]["peak"], result["ours"]["peak"])
            note = f"{_mb(*peaks)} ({published})"
            found.append(Line(what, plain / saved, peaks[0] / peaks[1], note=note))
    if result := results.get("checkpointing-ten"):
        layers = as_large_plainly(result)
        note = (
            f"CIFAR ResNet, batch 8: 1001 layers in {result['ours'] / 1e6:.0f} MB; plain training:"
            f" {layers:.0f} layers"
        )
        clock = f"plain against plain: {result['control']:.3f}"
        found += [
            Line("layers in the same memory", DEEPER, 1001 / layers, note=note),
            Line("… its step / plain step", TIME, result["time"], better="less", note=clock),
        ]
    return found


def _mb(plain: int, ours: int) -> str:
    return f"{plain / 1e6:,.0f} → {ours / 1e6:,.0f} MB"


def measured(size: int, again: bool) -> dict[str, Any]:
    """Measure the peaks of one depth, each in a process of its own."""
    ways = {"plain": None, "ours": {"checkpoints": "memory"}}
    return {way: peak("imagenet_resnet", {"size": size}, asked) for way, asked in ways.items()}


ABOUT = (
    "The project's table of ImageNet ResNets (second version, batch 32, 224 x 224) is in a comment"
    " of its benchmark. It has the peaks of a GPU's step, with the scratch space of its"
    " convolutions. Ours are transient peaks: planned ones in requested bytes, measured ones in the"
    " CPU allocator's chunks. The project claims for feed-forward models in general that ten times"
    " as large a model fits, at a fifth more time."
)

WORK = Work(
    key="checkpointing",
    title="Bulatov and Salimans 2018, the gradient-checkpointing project",
    source=(
        "github.com/cybertronai/gradient-checkpointing: README.md; test/deep_imagenet_benchmark.py"
    ),
    about=ABOUT,
    jobs={
        **{
            f"checkpointing-{size}": in_process(
                "papers.rows:planned_step", model="imagenet_resnet", options={"size": size}
            )
            for size in SIZES
        },
        **{f"checkpointing-{size}-measured": partial(measured, size) for size in MEASURED},
        "checkpointing-ten": ten_times,
    },
    lines=lines,
)
