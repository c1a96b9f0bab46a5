"""A character LSTM and a small Transformer on long text, in less memory than plain training needs.

Both learn to predict the next character of the sources of Python's standard library, over thousands
of characters at a time. Each is trained twice, in fresh processes in which TensorFlow's allocator
has a limited memory. Plain training ends in TensorFlow's own error. ``memsaving_gradients`` replays
the LSTM's loop in segments, and computes the Transformer's attention in blocks. ``--limit 0`` lets
both run, and shows the memory of plain training.

Run it with ``python examples/long_text.py``, or ``--help``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

#: Known characters: printable ASCII and line ends. `UNKNOWN` is one more for all others.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(CHARACTERS)
MODELS = ("lstm", "transformer")
RUNS = {"plain": "plain", "ours": "memsaving_gradients"}
WARM_UP = 2  # first steps, in which TensorFlow traces and its allocator grows: not measured


@dataclass(frozen=True)
class Settings:
    """The settings that both runs share."""

    model: str
    length: int
    batch: int
    width: int
    steps: int
    limit: int


DEFAULTS = {
    "lstm": Settings("lstm", length=2048, batch=8, width=256, steps=30, limit=144),
    "transformer": Settings("transformer", length=2048, batch=1, width=128, steps=30, limit=224),
}


def text(most: int = 2_000_000) -> np.ndarray:
    """Return the standard library, in the order of the names of its modules, as numbers of
    `CHARACTERS`."""
    parts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, parts)) > most:
            break
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    return np.array([numbers.get(c, UNKNOWN) for c in "".join(parts)], np.int32)


def batches(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return pieces of text, and the same pieces one character later; both of shape (steps · batch,
    length)."""
    characters = text()
    count = settings.steps * settings.batch
    starts = np.random.default_rng(0).integers(0, len(characters) - settings.length - 1, count)
    rows = starts[:, None] + np.arange(settings.length)
    return characters[rows], characters[rows + 1]


def build(settings: Settings, ours: bool) -> Any:
    """Return the model, which computes logits for every next character."""
    import keras
    from keras import layers

    inputs = keras.Input((settings.length,), dtype="int32")
    x = layers.Embedding(UNKNOWN + 1, settings.width)(inputs)
    if settings.model == "lstm":
        x = layers.LSTM(settings.width, return_sequences=True)(x)
    else:
        if ours:
            import memsaving_gradients as ms

            attention = ms.keras.MultiHeadAttention
        else:
            attention = layers.MultiHeadAttention
        places = layers.Embedding(settings.length, settings.width)
        x = x + places(np.arange(settings.length)[None])
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x = x + attention(4, settings.width // 4)(y, y, use_causal_mask=True)
            y = layers.LayerNormalization()(x)
            y = layers.Dense(4 * settings.width, activation="gelu")(y)
            x = x + layers.Dense(settings.width)(y)
        x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(UNKNOWN + 1)(x))


def train(run: str, settings: Settings, results: Path) -> None:
    """Train in this process, and write the results to a file."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    x, y = batches(settings)
    model = build(settings, run == "ours")
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.optimizer.build(model.trainable_variables)
    losses: list[float] = []
    seconds: list[float] = []
    peaks: list[int] = []

    class Meter(keras.callbacks.Callback):
        """A meter of loss, time and memory of every step."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")
            self.before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.start)
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - self.before)
            losses.append(float(logs["loss"]))

    callbacks: list[Any] = [Meter()]
    if run == "ours":
        import memsaving_gradients as ms

        callbacks.append(ms.keras.MemorySavingGradients())
    outcome: dict[str, Any] = {"ended": ""}
    try:
        model.fit(x, y, batch_size=settings.batch, callbacks=callbacks, shuffle=False, verbose=0)
    except tf.errors.ResourceExhaustedError as error:
        lines = [line for line in error.message.splitlines() if "OOM" in line]
        outcome["ended"] = (lines or [type(error).__name__])[0].split(" on /job")[0][:100]
    outcome |= {"losses": losses, "peak": max(peaks[WARM_UP:], default=0)}
    outcome["seconds"] = float(np.median(seconds[WARM_UP:])) if len(seconds) > WARM_UP else 0.0
    results.write_text(json.dumps(outcome))


def run_apart(run: str, settings: Settings) -> dict[str, Any]:
    """Train in a fresh process whose allocator has the memory of the settings."""
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "1",  # the allocator that keeps count, and to a limit
        "TF_ENABLE_ONEDNN_OPTS": "0",  # whose kernels end the process where memory runs out
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
    }
    if settings.limit:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(settings.limit)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, __file__, "--child", run, json.dumps(asdict(settings))]
        child = subprocess.run(
            [*command, str(results)], env=environment, capture_output=True, text=True, check=False
        )
        if not results.exists():
            raise SystemExit(f"{child.stderr[-3000:]}\nthe {run} run failed ({child.returncode})")
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def compare(settings: Settings, console: Console) -> bool:
    """Train both ways and print the results; return whether ours ran and learned, and plain
    training did not fit (if there is a limit)."""
    limit = f", {settings.limit} MiB" if settings.limit else ""
    table = Table(
        title=f"{settings.model}: {settings.length} characters, batch {settings.batch}{limit}"
    )
    for heading in ("", "peak of a step", "seconds a step", "loss, first to last step"):
        table.add_column(heading, justify="right" if heading else "left")
    found = {}
    for run, name in RUNS.items():
        with console.status(f"{settings.model}, {name}"):
            found[run] = one = run_apart(run, settings)
        if one["ended"]:
            table.add_row(name, "more than there is", "", one["ended"])
        else:
            peak = f"{one['peak'] / 2**20:.1f} MiB"
            losses = f"{one['losses'][0]:.3f} … {one['losses'][-1]:.3f}"
            table.add_row(name, peak, f"{one['seconds']:.2f}", losses)
    console.print(table)
    ours, plain = found["ours"], found["plain"]
    learned = not ours["ended"] and ours["losses"][-1] < ours["losses"][0]
    return learned and bool(plain["ended"]) == bool(settings.limit)


def main() -> int:
    """Read the command line, run, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=MODELS, help="one of the models (default: both)")
    add("--length", type=int, help="characters in a stretch (default 2048)")
    add("--steps", type=int, help="training steps (default 30)")
    add("--limit", type=int, help="MiB of memory, variables included; 0: no limit")
    values = vars(parser.parse_args())
    only = values.pop("only")
    given = {name: value for name, value in values.items() if value is not None}
    console = Console()
    fine = [
        compare(Settings(**(asdict(DEFAULTS[model]) | given)), console)
        for model in MODELS
        if only in (None, model)
    ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], Settings(**json.loads(sys.argv[3])), Path(sys.argv[4]))
    else:
        sys.exit(main())
