"""Four techniques to train in little memory, alone and together, after Sohoni et al. 2019.

The paper is arXiv 1904.10631. ``digits``: WideResNet-28-2 on handwritten digits, as images of 32 x
32. ``translation``: a Transformer with dynamic convolutions, of the size that Wu et al. 2019
trained on IWSLT'14, translates Python's own documentation into a made-up language. Each is trained
in ``float32``; with checkpoints; in microbatches; with weights, slots and activations in
``bfloat16``; with sparse weights that move; and with all of these. Each technique takes a few lines
of `train`.

Run it with ``python examples/low_memory.py digits``, or ``--help``. Every run is a process of its
own. A table shows memory, quality and costs. *Activations* are values of the forward pass that the
backward pass reads, the most alive at one time. The peak includes weights and slots.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)  # for the networks

RUNS = {
    "float32": (),
    "checkpoints": ("checkpoints",),
    "microbatches": ("microbatches",),
    "bfloat16": ("bfloat16",),
    "sparse": ("sparse",),
    "all": ("checkpoints", "microbatches", "bfloat16", "sparse"),
}
WARM_UP = 2  # first steps, in which TensorFlow traces and its allocator grows: not measured
Arrays = tuple[Any, np.ndarray]


@dataclass(frozen=True)
class Task:
    """The sizes of a task."""

    batch: int
    microbatch: int
    sparsity: float
    epochs: int
    quality: str


TASKS = {
    "digits": Task(batch=100, microbatch=10, sparsity=0.7, epochs=6, quality="accuracy"),
    "translation": Task(batch=128, microbatch=8, sparsity=0.6, epochs=2, quality="words right"),
}


# ---------------------------------------------------------------- data


def digits() -> tuple[Arrays, Arrays]:
    """Return images of shape (n, 32, 32, 3) in [-1, 1] and their labels, for training and for
    tests."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images.repeat(4, axis=1).repeat(4, axis=2)[..., None].repeat(3, axis=3) / 8 - 1
    order = np.random.default_rng(0).permutation(len(images))
    x, y = images[order].astype(np.float32), data.target[order].astype(np.int32)
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def translation(length: int = 32) -> tuple[Arrays, Arrays]:
    """Return pieces of documentation, and their translation: other words, in the reverse order
    between two punctuation marks.

    Words are numbers: 0 ends a sentence, and every word of one language has one in the other.
    """
    from pydoc_data.topics import topics

    text = re.findall(r"\w+|[^\s\w]", " ".join(topics[name] for name in sorted(topics)).lower())
    known = sorted(set(text))
    marks = {number for number, word in enumerate(known) if not re.match(r"\w", word)}
    number_of = {word: number for number, word in enumerate(known)}
    numbers = [number_of[word] for word in text]
    foreign = len(known) + np.random.default_rng(0).permutation(len(known))
    rows = []
    for start in range(0, len(numbers) - length, length - 1):
        source = numbers[start : start + length - 1]
        target: list[int] = []
        clause: list[int] = []
        for word in source:
            if word in marks:
                target += [*reversed(clause), word]
                clause = []
            else:
                clause.append(word)
        target += reversed(clause)
        other = [1 + int(foreign[word]) for word in target]
        rows.append(([1 + word for word in source] + [0], [0, *other], [*other, 0]))
    order = np.random.default_rng(0).permutation(len(rows))
    source, target, labels = np.array(rows, np.int32)[order].transpose(1, 0, 2)
    test = len(rows) // 10
    return (
        ((source[test:], target[test:]), labels[test:]),
        ((source[:test], target[:test]), labels[:test]),
    )


# ---------------------------------------------------------------- training


def train(name: str, run: str, seed: int, epochs: int, steps: int | None) -> dict[str, Any]:
    """Train with the techniques of a run, and measure (in a process of its own)."""
    import keras

    import memsaving_gradients as ms

    task, techniques = TASKS[name], RUNS[run]
    (x, y), test = {"digits": digits, "translation": translation}[name]()
    whole = min(len(y) // task.batch, steps or len(y)) * task.batch
    x, y = _first(x, whole), y[:whole]

    if "bfloat16" in techniques:
        keras.config.set_dtype_policy("bfloat16")
    model, optimizer, loss = _network(name, epochs * whole // task.batch, seed)
    keras.utils.set_random_seed(seed)
    callbacks: list[Any] = []
    if "sparse" in techniques:
        model = ms.keras.sparsify(model, task.sparsity, seed=seed)
        # Weights move twenty times, as they would in a long training.
        moves = max(1, epochs * whole // task.batch // 20)
        callbacks.append(ms.keras.Reparameterize([(0.0, moves)], seed=seed))
    if "bfloat16" in techniques:
        optimizer = ms.keras.low_precision(optimizer, seed=seed)
    saving: dict[str, Any] = {}
    if "checkpoints" in techniques:
        saving["max_slowdown"] = 1.3
    if "microbatches" in techniques:
        batch_norm = "microbatch" if name == "digits" else None
        saving |= {"microbatch": task.microbatch, "batch_norm": batch_norm}
        if "bfloat16" in techniques:
            saving["buffer"] = "stochastic"  # gradients are added up in 16 bits, too
        if "checkpoints" not in techniques:
            saving["budget"] = 1.0  # plain training fits: nothing is recomputed
    if saving:
        callbacks.append(ms.keras.MemorySavingGradients(**saving))

    model.compile(optimizer, loss, metrics=["accuracy"])
    optimizer.build(model.trainable_variables)
    meter = _meter()
    found = model.fit(x, y, task.batch, epochs, callbacks=[meter, *callbacks], verbose=0)
    result = {"loss": float(found.history["loss"][-1])}
    result["quality"] = float(
        model.evaluate(*test, task.batch, verbose=0, return_dict=True)["accuracy"]
    )
    rows = task.microbatch if "microbatches" in techniques else task.batch
    result |= _of_a_pass(model, loss, (_first(x, rows), y[:rows]), "checkpoints" in techniques)
    result["flops"] *= task.batch / rows
    result["model"], result["optimizer"] = _held(model.variables), _held(optimizer.variables)
    # The worst step counts: the executor's order, and with it the peak, differs from step to step.
    result["peak"] = max(meter.peaks[WARM_UP:]) + result["model"] + result["optimizer"]
    result["seconds"] = median(meter.seconds[WARM_UP:])
    return result


def _network(name: str, steps: int, seed: int) -> tuple[Any, Any, Any]:
    """Return a model, an optimizer, a loss."""
    import keras

    from benchmarks.networks import build
    from benchmarks.networks.dynamic import loss_of_words

    if name == "digits":
        rate = keras.optimizers.schedules.CosineDecay(0.1, steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return (
            build("wide_resnet", seed=seed).layers,
            keras.optimizers.SGD(rate, momentum=0.9),
            loss,
        )
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps, 0.0, "rate", 5e-4, steps // 8)
    return (
        build("dynamic_conv", seed=seed).layers,
        keras.optimizers.Adam(rate, beta_2=0.98),
        loss_of_words,
    )


def _meter() -> Any:
    """Return a callback that measures the transient peak (of TensorFlow's allocator) and the
    seconds of every step."""
    import keras
    import tensorflow as tf

    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []
            self.peaks: list[int] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")
            self.before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            self.peaks.append(peak - self.before)

    return Meter()


def _of_a_pass(model: Any, loss: Any, batch: Arrays, checkpoints: bool) -> dict[str, Any]:
    """Return activations and floating-point operations of the forward and backward pass of a batch,
    or microbatch."""
    import tensorflow as tf

    import memsaving_gradients as ms
    from graph_tools.costs.estimates import op_flops
    from graph_tools.graph.capture import capture

    def computed(x: Any, y: Any) -> Any:
        weights = [weight.value for weight in model.trainable_variables]
        return tf.gradients(loss(y, model(x, training=True)), weights)

    # Plain training fits a budget of its own peak: nothing is recomputed then.
    with ms.patched(**({"max_slowdown": 1.3} if checkpoints else {"budget": 1.0})):
        step = tf.function(computed)
        graph = step.get_concrete_function(*batch).graph
    (plan,) = ms.plans(step)
    ops = capture([tensor.op for tensor in graph.outputs]).ops
    return {
        "activations": plan.activations,
        "flops": sum(op_flops(op, len(batch[1])) for op in ops),
    }


def _first(x: Any, rows: int) -> Any:
    return tuple(one[:rows] for one in x) if isinstance(x, tuple) else x[:rows]


def _held(variables: Any) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.numpy().dtype).itemsize for v in variables)


# ---------------------------------------------------------------- the table


def table(name: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """Return a table of bytes and operations of the first seed, and of loss, quality and time over
    all seeds."""
    task = TASKS[name]
    view = Table(title=f"{name}, batch {task.batch}: MB", header_style="bold")
    view.add_column("")
    for heading in (
        "model",
        "optimizer",
        "activations",
        "peak",
        "of float32",
        "loss",
        task.quality,
        "GFLOP",
        "s/step",
    ):
        view.add_column(heading, justify="right")
    plain = results.get("float32")
    for run, rows in results.items():
        first = rows[0]
        share = "" if plain is None else f"1/{plain[0]['peak'] / first['peak']:.1f}"
        quality = [row["quality"] for row in rows]
        spread = f" ± {100 * np.std(quality):.1f}" if len(rows) > 1 else ""
        view.add_row(
            run,
            *(f"{first[part] / 1e6:.2f}" for part in ("model", "optimizer", "activations", "peak")),
            share,
            f"{mean(row['loss'] for row in rows):.3f}",
            f"{100 * mean(quality):.1f} %{spread}",
            f"{first['flops'] / 1e9:,.0f}",
            f"{median(row['seconds'] for row in rows):.2f}",
        )
    return view


def main() -> int:
    """Read the command line, run, and print the table."""
    from graph_tools.memory.measure import in_fresh_process

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("task", choices=TASKS)
    add("--runs", default=",".join(RUNS), help="some of them, with commas (default: %(default)s)")
    add("--seeds", type=int, default=1, help="each run is repeated so many times")
    add("--epochs", type=int, help="of the whole data")
    add("--steps", type=int, help="at most so many in an epoch")
    add("--json", type=Path, help="a file for the results, to which runs are added")
    options = parser.parse_args()
    runs = options.runs.split(",")
    if unknown := set(runs) - set(RUNS):
        parser.error(f"no run {sorted(unknown)}; there are {[*RUNS]}")
    path: Path | None = options.json
    results: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    console = Console(width=130)
    for seed in range(options.seeds):
        for run in runs:
            found = results.setdefault(options.task, {}).setdefault(run, [])
            if len(found) > seed:
                continue
            what = {
                "name": options.task,
                "run": run,
                "seed": seed,
                "epochs": options.epochs or TASKS[options.task].epochs,
                "steps": options.steps,
            }
            with console.status(f"{run}, seed {seed}"):
                found.append(
                    in_fresh_process(
                        "examples.low_memory:train", what, {"CUDA_VISIBLE_DEVICES": "-1"}
                    )
                )
            if path:
                path.write_text(json.dumps(results, indent=1) + "\n")
    console.print(
        table(
            options.task,
            {run: results[options.task][run] for run in RUNS if results[options.task].get(run)},
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
