"""``python -m benchmarks.planning.simulation``: simulated against measured peaks, in bytes asked for and in the allocator's chunks.

Each row is a network and a way to train it. The measured peak is the worst of five steps after two warm-ups, in a process of its
own: once more of the allocator's statistics, once from the profiler's list of allocations (`graph_tools.memory.allocation_trace`).
An error is what the simulation gives, relative to that; below zero it has promised too little.
"""

from __future__ import annotations

import fnmatch
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import options_for
from benchmarks.claims.runner import ENVIRONMENT
from benchmarks.steps import make_step
from graph_tools.memory.allocation_trace import allocation_events, requested_peak
from graph_tools.memory.measure import in_fresh_process, measure_peak

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 8}),
    "mobilenetv2": ("application", {"name": "MobileNetV2", "batch": 8}),
    "densenet121": ("application", {"name": "DenseNet121", "batch": 4}),
    "unet": ("unet", {}),
    "transformer": ("transformer", {}),
    "lstm": ("lstm", {}),
}
MODES = ("plain", "speed", "memory")
RESULTS = Path(__file__).parents[1] / "results" / "simulation.json"


def probe(model: str, options: dict[str, Any], mode: str, steps: int = 5) -> dict[str, Any]:
    """Measured and simulated peaks of one step (in a process made for it)."""
    import memsaving_gradients as ms
    from memsaving_gradients.budget import chunk_bytes

    ours = mode != "plain"
    step = make_step(model, options, mode, ours=ours)
    step.run()
    measured = measure_peak(step.run, warmup=1, steps=steps)
    requested = [requested_peak(allocation_events(step.run)) for _ in range(steps)]
    # Plain training is simulated where it is rewritten.
    plan = ms.plans(step.graph if ours else make_step(model, options, "speed", ours=True).graph)[-1]
    simulation = plan.simulation if ours else plan.simulation_plain
    assert simulation is not None
    return {
        "requested": requested,
        "allocated": measured.peaks,
        "simulated_requested": simulation.peak,
        "simulated_allocated": chunk_bytes(simulation, plan.gating),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure the networks asked for and print the table; 1 if a simulated peak is more than 3 % too low."""
    parser = options_for("simulation", __doc__, RESULTS, "networks, with * and ?")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    for name, (model, sizes) in NETWORKS.items():
        for mode in MODES if fnmatch.fnmatch(name, options.only) else ():
            print(name, mode, file=sys.stderr, flush=True)
            what = {"model": model, "options": sizes, "mode": mode}
            results[f"{name} {mode}"] = in_fresh_process(
                "benchmarks.planning.simulation:probe", what, ENVIRONMENT
            )
    old = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    text = json.dumps({**old, **results}, indent=1, sort_keys=True)
    options.json.write_text(text + "\n", encoding="utf-8")
    return print_errors(results)


def print_errors(results: dict[str, Any]) -> int:
    """Print the table; the number of simulated peaks that are more than 3 % too low."""
    table = Table(title="simulated against measured transient peak, MB", header_style="bold")
    table.add_column("case", no_wrap=True)
    for heading in ("requested", "simulated", "error", "allocated", "simulated", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    errors: dict[str, list[float]] = {"requested": [], "allocated": []}
    for name, result in results.items():
        row = [name]
        for kind, found in errors.items():
            worst, simulated = max(result[kind]), result[f"simulated_{kind}"]
            found.append(simulated / worst - 1)
            row += [f"{worst / 1e6:,.2f}", f"{simulated / 1e6:,.2f}", f"{found[-1]:+.1%}"]
        table.add_row(*row)
    console = Console(width=110)
    console.print(table)
    for kind, found in errors.items():
        console.print(
            f"{kind}: median error {statistics.median(map(abs, found)):.1%}, "
            f"from {min(found):+.1%} to {max(found):+.1%}",
            highlight=False,
        )
    return sum(error < -0.03 for found in errors.values() for error in found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
