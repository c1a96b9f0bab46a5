"""A batch in pieces, against the whole batch.

WideResNet-28-2 learns the digits of scikit-learn, at 32 x 32 pixels, 100 in a batch, by gradient
descent with momentum. Its group normalization treats each image by itself. It trains with
TensorFlow's gradients, and with each batch in another order, for the effect of the order of
additions. And it trains in microbatches of 10, with and without checkpoints in them. After `STEPS`
steps, weights are compared with the plain run's, as shares of the change of each variable. The peak
is the worst of the last five steps. Each run is a process of its own.

In training, the effect of rounding on a weight grows from step to step, so that 32 bits cannot tell
a mistake from the order of additions. A smaller network of the same kind is trained in 64 bits,
too, where rounding is 2⁻²⁹ of that: its weights must agree to `EXACT`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import memsaving_gradients as ms
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting
from benchmarks.measuring import fresh
from benchmarks.networks import build
from benchmarks.settings import count
from graph_tools.memory.measure import measure_peak

STEPS, BATCH, SIZE = 50, 100, 10
NETWORK = {"batch": BATCH, "norm": "group"}
#: Bar for a microbatched step's transient peak over the plain step's.
PEAK = 0.15
#: Bar for the difference of weights over the difference by another order of the examples.
APART = 2.0
#: Bar for the difference of weights in 64 bits.
EXACT = 1e-6
#: Arguments of `trained` by run; ``settings`` are arguments of `memsaving_gradients.microbatch`.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reordered": {"reorder": True},
    "microbatch": {"settings": {"size": SIZE}},
    "microbatch, checkpoints": {"settings": {"size": SIZE, "checkpoints": "auto"}},
    "64 bits": {"wide": True},
    "64 bits, microbatch": {"wide": True, "settings": {"size": SIZE}},
}
#: Other options of the network in 64 bits.
WIDE = {"depth": 10, "widen": 1}


def run(job: Job) -> dict[str, Any]:
    """Return the peak of each run, and the difference of its weights from the plain run's."""
    steps = job.settings["steps"]
    found: dict[str, Any] = {}
    weights: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        for name, what in RUNS.items():
            path = str(Path(folder) / f"{len(found)}.npz")
            arguments = {"steps": steps, "path": path, **what}
            found[name] = fresh("techniques.microbatches:trained", **arguments)
            with np.load(path) as saved:
                weights[name] = [saved[key] for key in saved.files]
    for name, row in found.items():
        plain = weights["64 bits" if "wide" in RUNS[name] else "plain"]
        count = len(plain) // 2
        row["apart"] = max(
            float(abs(a - b).max() / abs(b - c).max())
            for a, b, c in zip(weights[name][count:], plain[count:], plain[:count], strict=True)
        )
    return found


def trained(
    steps: int,
    path: str,
    reorder: bool = False,
    settings: dict[str, Any] | None = None,
    wide: bool = False,
) -> dict[str, Any]:
    """Train, save weights before and after, and return the worst late peak and the losses."""
    if wide:
        keras.config.set_dtype_policy("float64")
    network = build("wide_resnet", **NETWORK, **(WIDE if wide else {}))
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    variables = list(network.variables)
    optimizer.build(variables)
    loss = network.loss if settings is None else ms.microbatch(network.loss, **settings)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(x, y)
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return value

    before = [variable.numpy() for variable in variables]
    losses = []
    batches = iter(_batches(steps, reorder))

    def run() -> None:
        losses.append(float(step(*next(batches))))

    for _ in range(steps - 5):
        run()
    peak = measure_peak(run, warmup=0, steps=5)
    np.savez(path, *before, *(variable.numpy() for variable in variables))
    return {"peak": peak.peak, "losses": [losses[0], losses[-1]]}


def _batches(steps: int, reorder: bool) -> list[tuple[Any, Any]]:
    """Return batches of digits at 32 x 32 pixels with three channels, and their labels."""
    data = load_digits()
    draw = np.random.default_rng(0)
    images = (
        (data.images / 8 - 1).astype(np.float32).repeat(4, 1).repeat(4, 2)[..., None].repeat(3, 3)
    )
    found = []
    for _ in range(steps):
        chosen = draw.choice(len(images), BATCH, replace=False)
        if reorder:
            chosen = np.sort(chosen)
        found.append(
            (tf.constant(images[chosen]), tf.constant(data.target[chosen].astype(np.int32)))
        )
    return found


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    figures = []
    for row in results.values():
        plain, order = row["plain"], row["reordered"]["apart"]
        for name in RUNS:
            if name == "64 bits, microbatch":
                figures.append(Figure(f"{name}: weights apart", row[name]["apart"], EXACT))
            if name.startswith("microbatch"):
                share = row[name]["peak"] / plain["peak"]
                figures.append(Figure(f"{name}: peak / plain", share, PEAK))
                figures.append(
                    Figure(f"{name}: weights apart / reordered", row[name]["apart"] / order, APART)
                )
    return figures


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each run."""
    for row in results.values():
        for run in (run for run in RUNS if run in row):
            found = row[run]
            losses = (f"{loss:.4f}" for loss in found["losses"])
            yield run, f"{found['peak'] / 1e6:.1f} MB", *losses, f"{found['apart']:.1e}"


COLUMNS = Columns(
    f"WideResNet, {SIZE} of {BATCH}", "run | peak | first loss | last loss | weights apart", lines
)
EXPERIMENT = Experiment(
    "microbatches",
    rows=lambda settings: ("wide-resnet",),
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    settings={"steps": Setting(STEPS, partial(count, 5), "steps of each run")},
)
