"""Memory and time of plain training, the default mode and a budget of 0.45, on a GPU.

There are two kinds of steps: loss and gradients in a ``tf.function``, each gradient consumed at
once; and Keras' ``fit`` with momentum and ``jit_compile="auto"``. On a GPU, this means XLA if all
layers of the model can be compiled. Memory is the count of the device's own allocator
(``tf.config.experimental.get_memory_info``, reset before each step): the worst of five steps after
two, in a fresh process each. Time is the ratio to plain training of the same kind: medians of
interleaved pairs in one process.

``--set device=cpu`` measures on a CPU, where Keras leaves XLA off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.measuring import ENVIRONMENT, fresh
from benchmarks.settings import one_of, pairs, planner
from graph_tools.errors import GraphToolsError

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
#: Ways to train, and their arguments of our gradients or callback; ``None`` for plain.
WAYS: dict[str, dict[str, Any] | None] = {"plain": None, "default": {}, "0.45": {"budget": 0.45}}
KINDS = ("step", "fit")
#: The bar for a budget of 0.45, as a share of the plain peak. It is not for ``fit``, because XLA's
#: scratch buffer is rounded up.
BUDGET = 0.45
#: TensorFlow allocates memory of a GPU as needed, not all of it at once.
GROW = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def rows(settings: Settings) -> list[str]:
    """Return each network in each kind of step, trained in each way."""
    return [f"{name}-{kind}-{way}" for name in MODELS for kind in KINDS for way in WAYS]


def missing(settings: Settings, glob: str) -> str | None:
    """Return a message if there is no such device."""
    if _fresh(settings, "device", kind=settings["device"]) is None:
        return "TensorFlow sees no GPU here, so nothing was measured"
    return None


def run(job: Job) -> dict[str, Any]:
    """Measure one network, in one kind of step and one way to train."""
    name, kind, way = job.row.split("-")
    on, settings = job.settings["device"], WAYS[way]
    if settings and job.settings["planner"] != "auto":
        settings = {**settings, "planner": job.settings["planner"]}
    what = {"name": name, "kind": kind, "settings": settings}
    found = _fresh(job.settings, "peak", **what, on=f"{on.upper()}:0")
    time = None
    if job.settings["pairs"] and settings is not None:
        time = _fresh(job.settings, "ratio", **what, pairs=job.settings["pairs"])
    device = _fresh(job.settings, "device", kind=on)
    measured = {"peak": found["peak"], "xla": found["xla"], "time": time}
    return {**what, "way": way, "device": device, **measured}


def _fresh(settings: Settings, function: str, /, **arguments: Any) -> Any:
    environment = ENVIRONMENT if settings["device"] == "cpu" else GROW
    try:
        return fresh(f"claims.gpu:{function}", environment, **arguments)
    except GraphToolsError as error:
        raise GraphToolsError(str(error).strip().splitlines()[-1]) from None


def device(kind: str) -> str | None:
    """Return the name of the first device of a kind, if there is one."""
    import tensorflow as tf

    found = tf.config.list_physical_devices(kind.upper())
    if not found:
        return None
    details = tf.config.experimental.get_device_details(found[0]) if kind == "gpu" else {}
    return str(details.get("device_name", found[0].name))


def peak(name: str, kind: str, settings: dict[str, Any] | None, on: str) -> dict[str, Any]:
    """Return the transient peak on a device, and whether XLA compiled the step."""
    from graph_tools.memory.measure import measure_peak

    run, compiled = _runner(name, kind, settings)
    return {**dataclasses.asdict(measure_peak(run, device=on)), "xla": compiled}


def ratio(name: str, kind: str, settings: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Return the ratio of the time of ours to plain training's of the same kind."""
    from graph_tools.memory.measure import time_ratio

    plain, ours = _runner(name, kind, None)[0], _runner(name, kind, settings)[0]
    return dataclasses.asdict(time_ratio(ours, plain, pairs=pairs))


def _runner(
    name: str, kind: str, settings: dict[str, Any] | None
) -> tuple[Callable[[], Any], bool]:
    """Return a function that runs a step and waits for it, and whether XLA compiles the step."""
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


def bars(results: Results) -> list[Figure]:
    """Return the bars: `BUDGET` for steps within a budget, at most the plain peak for others."""
    figures = []
    for row, result in results.items():
        plain = results.get(f"{result['name']}-{result['kind']}-plain", {})
        if result["way"] == "plain" or "peak" not in plain:
            continue
        share = result["peak"] / plain["peak"]
        within = result["way"] == "0.45" and result["kind"] == "step"
        figures.append(Figure(f"{row}: peak / plain", share, BUDGET if within else 1.0))
    return figures


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each row."""
    for row, result in results.items():
        plain = results.get(f"{result['name']}-{result['kind']}-plain", {}).get("peak")
        timed = result["time"]
        yield (
            row,
            result["device"],
            "yes" if result["xla"] else "no",
            f"{result['peak'] / 1e6:,.1f}",
            f"{result['peak'] / plain:.2f}" if plain else "",
            f"{timed['ratio']:.3f}" if timed else "",
            f"{timed['control']:.3f}" if timed else "",
        )


COLUMNS = Columns(
    "training on a device",
    "row | device | XLA | MB | of plain | time | control",
    lines,
    text=("device",),
)
EXPERIMENT = Experiment(
    "gpu",
    rows=rows,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    apart=tuple(f"tiny-{kind}-{way}" for kind in KINDS for way in WAYS),
    missing=missing,
    settings={
        "device": Setting("gpu", one_of("gpu", "cpu"), "where to measure"),
        "pairs": pairs(15),
        "planner": planner(),
    },
)
