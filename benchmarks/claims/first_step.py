"""Time of the first training step, and of importing the package, compared with TensorFlow alone.

The first step of a ``tf.function`` traces the model, differentiates it, updates the variables, has
grappler optimize the graph, and runs it. Ours also captures, plans and rewires, and grappler gets
more ops. Each is measured in a fresh process, from tracing to the value of the loss, plain and ours
in turn. The ratio compares the medians of wall time, and of processor time, which other processes
on the machine change less. Tensors are small: a step takes about a tenth of a second, and nearly
all of the first one is work on graphs. The way ``gradients`` is `memsaving_gradients.gradients`
with default arguments, ``patched`` is a tape under `memsaving_gradients.patched`. ``budget`` has
half of plain training's memory, which needs a search for plans; it has no bar.

The row ``import`` has the seconds of importing the package after TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.networks import Model, build
from benchmarks.settings import count, some_of

#: Bars: our first step over plain training's, and seconds to import the package after TensorFlow.
TIMES, IMPORT = 1.5, 0.3
WAYS = ("gradients", "patched", "budget")
CLOCKS = ("wall", "processor")
#: Network and options by name, which has the approximate number of forward ops.
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
wall, processor = time.perf_counter() - wall, time.process_time() - processor
print(json.dumps({"wall": wall, "processor": processor}))
"""


def run(job: Job) -> dict[str, Any]:
    """Measure first steps of a network, or imports; keep the results of ways not in the setting."""
    if job.row == "import":
        return measure_import(job.settings["pairs"] or 9)
    found = measure(job.row, job.settings["pairs"] or 5, job.settings["ways"])
    return {**job.known, **found}


def due(result: Mapping[str, Any], settings: Settings, again: bool) -> bool:
    """Return whether a row lacks one of the ways in the settings."""
    ways = () if "plain" not in result else settings["ways"]
    return again or any(way not in result for way in ways)


def measure(case: str, pairs: int, ways: Iterable[str]) -> dict[str, Any]:
    """Measure first steps of a network: plain ones, and ours of each way, in turn."""
    model, options = CASES[case]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ("plain", *ways)}
    for _ in range(pairs):
        for way, found in runs.items():
            what = {"model": model, "options": options, "way": way}
            found.append(fresh("claims.first_step:first_step", **what))
    return {way: _medians(found) for way, found in runs.items()}


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    middle = {
        clock: statistics.median(run[clock] for run in found)
        for clock in (*CLOCKS, "traced", "second")
    }
    return {**found[0], **middle, "runs": [{c: run[c] for c in CLOCKS} for run in found]}


#: A function that returns the loss and the gradients of a batch.
Differentiate: TypeAlias = Callable[..., tuple[tf.Tensor, Any]]


@dataclass(frozen=True, eq=False)
class Taken:
    """A first step, traced or taken, and its times.

    Attributes
    ----------
    step
        The function, which may be called again.
    graph
        The graph of the function.
    loss
        The loss in the graph.
    seconds
        ``"traced"``: processor time of tracing; ``"wall"`` and ``"processor"``: times of the whole
        step, if it was taken.
    """

    step: Callable[..., tf.Tensor]
    graph: tf.Graph
    loss: tf.Tensor
    seconds: dict[str, Any]


def trace(network: Model, differentiate: Differentiate, batch: Sequence[tf.Tensor]) -> Taken:
    """Trace a step that updates the variables, without running it."""
    losses: list[tf.Tensor] = []

    @tf.function
    def step(*batch: tf.Tensor) -> tf.Tensor:
        loss, grads = differentiate(*batch)
        losses.append(loss)
        for variable, grad in zip(network.variables, grads, strict=True):
            variable.assign_sub(1e-6 * tf.convert_to_tensor(grad))
        return loss

    clock = time.process_time()
    graph = step.get_concrete_function(*batch).graph
    seconds = {"traced": time.process_time() - clock}
    return Taken(partial(step, *batch), graph, losses[0], seconds)


def take(
    network: Model,
    differentiate: Differentiate,
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> Taken:
    """Take one first step, traced inside of ``around``."""
    batch = [tf.constant(array) for array in network.batch]
    wall, processor = time.perf_counter(), time.process_time()
    with around or contextlib.nullcontext():
        traced = trace(network, differentiate, batch)
    traced.step().numpy()
    times = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
    return replace(traced, seconds={**times, **traced.seconds})


def first_step(model: str, options: dict[str, Any], way: str) -> dict[str, Any]:
    """Take one first step in this process, and return its figures.

    They are the seconds of `Taken`; ``"second"``: the processor time of another step;
    ``"forward"``: the number of ops of the loss; ``"ops"``: the number of ops of the final graph.
    """
    network = build(model, **options)
    around: Any = None
    if way != "plain":
        # A late import: a plain step must not import the package.
        import memsaving_gradients as ms

        around = ms.patched() if way == "patched" else None
    taken = take(network, _differentiation(network, way), around)
    again = time.process_time()
    taken.step().numpy()
    result = {**taken.seconds, "second": time.process_time() - again}
    from graph_tools.graph.capture import capture

    result["forward"] = len(capture([taken.loss]).ops)
    result["ops"] = len(taken.graph.get_operations())
    if way != "plain":
        plans = ms.plans(taken.graph)
        result["peaks"] = [plans[-1].peak_plain, plans[-1].peak] if plans else []
    return result


def _differentiation(network: Model, way: str) -> Differentiate:
    """Return the function that computes loss and gradients of a batch in one of the ways."""
    variables = list(network.variables)

    def taped(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            loss = network.loss(*batch)
        return loss, tape.gradient(loss, variables)

    def plain(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
        loss = network.loss(*batch)
        return loss, tf.gradients(loss, variables)

    def ours(*batch: tf.Tensor) -> tuple[tf.Tensor, Any]:
        import memsaving_gradients as ms

        loss = network.loss(*batch)
        return loss, ms.gradients(loss, variables, budget=0.5 if way == "budget" else None)

    return {"patched": taped, "plain": plain}.get(way, ours)


def measure_import(runs: int) -> dict[str, Any]:
    """Measure imports of the package after TensorFlow: medians, after one that compiles it.

    Installers compile packages, so the bytecode is kept even where the environment forbids that.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for _ in range(runs + 1):
            done = subprocess.run(
                [sys.executable, "-c", _IMPORTS],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, **kept},
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "runs": found[1:],
        **{clock: statistics.median(run[clock] for run in found[1:]) for clock in CLOCKS},
    }


def bars(results: Results) -> list[Figure]:
    """Return the bars; a plan for a budget has none."""
    figures = []
    for case, result in results.items():
        if case == "import":
            runs = len(result["runs"])
            figures += [
                Figure(f"import: {clock} seconds", result[clock], IMPORT, count=runs)
                for clock in CLOCKS
            ]
            continue
        for way in ("gradients", "patched"):
            for clock in CLOCKS if way in result else ():
                ratio = result[way][clock] / result["plain"][clock]
                what, runs = f"{case}: {way}, {clock} time / plain", len(result[way]["runs"])
                figures.append(Figure(what, ratio, TIMES, count=runs))
    return figures


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network and way."""
    for case in (case for case in CASES if case in results):
        result = results[case]
        for way in ("plain", *WAYS):
            if way not in result:
                continue
            run = result[way]
            ratios = [run[clock] / result["plain"][clock] for clock in reversed(CLOCKS)]
            peaks = run.get("peaks")
            yield (
                case if way == "plain" else "",
                f"{run['forward']:,}" if way == "plain" else "",
                way,
                f"{run['ops']:,}",
                f"{run['traced']:.2f}",
                f"{run['processor']:.2f} / {run['wall']:.2f}",
                "" if way == "plain" else " / ".join(f"{ratio:.2f}" for ratio in ratios),
                f"{peaks[1] / peaks[0]:.2f}" if peaks else "",
            )


COLUMNS = Columns(
    "first step, seconds (processor / wall)",
    "network | forward ops | way | ops | traced | first step | × plain | peak / plain",
    lines,
    text=("way",),
)
EXPERIMENT = Experiment(
    "first_step",
    rows=lambda settings: [*CASES, "import"],
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    due=due,
    settings={
        "ways": Setting(list(WAYS[:2]), some_of(WAYS), f"of {', '.join(WAYS)}"),
        "pairs": Setting(0, partial(count, 1), "processes of each kind (5; imports: 9)"),
    },
)
