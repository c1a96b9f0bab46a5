"""``python -m benchmarks.techniques.low_memory``: four techniques together, after Sohoni et al. 2019 (arXiv 1904.10631).

WideResNet-28-2 on 32 x 32 images, 100 in a batch, by gradient descent with momentum, and a Transformer with dynamic convolutions on 128 sentences of 32 words, by
Adam: in ``float32``, with each technique alone (checkpoints of least memory within 1.3 times the time; microbatches; weights, slots and activations in
``bfloat16`` with stochastic rounding; sparse weights), and with all of them. Each in a process of its own, the worst of five steps after two.

*Measured*: variables of model and optimizer, as they are held, and the step's transient peak by TensorFlow's allocator. *In the paper's accounting*: model; optimizer,
which is the gradient and the slots; and activations, which is what the backward pass reads of the forward pass: without checkpoints all of it, as
`memsaving_gradients.explain` finds it, with them the most of it at one time, recomputed or not, as the plan says. A second table says what the
difference is: the transient peak as the profiler sees it, taken apart into gradients, activations, temporaries (gradients of activations, what is
passed from op to op, scratch space, kernels made of sparse weights, weights and gradients in 32 bits while they are updated, sums of gradients that were
copied in a loop), and what the allocator rounds up.

Rows that are in the results file are not measured again, but with ``--again``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.at_peak import PARTS
from benchmarks.bars import Figure, measure_missing, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "low_memory.json"

PRECISION = "bfloat16"
CHECKPOINTS: dict[str, Any] = {"max_slowdown": 1.3}


@dataclass(frozen=True)
class Network:
    """What is trained, and the bars for all techniques together: the paper's parts, and what is measured, as shares of the ``float32`` run's."""

    model: str
    batch: int
    size: int
    sparsity: float
    paper: float
    measured: float


NETWORKS = {
    "wide-resnet": Network("wide_resnet", 100, 10, 0.7, 1 / 60.7, 1 / 30),
    "dynamic-conv": Network("dynamic_conv", 128, 8, 0.6, 1 / 8.7, 1 / 8.7),
}
#: What each run does; names of the keywords of `measured`.
RUNS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "checkpoints": ("checkpoints",),
    "microbatches": ("microbatches",),
    "precision": ("precision",),
    "sparse": ("sparse",),
    "all": ("checkpoints", "microbatches", "precision", "sparse"),
}
ROWS = {
    f"{network}, {name}": (network, techniques)
    for network in NETWORKS
    for name, techniques in RUNS.items()
}
#: Bars for WideResNet: of activations with checkpoints alone, as a share; of sparse weights and slots.
ACTIVATIONS, SPARSE = 1 / 5.8, 0.40


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, print it beside the bars; 1 if one is missed."""
    parser = options_for("low_memory", __doc__, RESULTS, "names of rows")
    parser.add_argument("--again", action="store_true", help="measure what has results, too")
    options = parser.parse_args(arguments)
    results = measure_missing(ROWS, options, measure)
    figures = judge(results)
    write(options.json, {}, figures)
    _print(results)
    print_figures(figures, Console())
    return int(not all(figure.passed for figure in figures))


def measure(row: str) -> dict[str, Any]:
    """One of `ROWS`, in a process of its own."""
    network, techniques = ROWS[row]
    what = {"name": network, "techniques": list(techniques)}
    found: dict[str, Any] = in_fresh_process(
        "benchmarks.techniques.low_memory:measured", what, ENVIRONMENT
    )
    return found


def measured(name: str, techniques: list[str]) -> dict[str, Any]:
    """Bytes of a training with some techniques (in a process made for it)."""
    import warnings

    import keras
    import tensorflow as tf

    import memsaving_gradients as ms
    from benchmarks.at_peak import kinds_of, parts_at_peak
    from benchmarks.networks import build
    from benchmarks.networks.dynamic import loss_of_words
    from graph_tools.memory.allocation_trace import allocation_events
    from graph_tools.memory.measure import measure_peak
    from memsaving_gradients.engine.rewire import components
    from memsaving_gradients.training.keras_models import bytes_of

    warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
    if "precision" in techniques:
        keras.config.set_dtype_policy(PRECISION)
    what = NETWORKS[name]
    network = build(what.model, batch=what.batch)
    model = network.layers
    if "sparse" in techniques:
        model = ms.keras.sparsify(model, what.sparsity)
    of_words = what.model == "dynamic_conv"
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.Adam(5e-4) if of_words else sgd
    if "precision" in techniques:
        optimizer = ms.keras.low_precision(optimizer)
    weights = model.trainable_variables
    optimizer.build(weights)

    def loss(*batch: tf.Tensor) -> tf.Tensor:
        *inputs, labels = batch
        logits = model(inputs if of_words else inputs[0], training=True)
        if of_words:
            return loss_of_words(labels, logits)
        logits = tf.cast(logits, tf.float32)
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(entropy)

    def noted(*batch: tf.Tensor) -> tf.Tensor:
        value = loss(*batch)
        forward.append((value.graph, len(value.graph.get_operations())))
        return value

    #: Graphs of the forward pass, with how many ops they had when it was over.
    forward: list[tuple[tf.Graph, int]] = []
    inner = noted
    if "microbatches" in techniques:
        norm = None if of_words else "microbatch"
        buffer = "stochastic" if "precision" in techniques else "float32"
        inner = ms.microbatch(noted, what.size, batch_norm=norm, buffer=buffer)

    @tf.function
    def step(*batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = inner(*batch)
        grads = tape.gradient(value, [w.value for w in weights])
        given.extend(components(grads, value.graph))
        optimizer.apply(grads, weights)
        return value

    given: list[tf.Tensor] = []

    def computed(*batch: tf.Tensor) -> Any:
        return tf.gradients(loss(*batch), [w.value for w in weights])

    batch = [tf.constant(one) for one in network.batch]
    rows = what.size if "microbatches" in techniques else what.batch
    piece = [one[:rows] for one in batch]
    found: dict[str, Any] = {"model": bytes_of(model.variables)}
    found["optimizer"] = bytes_of(optimizer.variables)
    found["gradients"] = bytes_of(weights)
    if "checkpoints" in techniques:
        with ms.patched(**CHECKPOINTS):
            step(*batch)
        (plan,) = ms.plans(step)
        found |= {"activations": plan.activations, "extra_time": plan.extra_time}
        found["simulated"] = plan.peak
    else:
        # What the backward pass of a plain step reads, of as many examples as go through at a time.
        found["activations"] = ms.explain(computed, *piece).parts.activations
    pieces = what.batch / rows
    found["flops"] = _flops(computed, piece, "checkpoints" in techniques) * pieces
    peak = measure_peak(lambda: step(*batch))
    found |= {"transient": peak.peak, "loss": float(step(*batch))}
    graph, count = forward[0]
    # In microbatches they are what the traced function gives.
    grads = given if "microbatches" not in techniques else graph.outputs[1:]
    worst = max((allocation_events(lambda: step(*batch)) for _ in range(5)), key=_most)
    kinds = kinds_of(graph.get_operations()[count], grads, worst)
    found["at peak"] = parts_at_peak(worst, kinds, chunks=True)
    if "sparse" in techniques:
        found["share"] = ms.keras.sparse_bytes(model, optimizer).share
    return found


def _most(events: Any) -> int:
    return max(event.allocated for event in events)


def _flops(step: Any, batch: list[Any], checkpoints: bool) -> float:
    """Multiplications and additions of products and convolutions in a forward and a backward pass, those that run twice included."""
    import contextlib

    import tensorflow as tf

    import memsaving_gradients as ms
    from graph_tools.costs.estimates import op_flops
    from graph_tools.graph.capture import capture
    from graph_tools.tf_private import autodiff

    with ms.patched(**CHECKPOINTS) if checkpoints else contextlib.nullcontext():
        graph = tf.function(step).get_concrete_function(*batch).graph
    ops = capture(autodiff.ends_of(graph)).ops
    return sum(op_flops(op, len(batch[0])) for op in ops)


def judge(results: dict[str, Any]) -> list[Figure]:
    """The bars."""
    figures = []
    for name, network in NETWORKS.items():
        plain, every = (results.get(f"{name}, {run}") for run in ("float32", "all"))
        if plain and every:
            paper = counted_as_published(every) / counted_as_published(plain)
            held = held_bytes(every) / held_bytes(plain)
            figures.append(Figure(f"{name}, all: the paper's parts", paper, network.paper))
            figures.append(Figure(f"{name}, all: measured", held, network.measured))
    plain = results.get("wide-resnet, float32")
    if plain and (row := results.get("wide-resnet, checkpoints")):
        share = row["activations"] / plain["activations"]
        figures.append(Figure("wide-resnet, checkpoints: activations", share, ACTIVATIONS))
    if row := results.get("wide-resnet, sparse"):
        figures.append(Figure("wide-resnet: weights, slots, places", row["share"], SPARSE))
    return figures


def counted_as_published(row: dict[str, Any]) -> int:
    """Bytes in the paper's accounting."""
    return int(row["model"] + row["optimizer"] + row["gradients"] + row["activations"])


def held_bytes(row: dict[str, Any]) -> int:
    """Bytes as measured."""
    return int(row["model"] + row["optimizer"] + row["transient"])


def _print(results: dict[str, Any]) -> None:
    table = Table(title="MB", header_style="bold")
    names = ("model", "optimizer", "gradients", "activations", "transient")
    table.add_column("run")
    for heading in (*names, "the paper's", "measured", "GFLOP"):
        table.add_column(heading, justify="right")
    for name, row in results.items():
        sizes = [row[part] for part in names] + [counted_as_published(row), held_bytes(row)]
        cells = [f"{size / 1e6:.2f}" for size in sizes]
        table.add_row(name, *cells, f"{row['flops'] / 1e9:.1f}")
    console = Console(width=150)
    console.print(table)
    parts = (*PARTS, "rounding")
    table = Table(title="the transient peak, MB", header_style="bold")
    table.add_column("run")
    for heading in (*parts, "all"):
        table.add_column(heading, justify="right")
    for name, row in results.items():
        sizes = [row["at peak"][part] for part in parts]
        table.add_row(name, *(f"{size / 1e6:.2f}" for size in [*sizes, sum(sizes)]))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
