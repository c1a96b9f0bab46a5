"""A 200-layer ResNet on handwritten digits, in a fraction of the memory, with the same losses.

The script trains a pre-activation ResNet (He et al. 2016, arXiv 1603.05027: three stages of
bottleneck blocks) on the digits that ship with scikit-learn. It trains once with plain gradients
and once with ``memsaving_gradients``, each in a fresh process with the same seeds. Op determinism
is on and grappler's arithmetic rewriting off, so the losses must agree to the last bit; the exit
status says whether they do. Both runs use oneDNN's convolutions. TensorFlow's own, the default on
processors without AVX512, take scratch space that no plan can save: with
``TF_ENABLE_ONEDNN_OPTS=0`` the peak falls to a fifth instead of an eighth.

Run it with ``make demo``, or ``python examples/digits_resnet.py --help``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OUTPUT = Path(__file__).parent / "output"
RUNS = {"plain": "plain gradients", "ours": "memsaving_gradients"}
STAGES = 3
WARM_UP = 2  # first steps, in which TensorFlow traces and its allocator grows: not measured


@dataclass(frozen=True)
class Settings:
    """The settings that both runs share."""

    layers: int
    width: int
    size: int
    batch: int
    epochs: int
    images: int
    checkpoints: str

    @property
    def blocks(self) -> int:
        """Blocks in a stage, three convolutions each; stem and classifier are two more layers."""
        return -(-(self.layers - 2) // (3 * STAGES))

    @property
    def depth(self) -> int:
        """Layers with weights on the longest path."""
        return 3 * STAGES * self.blocks + 2

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.images // self.batch


# --- the network and its data


def digits(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return images of shape (n, size, size, 1) in [-1, 1], and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    count = settings.steps * settings.batch  # whole batches only: one shape, traced once
    times = settings.size // data.images.shape[1]
    images = data.images[:count].repeat(times, axis=1).repeat(times, axis=2) / 8 - 1
    return images[..., None].astype(np.float32), data.target[:count].astype(np.int32)


def batch_norm() -> Any:
    """Return a layer of batch normalization as one op.

    Keras' own layer makes a dozen ops. TensorFlow's AddN sums a gradient from three or more of
    them, and begins with an input whose buffer it may overwrite. So its sums depend on the timing
    of threads, even with op determinism, and two plain runs of a network as deep as this one
    differ.
    """
    import keras
    import tensorflow as tf

    class BatchNorm(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            def weight(name: str, initial: str, trainable: bool) -> Any:
                return self.add_weight(
                    name=name, shape=shape[-1:], initializer=initial, trainable=trainable
                )

            self.gamma = weight("gamma", "ones", trainable=True)
            self.beta = weight("beta", "zeros", trainable=True)
            self.mean = weight("mean", "zeros", trainable=False)
            self.variance = weight("variance", "ones", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                x,
                self.gamma,
                self.beta,
                self.mean,
                self.variance,
                is_training=training,
                exponential_avg_factor=0.01 if training else 1.0,
            )
            if training:
                self.mean.assign(mean)
                self.variance.assign(variance)
            return y

    return BatchNorm()


def resnet(settings: Settings) -> Any:
    """Return a pre-activation ResNet of bottleneck blocks, as a Keras functional model."""
    import keras
    from keras import layers

    def conv(x: Any, filters: int, kernel: int, strides: int = 1) -> Any:
        return layers.Conv2D(
            filters, kernel, strides, "same", use_bias=False, kernel_initializer="he_normal"
        )(x)

    def activate(x: Any) -> Any:
        return layers.ReLU()(batch_norm()(x))

    def bottleneck(x: Any, filters: int, strides: int) -> Any:
        before = activate(x)
        same_shape = strides == 1 and x.shape[-1] == 4 * filters
        shortcut = x if same_shape else conv(before, 4 * filters, 1, strides)
        y = conv(before, filters, 1)
        y = conv(activate(y), filters, 3, strides)
        y = conv(activate(y), 4 * filters, 1)
        return layers.Add()([shortcut, y])

    inputs = keras.Input((settings.size, settings.size, 1))
    x = conv(inputs, settings.width, 3)
    for stage in range(STAGES):
        for block in range(settings.blocks):
            x = bottleneck(x, settings.width << stage, strides=2 if stage and not block else 1)
    x = layers.GlobalAveragePooling2D()(activate(x))
    return keras.Model(inputs, layers.Dense(10)(x))


# --- one training run, in its own process


def train(run: str, settings: Settings, folder: Path) -> None:
    """Train, report each step to the parent on standard output, and write the results to
    ``folder``."""
    import keras
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    keras.utils.set_random_seed(0)

    class Meter(keras.callbacks.Callback):
        """A meter of the transient peak (of TensorFlow's allocator) and the seconds of every
        step."""

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
            print(json.dumps({"step": len(self.seconds), "loss": float(logs["loss"])}), flush=True)

    images, labels = digits(settings)
    model = resnet(settings)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    # If tracing creates variables, the step is traced twice, which takes half a minute here.
    model.optimizer.build(model.trainable_variables)
    meter = Meter()
    callbacks: list[Any] = [meter]
    result: dict[str, Any] = {}
    if run == "ours":
        import memsaving_gradients as ms

        saving = ms.keras.MemorySavingGradients(checkpoints=settings.checkpoints)
        callbacks.append(saving)

    history = model.fit(
        images,
        labels,
        batch_size=settings.batch,
        epochs=settings.epochs,
        callbacks=callbacks,
        shuffle=False,
        verbose=0,
    )

    if run == "ours":
        plan = saving.plans[-1]
        result["plan"] = str(plan)
        result["simulated"] = {"plain": plan.allocated_plain, "ours": plan.allocated}
        result["timelines"] = {
            "plain": plan.timeline_plain.tolist(),
            "ours": plan.timeline.tolist(),
        }
    # The worst step counts: the executor's order, and with it the peak, differs from step to step.
    result["peak"] = max(meter.peaks[WARM_UP:])
    result["seconds"] = float(np.median(meter.seconds[WARM_UP:]))
    result["first"] = meter.seconds[0]
    result["losses"] = [float(loss) for loss in history.history["loss"]]
    (folder / f"{run}.json").write_text(json.dumps(result))


# --- both runs, side by side


def watch(run: str, settings: Settings, folder: Path, progress: Progress) -> dict[str, Any]:
    """Start one run in a fresh process and show its progress."""
    # No total before the first step: building, tracing and TensorFlow's own graph optimizer.
    task = progress.add_task(RUNS[run], total=None, note="building, tracing")
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "1",  # off by default on processors without AVX512
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "1",  # the allocator that keeps count
        "CUDA_VISIBLE_DEVICES": "-1",  # and is the processor's
        "KERAS_BACKEND": "tensorflow",
    }
    command = [sys.executable, __file__, "--child", run, json.dumps(asdict(settings)), str(folder)]
    with (folder / f"{run}.log").open("w+") as log:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    state = json.loads(line)
                    progress.update(
                        task,
                        total=settings.epochs * settings.steps,
                        completed=state["step"],
                        note=f"loss {state['loss']:.4f}",
                    )
        if child.returncode:
            log.seek(0)
            raise SystemExit(f"{log.read()}\nthe run with {RUNS[run]} failed ({child.returncode})")
    return json.loads((folder / f"{run}.json").read_text())


def table(results: dict[str, dict[str, Any]], settings: Settings) -> Table:
    """Return a table of both runs, and the ratio of the second to the first."""
    plain, ours = results["plain"], results["ours"]
    simulated = ours["simulated"]
    count = settings.steps * settings.batch
    view = Table(
        title=f"{settings.depth}-layer ResNet, {count} digits, batch {settings.batch}",
        caption="measured: what the worst step allocates beyond weights and inputs; "
        "simulated: what its forward and backward ops take of it, without the optimizer's",
    )
    view.add_column("")
    for run in RUNS.values():
        view.add_column(run, justify="right")
    view.add_column("", justify="right")

    def row(name: str, first: str, second: str, third: str, **style: Any) -> None:
        view.add_row(name, first, second, third, **style)

    def peaks(name: str, first: int, second: int) -> None:
        row(name, f"{first:,}", f"{second:,}", f"1/{first / second:.1f}")

    peaks("peak bytes, measured", plain["peak"], ours["peak"])
    peaks("peak bytes, simulated", simulated["plain"], simulated["ours"])
    row(
        "seconds a step",
        f"{plain['seconds']:.3f}",
        f"{ours['seconds']:.3f}",
        f"× {ours['seconds'] / plain['seconds']:.2f}",
    )
    row("seconds, first step", f"{plain['first']:.1f}", f"{ours['first']:.1f}", "")
    for epoch, (first, second) in enumerate(zip(plain["losses"], ours["losses"], strict=True), 1):
        same = "[green]equal[/]" if first == second else "[bold red]different[/]"
        row(f"loss after epoch {epoch}", f"{first:.9f}", f"{second:.9f}", same)
    return view


def picture(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the simulated memory over one step, with the measured peaks as horizontal lines.

    The lines count the optimizer's tensors, too, and the allocator's chunks instead of requested
    bytes.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"plain": "tab:red", "ours": "tab:blue"}
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for run, color in colors.items():
        mebibytes = np.array(results["ours"]["timelines"][run]) / 2**20
        progress = np.linspace(0, 1, len(mebibytes))
        axes.plot(progress, mebibytes, color=color, label=f"{RUNS[run]}, simulated")
        axes.fill_between(progress, mebibytes, color=color, alpha=0.2, linewidth=0)
        peak = results[run]["peak"] / 2**20
        label = f"{RUNS[run]}, measured peak (with optimizer)"
        axes.axhline(peak, color=color, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="ops of one training step, first to last", ylabel="MiB alive", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def compare(settings: Settings, path: Path) -> bool:
    """Run both, print the table, draw the picture; return whether all losses are equal."""
    console = Console()
    columns = [TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TextColumn("{task.fields[note]}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Progress(*columns, console=console) as progress:
            results = {run: watch(run, settings, folder, progress) for run in RUNS}
    picture(results, path)
    plan = path.with_name("plan.txt")
    plan.write_text(results["ours"]["plan"] + "\n", encoding="utf-8")
    console.print(table(results, settings))
    console.print(f"memory over the step: {path}\nwhat is kept, and why: {plan}", soft_wrap=True)
    equal = results["plain"]["losses"] == results["ours"]["losses"]
    if not equal:
        console.print("[bold red]the losses differ: the two runs are not the same training[/]")
    return equal


def main() -> int:
    """Read the command line, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layers", type=int, default=200, help="at least this many layers (default %(default)s)")
    add("--width", type=int, default=16, help="filters of the first stage (default %(default)s)")
    add("--size", type=int, default=16, choices=(8, 16, 24, 32), help="pixels a side (default 16)")
    add("--batch", type=int, default=32, help="images in a batch (default %(default)s)")
    add("--epochs", type=int, default=3, help="(default %(default)s)")
    add("--images", type=int, default=1024, help="of 1797 (default %(default)s)")
    add("--checkpoints", default="memory", help="'memory' (default), 'speed' or 'auto'")
    add("--picture", type=Path, default=OUTPUT / "memory.png", help="where the picture goes")
    values = vars(parser.parse_args())
    path = values.pop("picture")
    return 0 if compare(Settings(**values), path) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], Settings(**json.loads(sys.argv[3])), Path(sys.argv[4]))
    else:
        sys.exit(main())
