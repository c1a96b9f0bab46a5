"""Simulated against measured peaks, in requested bytes and in the allocator's chunks.

Each row is a network and a way to train it. The measured peak is the worst of five steps after two
warm-ups, in a process of its own. Chunks come from the allocator's statistics, and requested bytes
from the profiler's list of allocations (`benchmarks.allocation_trace`). An error is the
relative deviation of the simulated peak; below zero, the simulation promised too little.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import memsaving_gradients as ms
from benchmarks.allocation_trace import allocation_events, requested_peak
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from benchmarks.steps import make_step
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.budget import chunk_bytes

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "mobilenetv2": ("application", {"name": "MobileNetV2", "batch": 8}),
    "densenet121": ("application", {"name": "DenseNet121", "batch": 4}),
    "unet": ("unet", {}),
    "transformer": ("transformer", {}),
    "lstm": ("lstm", {}),
}
MODES = ("plain", "speed", "memory")
KINDS = ("requested", "allocated")
#: Bar for the share by which a simulated peak is below the measured one.
TOO_LOW = 0.03
ROWS = {f"{name} {mode}": (name, mode) for name in NETWORKS for mode in MODES}


def run(job: Job) -> dict[str, Any]:
    """Measure and simulate a network in a mode."""
    name, mode = ROWS[job.row]
    model, sizes = NETWORKS[name]
    found: dict[str, Any] = fresh(
        "planning.simulation:probe", model=model, options=sizes, mode=mode
    )
    return found


def probe(model: str, options: dict[str, Any], mode: str, steps: int = 5) -> dict[str, Any]:
    """Return measured and simulated peaks of one step (in a process of its own)."""
    ours = mode != "plain"
    step = make_step(model, options, mode, ours=ours)
    step.run()
    measured = measure_peak(step.run, warmup=1, steps=steps)
    requested = [requested_peak(allocation_events(step.run)) for _ in range(steps)]
    # Only a rewritten step has a plan, which includes the simulation of plain training.
    plan = ms.plans(step.graph if ours else make_step(model, options, "speed", ours=True).graph)[-1]
    simulation = plan.simulation if ours else plan.simulation_plain
    assert simulation is not None
    return {
        "requested": requested,
        "allocated": measured.peaks,
        "simulated_requested": simulation.peak,
        "simulated_allocated": chunk_bytes(simulation, plan.gating),
    }


def errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the errors by kind of bytes."""
    return {kind: result[f"simulated_{kind}"] / max(result[kind]) - 1 for kind in KINDS}


def bars(results: Results) -> list[Figure]:
    """Return the bars: the shares by which simulated peaks are too low."""
    return [
        Figure(f"{name}: simulated too low, {kind}", max(0.0, -error), TOO_LOW, percent=True)
        for name, result in results.items()
        for kind, error in errors(result).items()
    ]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row."""
    for name, result in results.items():
        cells = [name]
        for kind, error in errors(result).items():
            worst, simulated = max(result[kind]), result[f"simulated_{kind}"]
            cells += [f"{worst / 1e6:,.2f}", f"{simulated / 1e6:,.2f}", f"{error:+.1%}"]
        yield tuple(cells)


def notes(results: Results) -> Iterator[str]:
    """Yield the median and the range of errors."""
    for kind in KINDS if results else ():
        found = [errors(result)[kind] for result in results.values()]
        median = statistics.median(map(abs, found))
        yield f"{kind}: median error {median:.1%}, from {min(found):+.1%} to {max(found):+.1%}"


COLUMNS = Columns(
    "simulated against measured transient peak, MB",
    "case | requested | simulated | error | allocated | simulated | error",
    lines,
)
EXPERIMENT = Experiment(
    "simulation",
    rows=lambda settings: ROWS,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    bars_in_columns=True,
    notes=notes,
)
