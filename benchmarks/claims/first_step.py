"""``python -m benchmarks.claims.first_step``: what the first training step takes, and importing the package, beside plain TensorFlow.

The first step of a ``tf.function`` traces the model, differentiates it, updates the variables, has grappler optimize the graph, and runs it; ours captures,
plans and rewires besides, and grappler gets more ops. Each is measured in a fresh process, from before tracing until the loss is there,
plain and ours in turn; the ratio is that of the medians, of wall time and of processor time (which other processes on the machine change
less). Tensors are small: a step takes a tenth of a second or so, and nearly all of the first one is work on graphs. Ways: ``gradients`` is
`memsaving_gradients.gradients` as it comes, ``patched`` a tape under `memsaving_gradients.patched`, ``budget`` has half of plain training's
memory, for which plans are searched for; that has no bar.

``--import``: the seconds that importing the package takes after TensorFlow, in fresh processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import at_least_one, some_of
from benchmarks.bars import Figure, chosen, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "first_step.json"
#: First step of ours over that of plain training; seconds to import the package beside TensorFlow.
TIMES, IMPORT = 1.5, 0.3
WAYS = ("gradients", "patched", "budget")
CLOCKS = ("wall", "processor")
#: Network, options, and about how many forward ops that makes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}-{ops}": (name, {**options, size: many})
    for name, size, options, counts in (
        ("cifar_resnet", "blocks", {"batch": 2, "image": 16, "width": 8}, (2, 9, 42, 170)),
        ("transformer", "layers", {"batch": 2, "length": 32, "width": 32}, (5, 21, 104, 416)),
        ("mixed", "blocks", {}, (5, 18, 92, 367)),
    )
    for ops, many in zip((500, 2_000, 10_000, 40_000), counts, strict=True)
}
_IMPORTS = """
import json, time
import tensorflow
wall, processor = time.perf_counter(), time.process_time()
import memsaving_gradients
print(json.dumps({"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}))
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; 1 if a bar is missed."""
    options = _parse(arguments)
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    if options.imports:
        results["import"] = measure_import(options.pairs or 9)
        write(options.json, {"import": results["import"]}, judge(results))
    else:
        cases = chosen(CASES, options.only)
        if not cases:
            return 2
        for case in cases:
            begun = time.perf_counter()
            result = {**results.get(case, {}), **measure(case, options.pairs or 5, options.ways)}
            results[case] = result
            console.print(f"{case}: {time.perf_counter() - begun:.0f} s", highlight=False)
            write(options.json, {case: result}, judge(results))
    figures = judge(results)
    print_results(results, Console(width=160))
    print_figures(figures, Console(width=160))
    return int(not all(figure.passed for figure in figures))


def measure(case: str, pairs: int, ways: Iterable[str]) -> dict[str, Any]:
    """First steps of a network: plain ones, and ours of each way, in turn."""
    model, options = CASES[case]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ("plain", *ways)}
    for _ in range(pairs):
        for way, found in runs.items():
            what = {"model": model, "options": options, "way": way}
            found.append(
                in_fresh_process("benchmarks.claims.first_step:first_step", what, ENVIRONMENT)
            )
    return {way: _medians(found) for way, found in runs.items()}


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    middle = {
        clock: statistics.median(run[clock] for run in found)
        for clock in (*CLOCKS, "traced", "second")
    }
    return {**found[0], **middle, "runs": [{c: run[c] for c in CLOCKS} for run in found]}


def first_step(model: str, options: dict[str, Any], way: str) -> dict[str, Any]:
    """One first step in this process.

    ``"wall"`` and ``"processor"``: its seconds; ``"traced"``: those of processor time until the function was traced; ``"second"``:
    those of another step. ``"forward"``: how many ops the loss needs; ``"ops"``: how many the graph has in the end.
    """
    from benchmarks.networks import build

    network = build(model, **options)
    variables = list(network.variables)
    batch = [tf.constant(array) for array in network.batch]
    losses: list[tf.Tensor] = []
    around: Any = contextlib.nullcontext()
    if way != "plain":
        import memsaving_gradients as ms

        around = ms.patched() if way == "patched" else around

    def gradients(loss: tf.Tensor) -> Any:
        if way == "plain":
            return tf.gradients(loss, variables)
        return ms.gradients(loss, variables, budget=0.5 if way == "budget" else None)

    @tf.function
    def step(*batch: tf.Tensor) -> tf.Tensor:
        if way == "patched":
            with tf.GradientTape() as tape:
                loss = network.loss(*batch)
            grads = tape.gradient(loss, variables)
        else:
            loss = network.loss(*batch)
            grads = gradients(loss)
        losses.append(loss)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(1e-6 * tf.convert_to_tensor(grad))
        return loss

    wall, processor = time.perf_counter(), time.process_time()
    with around:
        graph = step.get_concrete_function(*batch).graph
    traced = time.process_time() - processor
    step(*batch).numpy()
    result: dict[str, Any] = {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
        "traced": traced,
    }
    again = time.process_time()
    step(*batch).numpy()
    result["second"] = time.process_time() - again
    from graph_tools.graph.capture import capture

    result["forward"] = len(capture(losses[:1]).ops)
    result["ops"] = len(graph.get_operations())
    if way != "plain":
        plans = ms.plans(graph)
        result["peaks"] = [plans[-1].peak_plain, plans[-1].peak] if plans else []
    return result


def measure_import(runs: int) -> dict[str, Any]:
    """Seconds to import the package after TensorFlow: medians of fresh processes, after one that compiles."""
    found = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "runs": found[1:],
        **{clock: statistics.median(run[clock] for run in found[1:]) for clock in CLOCKS},
    }


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The bars; a plan for a budget has none."""
    figures = []
    for case, result in results.items():
        if case == "import":
            figures += [
                Figure(f"import: {clock} seconds", result[clock], IMPORT, count=len(result["runs"]))
                for clock in CLOCKS
            ]
            continue
        for way in ("gradients", "patched"):
            if way in result:
                figures += [
                    Figure(
                        f"{case}: {way}, {clock} time / plain",
                        result[way][clock] / result["plain"][clock],
                        TIMES,
                        count=len(result[way]["runs"]),
                    )
                    for clock in CLOCKS
                ]
    return figures


def print_results(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """One row for each network and way."""
    table = Table(title="first step, seconds (processor / wall)", header_style="bold")
    for heading in (
        "network",
        "forward ops",
        "way",
        "ops",
        "traced",
        "first step",
        "× plain",
        "peak / plain",
    ):
        table.add_column(heading, justify="left" if heading in ("network", "way") else "right")
    for case in (case for case in CASES if case in results):
        result = results[case]
        for way in ("plain", *WAYS):
            if way not in result:
                continue
            run = result[way]
            ratios = [run[clock] / result["plain"][clock] for clock in reversed(CLOCKS)]
            peaks = run.get("peaks")
            table.add_row(
                case if way == "plain" else "",
                f"{run['forward']:,}" if way == "plain" else "",
                way,
                f"{run['ops']:,}",
                f"{run['traced']:.2f}",
                f"{run['processor']:.2f} / {run['wall']:.2f}",
                "" if way == "plain" else " / ".join(f"{ratio:.2f}" for ratio in ratios),
                f"{peaks[1] / peaks[0]:.2f}" if peaks else "",
            )
    console.print(table)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("first_step", __doc__, RESULTS, "names of networks")
    parser.add_argument("--ways", type=some_of(WAYS), default=list(WAYS), help="which of ours")
    parser.add_argument("--pairs", type=at_least_one, help="processes of each kind (5; imports: 9)")
    parser.add_argument(
        "--import", dest="imports", action="store_true", help="measure imports instead"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
