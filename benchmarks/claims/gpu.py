"""``python -m benchmarks.claims.gpu``: memory and time of plain training, of the default mode and within a budget of 0.45, on a GPU.

Two kinds of steps: loss and gradients in a ``tf.function``, each gradient consumed at once; and Keras' ``fit`` with momentum, compiled with
``jit_compile="auto"``, which on a GPU means XLA wherever all layers of the model can be compiled. Memory is what the device's own allocator counts
(``tf.config.experimental.get_memory_info``, reset before each step): the worst of five steps after two, in a fresh process each. Time is the ratio
of medians of interleaved pairs in one process, beside plain training of the same kind.

Where there is no GPU that TensorFlow can use, a line says so, and the exit code is 3. ``--device cpu`` goes the same way on a CPU, where Keras leaves
XLA off.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import count
from benchmarks.bars import Figure, chosen, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.errors import GraphToolsError
from graph_tools.memory.measure import in_fresh_process
from memsaving_gradients.planners import PLANNERS

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
NO_GPU = 3

#: Builders and options for `benchmarks.networks.build`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("application", {"name": "ResNet50", "batch": 64}),
    "densenet121": ("application", {"name": "DenseNet121", "batch": 64}),
    "unet": ("unet", {"image": 256, "batch": 16}),
    "encoder": ("encoder", {"batch": 32, "length": 256, "width": 512, "heads": 8}),
    "lstm": ("lstm", {"length": 128, "hidden": 512}),
    "dense_chain": ("dense_chain", {"batch": 8192}),
    # For tests.
    "tiny": ("dense_chain", {"depth": 16, "batch": 256, "width": 64}),
}
#: Ways to train, and what they say to ours; plain says nothing.
WAYS: dict[str, dict[str, Any] | None] = {"plain": None, "default": {}, "0.45": {"budget": 0.45}}
KINDS = ("step", "fit")
#: The share of the plain peak that a budget of 0.45 may take; XLA's scratch buffer is rounded up, so that `fit` has no bar.
BUDGET = 0.45
#: What a GPU is asked for as it is needed, and not all of it at once.
GROW = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def main(arguments: list[str] | None = None) -> int:
    """Measure on the device; 1 if a bar is missed or a row fails, 3 if there is no such device."""
    options = _parse(arguments)
    names = chosen(MODELS, options.only, apart="tiny")
    if not names:
        return 2
    environment = ENVIRONMENT if options.device == "cpu" else GROW
    device = in_fresh_process("benchmarks.claims.gpu:device", {"kind": options.device}, environment)
    if device is None:
        print("benchmarks.claims.gpu: TensorFlow sees no GPU here, so nothing was measured")
        return NO_GPU
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    for name in names:
        for kind in KINDS:
            for way in WAYS:
                row = f"{name}-{kind}-{way}"
                settings = WAYS[way]
                if settings and options.planner != "auto":
                    settings = {**settings, "planner": options.planner}
                what = {"name": name, "kind": kind, "settings": settings}
                measured = _row(what, options, environment)
                results[row] = {**what, "way": way, "device": device, **measured}
                console.print(f"{row}: {results[row]}", highlight=False, markup=False)
                write(options.json, {row: results[row]})
    figures = judge(results)
    write(options.json, {}, figures)
    _print(results, device)
    print_figures(figures, Console())
    failed = any("failed" in result for result in results.values())
    return int(failed or not all(figure.passed for figure in figures))


def device(kind: str) -> str | None:
    """The name of the first device of a kind, if there is one."""
    import tensorflow as tf

    found = tf.config.list_physical_devices(kind.upper())
    if not found:
        return None
    details = tf.config.experimental.get_device_details(found[0]) if kind == "gpu" else {}
    return str(details.get("device_name", found[0].name))


def peak(name: str, kind: str, settings: dict[str, Any] | None, on: str) -> dict[str, Any]:
    """The transient peak on a device, and whether XLA compiled the step; ``settings`` as in `WAYS`."""
    from graph_tools.memory.measure import measure_peak

    run, compiled = _runner(name, kind, settings)
    return {**dataclasses.asdict(measure_peak(run, device=on)), "xla": compiled}


def ratio(name: str, kind: str, settings: dict[str, Any], pairs: int) -> dict[str, Any]:
    """The time of ours over that of plain training of the same kind."""
    from graph_tools.memory.measure import time_ratio

    plain, ours = _runner(name, kind, None)[0], _runner(name, kind, settings)[0]
    return dataclasses.asdict(time_ratio(ours, plain, pairs=pairs))


def _runner(
    name: str, kind: str, settings: dict[str, Any] | None
) -> tuple[Callable[[], Any], bool]:
    """What runs a step and waits for it; whether XLA compiles it."""
    model, options = MODELS[name]
    if kind == "step":
        from benchmarks.steps import make_step

        return make_step(model, options, ours=settings is not None, settings=settings).run, False
    import keras

    import memsaving_gradients as ms
    from benchmarks.networks import build

    network = build(model, **options)
    layers = network.layers
    layers.compile(
        keras.optimizers.SGD(1e-6, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile="auto",
    )
    *inputs, labels = network.batch
    x = inputs[0] if len(inputs) == 1 else tuple(inputs)
    callbacks = [] if settings is None else [ms.keras.MemorySavingGradients(**settings)]

    def run() -> Any:
        return layers.fit(
            x, labels, batch_size=len(labels), shuffle=False, verbose=0, callbacks=callbacks
        ).history["loss"]

    return run, bool(layers.jit_compile)


def _row(
    what: dict[str, Any], options: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    try:
        found = in_fresh_process(
            "benchmarks.claims.gpu:peak", {**what, "on": f"{options.device.upper()}:0"}, environment
        )
        result = {"peak": found["peak"], "xla": found["xla"], "time": None}
        if options.pairs and what["settings"] is not None:
            result["time"] = in_fresh_process(
                "benchmarks.claims.gpu:ratio", {**what, "pairs": options.pairs}, environment
            )
    except GraphToolsError as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    return result


def judge(results: dict[str, Any]) -> list[Figure]:
    """The bar of budgets, where gradients alone are measured; and that the default saves something."""
    figures = []
    for row, result in results.items():
        plain = results.get(f"{result['name']}-{result['kind']}-plain", {})
        if result["way"] == "plain" or "peak" not in result or "peak" not in plain:
            continue
        share = result["peak"] / plain["peak"]
        within = result["way"] == "0.45" and result["kind"] == "step"
        figures.append(Figure(f"{row}: peak / plain", share, BUDGET if within else 1.0))
    return figures


def _print(results: dict[str, Any], device: str) -> None:
    table = Table(title=f"on {device}", header_style="bold")
    for heading in ("row", "XLA", "MB", "of plain", "time", "control"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row, result in results.items():
        if "failed" in result:
            table.add_row(row, "", "[red]failed[/red]")
            continue
        plain = results[f"{result['name']}-{result['kind']}-plain"].get("peak")
        timed = result["time"]
        table.add_row(
            row,
            "yes" if result["xla"] else "no",
            f"{result['peak'] / 1e6:,.1f}",
            f"{result['peak'] / plain:.2f}" if plain else "",
            f"{timed['ratio']:.3f}" if timed else "",
            f"{timed['control']:.3f}" if timed else "",
        )
    Console(width=120).print(table)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("gpu", __doc__, RESULTS, "names of networks")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="where to measure")
    parser.add_argument("--pairs", type=count, default=15, help="of steps for times; 0: no times")
    parser.add_argument(
        "--planner", choices=list(PLANNERS), default="auto", help="who plans within the budget"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
