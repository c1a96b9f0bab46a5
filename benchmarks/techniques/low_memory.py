"""Four techniques together, after Sohoni et al. 2019 (arXiv 1904.10631).

WideResNet-28-2 trains on 32 x 32 images, 100 in a batch, by gradient descent with momentum. A
Transformer with dynamic convolutions trains on 128 sentences of 32 words, by Adam. Both train in
``float32``, with each technique alone, and with all of them. The techniques are checkpoints of
least memory within 1.3 times the time; microbatches; weights, slots and activations in ``bfloat16``
with stochastic rounding; sparse weights. Each run has a process of its own, and takes the worst of
five steps after two.

*Measured* are variables of model and optimizer, and the step's transient peak by TensorFlow's
allocator. *The paper's accounting* has the model; the optimizer, which is gradient and slots; and
activations, the values of the forward pass that the backward pass reads. Without checkpoints these
are all such values (`memsaving_gradients.explain`), with them the most alive at one time, by the
plan. A second table explains the difference. It splits the transient peak of the profiler into
gradients, activations, temporaries and the allocator's rounding. Temporaries are gradients of
activations, short-lived values, scratch space, dense kernels of sparse weights, 32-bit weights and
gradients during updates, and sums of gradients that a loop copies.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.allocation_trace import allocation_events
from benchmarks.at_peak import PARTS, kinds_of, parts_at_peak
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from benchmarks.networks import build
from benchmarks.networks.base import entropy
from benchmarks.networks.dynamic import loss_of_words
from graph_tools.costs.estimates import op_flops
from graph_tools.graph.capture import capture
from graph_tools.memory.measure import measure_peak
from graph_tools.tf_private import autodiff
from memsaving_gradients.engine.call import components
from memsaving_gradients.training.keras_models import bytes_of

PRECISION = "bfloat16"
CHECKPOINTS: dict[str, Any] = {"max_slowdown": 1.3}


@dataclass(frozen=True)
class Network:
    """A network to train, and the bars for all techniques together.

    The bars ``paper`` (the paper's parts) and ``measured`` are shares of the ``float32`` run's.
    """

    model: str
    batch: int
    size: int
    sparsity: float
    paper: float
    measured: float

    @property
    def of_words(self) -> bool:
        """Whether the network translates; the other one classifies images."""
        return self.model == "dynamic_conv"


NETWORKS = {
    "wide-resnet": Network("wide_resnet", 100, 10, 0.7, 1 / 60.7, 1 / 30),
    "dynamic-conv": Network("dynamic_conv", 128, 8, 0.6, 1 / 8.7, 1 / 8.7),
}
#: The techniques of each run, for `measured`.
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
#: Bars for WideResNet: activations with checkpoints alone, and sparse weights and slots, as shares
#: of the ``float32`` run's.
ACTIVATIONS, SPARSE = 1 / 5.8, 0.40


def run(job: Job) -> dict[str, Any]:
    """Measure one of `ROWS`, in a process of its own."""
    network, techniques = ROWS[job.row]
    found: dict[str, Any] = fresh(
        "techniques.low_memory:measured", name=network, techniques=list(techniques)
    )
    return found


def measured(name: str, techniques: list[str]) -> dict[str, Any]:
    """Return the bytes of a training with some techniques (in a process of its own)."""
    warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
    what = NETWORKS[name]
    network, model, optimizer = _made(what, techniques)
    training = _Training(what, techniques, model, optimizer)
    batch = [tf.constant(one) for one in network.batch]
    rows = what.size if "microbatches" in techniques else what.batch
    piece = [one[:rows] for one in batch]
    found: dict[str, Any] = {"model": bytes_of(model.variables)}
    found["optimizer"] = bytes_of(optimizer.variables)
    found["gradients"] = bytes_of(training.weights)
    if "checkpoints" in techniques:
        with ms.patched(**CHECKPOINTS):
            training.step(*batch)
        (plan,) = ms.plans(training.step)
        found |= {"activations": plan.activations, "extra_time": plan.extra_time}
        found["simulated"] = plan.peak
    else:
        # The values that the backward pass of a plain step reads, for the examples of one piece.
        found["activations"] = ms.explain(training.computed, *piece).parts.activations
    pieces = what.batch / rows
    found["flops"] = _flops(training.computed, piece, "checkpoints" in techniques) * pieces
    peak = measure_peak(lambda: training.step(*batch))
    found |= {"transient": peak.peak, "loss": float(training.step(*batch))}
    found["at peak"] = training.parts_at_peak(batch)
    if "sparse" in techniques:
        found["share"] = ms.keras.sparse_bytes(model, optimizer).share
    return found


def _made(what: Network, techniques: list[str]) -> tuple[Any, Any, Any]:
    """Return the network of the zoo, the Keras model to train, and its optimizer."""
    if "precision" in techniques:
        keras.config.set_dtype_policy(PRECISION)
    network = build(what.model, batch=what.batch)
    model = network.layers
    if "sparse" in techniques:
        model = ms.keras.sparsify(model, what.sparsity)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.Adam(5e-4) if what.of_words else sgd
    if "precision" in techniques:
        optimizer = ms.keras.low_precision(optimizer)
    optimizer.build(model.trainable_variables)
    return network, model, optimizer


class _Training:
    """A training step, with the graph and the gradients that it was traced with."""

    def __init__(self, what: Network, techniques: list[str], model: Any, optimizer: Any) -> None:
        self.what, self.techniques, self.model, self.optimizer = what, techniques, model, optimizer
        self.weights = model.trainable_variables
        #: Graphs of the forward pass, with the number of their ops at its end.
        self.forward: list[tuple[Any, int]] = []
        self.given: list[Any] = []
        self.step = tf.function(self._step_of(self._pieces()))

    def loss(self, *batch: Any) -> Any:
        """Return the loss of a batch."""
        *inputs, labels = batch
        logits = self.model(inputs if self.what.of_words else inputs[0], training=True)
        if self.what.of_words:
            return loss_of_words(labels, logits)
        return entropy(tf.cast(logits, tf.float32), labels)

    def computed(self, *batch: Any) -> Any:
        """Return the gradients of a batch by TensorFlow."""
        return tf.gradients(self.loss(*batch), [w.value for w in self.weights])

    def _pieces(self) -> Callable[..., Any]:
        """Return the loss function of a batch, in microbatches if that is a technique."""

        def noted(*batch: Any) -> Any:
            value = self.loss(*batch)
            self.forward.append((value.graph, len(value.graph.get_operations())))
            return value

        if "microbatches" not in self.techniques:
            return noted
        norm = None if self.what.of_words else "microbatch"
        buffer = "stochastic" if "precision" in self.techniques else "float32"
        found: Callable[..., Any] = ms.microbatch(
            noted, self.what.size, batch_norm=norm, buffer=buffer
        )
        return found

    def _step_of(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def step(*batch: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss(*batch)
            grads = tape.gradient(value, [w.value for w in self.weights])
            self.given.extend(components(grads, value.graph))
            self.optimizer.apply(grads, self.weights)
            return value

        return step

    def parts_at_peak(self, batch: list[Any]) -> dict[str, Any]:
        """Return the bytes of each part at the peak of the worst of five steps."""
        graph, count = self.forward[0]
        # With microbatches, the gradients are outputs of the traced function.
        grads = self.given if "microbatches" not in self.techniques else graph.outputs[1:]
        worst = max((allocation_events(lambda: self.step(*batch)) for _ in range(5)), key=_most)
        kinds = kinds_of(graph.get_operations()[count], grads, worst)
        return parts_at_peak(worst, kinds, chunks=True)


def _most(events: Any) -> int:
    return max(event.allocated for event in events)


def _flops(step: Any, batch: list[Any], checkpoints: bool) -> float:
    """Return the operations of products and convolutions in both passes, clones included."""
    with ms.patched(**CHECKPOINTS) if checkpoints else contextlib.nullcontext():
        graph = tf.function(step).get_concrete_function(*batch).graph
    ops = capture(autodiff.ends_of(graph)).ops
    return sum(op_flops(op, len(batch[0])) for op in ops)


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
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


def counted_as_published(row: Mapping[str, Any]) -> int:
    """Return the bytes in the paper's accounting."""
    return int(row["model"] + row["optimizer"] + row["gradients"] + row["activations"])


def held_bytes(row: Mapping[str, Any]) -> int:
    """Return the measured bytes."""
    return int(row["model"] + row["optimizer"] + row["transient"])


SIZES = ("model", "optimizer", "gradients", "activations", "transient")
AT_PEAK = (*PARTS, "rounding")


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the bytes of each run."""
    for name, row in results.items():
        sizes = [row[part] for part in SIZES] + [counted_as_published(row), held_bytes(row)]
        yield name, *(f"{size / 1e6:.2f}" for size in sizes), f"{row['flops'] / 1e9:.1f}"


def lines_at_peak(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the parts of the transient peak of each run."""
    for name, row in results.items():
        sizes = [row["at peak"][part] for part in AT_PEAK]
        yield name, *(f"{size / 1e6:.2f}" for size in [*sizes, sum(sizes)])


COLUMNS = (
    Columns("MB", f"run | {' | '.join(SIZES)} | the paper's | measured | GFLOP", lines),
    Columns("the transient peak, MB", f"run | {' | '.join(AT_PEAK)} | all", lines_at_peak),
)
EXPERIMENT = Experiment(
    "low_memory", rows=lambda settings: ROWS, run=run, columns=COLUMNS, bars=bars
)
