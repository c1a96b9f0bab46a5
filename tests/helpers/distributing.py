"""Functions for fresh processes of `test_distribution`: replicas on two logical devices."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from tests.helpers.optimized import optimized_nodes
from tests.helpers.support import arithmetic_rewriting, numbers

DEVICES = ["CPU:0", "CPU:1"]
LAYERS, WIDTH = 8, 64
_OURS = re.compile(r"_(recomputed|held|gate)(_\d+)?$")


def mirrored() -> tf.distribute.Strategy:
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    tf.config.experimental.enable_op_determinism()
    return tf.distribute.MirroredStrategy(DEVICES)


class Net:
    """Layers with batch normalization and with dropout by fixed seeds. Each replica has its own
    moving averages, whose mean is read.

    ``rows``: rows of a batch, for all replicas together.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rows: int, layers: int = LAYERS) -> None:
        self.strategy, self.rows = strategy, rows
        with strategy.scope():
            self.weights = [
                tf.Variable(numbers(f"w{k}", WIDTH, WIDTH, scale=WIDTH**-0.5))
                for k in range(layers)
            ]
            self.momenta = [tf.Variable(tf.zeros_like(w), trainable=False) for w in self.weights]
            self.average = tf.Variable(
                tf.zeros([WIDTH]),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )

    @property
    def state(self) -> list[tf.Variable]:
        return [*self.weights, *self.momenta, self.average]

    def loss(self, x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        h = x
        for k, weight in enumerate(self.weights):
            h = tf.matmul(h, weight)
            # A replica without examples has no moments.
            rows = tf.maximum(tf.cast(tf.shape(h)[0], tf.float32), 1.0)
            mean = tf.reduce_sum(h, 0) / rows
            variance = tf.reduce_sum(tf.square(h - mean), 0) / rows
            h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3))
            h = tf.nn.experimental.stateless_dropout(h, 0.1, tf.stack([seed, k]))
            if not k:
                self.average.assign(self.average * 0.9 + mean * 0.1)
        return tf.reduce_sum(tf.square(h)) / self.rows

    def update(self, grads: list[tf.Tensor]) -> None:
        context = tf.distribute.get_replica_context()
        grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)

        def one(weight: Any, momentum: Any, grad: Any) -> None:
            momentum.assign(momentum * 0.9 + grad)
            weight.assign_sub(momentum * 0.05)

        def apply(strategy: Any, *grads: Any) -> None:
            for weight, momentum, grad in zip(self.weights, self.momenta, grads, strict=True):
                strategy.extended.update(weight, one, args=(momentum, grad))

        context.merge_call(apply, args=tuple(grads))

    def replica(self, differentiate: Callable[..., Any] | None) -> Callable[..., tf.Tensor]:
        """A replica's step with gradients from a tape, or as ``differentiate`` computes them."""

        def step(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = self.loss(x, seed)
            if differentiate is None:
                grads = tape.gradient(loss, self.weights)
            else:
                grads = differentiate(loss, self.weights)
            self.update([tf.convert_to_tensor(grad) for grad in grads])
            return loss

        return step

    def step(self, differentiate: Callable[..., Any] | None = None) -> Any:
        replica = self.replica(differentiate)

        @tf.function(autograph=False, reduce_retracing=True)
        def step(x: Any, seed: tf.Tensor) -> tf.Tensor:
            losses = self.strategy.run(replica, args=(x, seed))
            return self.strategy.reduce("SUM", losses, axis=None)

        return step


def examples(rows: int) -> np.ndarray:
    return numbers("x", rows, WIDTH)


def train(net: Net, step: Any, data: np.ndarray, epochs: int = 1) -> list[np.ndarray]:
    """Return the losses of all steps and the variables after them, and reset the variables."""
    before = [[v.numpy() for v in net.strategy.experimental_local_results(s)] for s in net.state]
    batches = tf.data.Dataset.from_tensor_slices(data).batch(net.rows)
    count, losses = 0, []
    for _ in range(epochs):
        for x in net.strategy.experimental_distribute_dataset(batches):
            losses.append(step(x, tf.constant(count)).numpy())
            count += 1
    after = [v.numpy() for s in net.state for v in net.strategy.experimental_local_results(s)]
    for variable, values in zip(net.state, before, strict=True):
        local = net.strategy.experimental_local_results(variable)
        for one, value in zip(local, values, strict=True):
            one.assign(value)
    return [np.array(losses), *after]


def same(ours: list[np.ndarray], plain: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, plain, strict=True))


def graph_of(step: Any) -> dict[str, Any]:
    """Return figures of the graph of the first trace: clones by device, our ops without a device,
    and control edges between devices."""
    graph = step._list_all_concrete_functions()[0].graph
    ours = [op for op in graph.get_operations() if _OURS.search(op.name)]
    clones: dict[str, int] = {}
    for op in ours:
        if "_recomputed" in op.name:
            clones[op.device[-5:]] = clones.get(op.device[-5:], 0) + 1
    across = [
        f"{op.name} waits for {other.name}"
        for op in ours
        for other in op.control_inputs
        if other.device != op.device
    ]
    collectives = [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]
    return {
        "clones": clones,
        "nowhere": [op.name for op in ours if not op.device],
        "across": across,
        "collectives": len(collectives),
        "copied": [op.name for op in collectives if "_recomputed" in op.name],
    }


def _plan(plan: ms.Plan) -> dict[str, Any]:
    return {
        "peak": plan.peak,
        "plain": plan.peak_plain,
        "clones": plan.clones,
        "budget": plan.budget,
        "allocated": plan.allocated,
        "whole": plan.whole_step,
    }


def loops(
    settings: list[dict[str, Any]], rows: int = 2048, layers: int = LAYERS, epochs: int = 2
) -> dict[str, Any]:
    """Train in custom loops: a full batch, then a batch of one example, which leaves a replica
    without any."""
    strategy = mirrored()
    with arithmetic_rewriting(False):
        net = Net(strategy, rows, layers)
        data = examples(rows + 1)
        plain = train(net, net.step(), data, epochs)
        found = []
        for options in settings:
            function = options.pop("function", False)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if function:
                    step = net.step(lambda y, xs, o=options: ms.gradients(y, xs, **o))
                    ours = train(net, step, data, epochs)
                else:
                    step = net.step()
                    with ms.patched(**options):
                        ours = train(net, step, data, epochs)
            found.append(
                {
                    "equal": same(ours, plain),
                    "plans": [_plan(plan) for plan in ms.plans(step)],
                    "said": [
                        w.category.__name__ for w in said if "memsaving" in w.category.__module__
                    ],
                    **graph_of(step),
                }
            )
    return {"found": found, "finite": bool(np.isfinite(plain[0]).all())}


def optimized(rows: int = 2048) -> dict[str, int]:
    """Count the Tanh kernels on each device after grappler, plain and with
    ``checkpoints="memory"``."""
    net = Net(mirrored(), rows, layers=4)
    found = {}
    for name in ("plain", "saving"):
        step = net.step()
        saving = ms.patched(checkpoints="memory") if name == "saving" else nullcontext()
        with saving:
            nodes = optimized_nodes(partial(train, net, step, examples(rows)))
        for device in DEVICES:
            found[f"{name} {device}"] = sum(
                node.op == "Tanh" and node.device.endswith(device) for node in nodes
            )
    return found


def peaks(rows: int = 8192) -> dict[str, Any]:
    """Measure peaks of both devices together, which share one allocator on a CPU: plain, and with
    ``checkpoints="memory"``."""
    net = Net(mirrored(), rows)
    x = next(
        iter(
            net.strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices(examples(rows)).batch(rows)
            )
        )
    )
    found: dict[str, Any] = {}
    for name, options in {"plain": None, "memory": {"checkpoints": "memory"}}.items():
        step = net.step()
        seed = tf.constant(0)
        if options is None:
            step(x, seed)
        else:
            with ms.patched(**options):
                step(x, seed)
            found["plans"] = [_plan(plan) for plan in ms.plans(step)]
        found[name] = measure_peak(lambda step=step, seed=seed: step(x, seed).numpy()).peak
    return found


def model(synchronized: bool = False, blocks: int = 4) -> keras.Model:
    keras.utils.set_random_seed(1)
    h = start = keras.Input([16])
    for k in range(blocks):
        h = keras.layers.Dense(64, activation="gelu", name=f"dense_{k}")(h)
        h = keras.layers.BatchNormalization(synchronized=synchronized, name=f"norm_{k}")(h)
        h = keras.layers.Dropout(0.2, name=f"drop_{k}")(h)
    built = keras.Model(start, keras.layers.Dense(1, name="last")(h))
    built.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return built


def fits(
    settings: list[dict[str, Any]], rows: int = 1024, blocks: int = 4, epochs: int = 2
) -> dict[str, Any]:
    """Train by Keras' fit, with a smaller last batch."""
    strategy = mirrored()
    x, y = numbers("x", rows * 2 - 100, 16), numbers("y", rows * 2 - 100, 1)

    def fit(callbacks: list[Any], synchronized: bool, **more: Any) -> list[np.ndarray]:
        with strategy.scope():
            trained = model(synchronized, blocks)
        found = trained.fit(
            x,
            y,
            batch_size=rows,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            **more,
        )
        return [np.array(found.history["loss"]), *trained.get_weights()]

    with arithmetic_rewriting(False):
        plain = {flag: fit([], flag) for flag in {bool(s.get("sync")) for s in settings}}
        found = []
        for options in settings:
            sync = bool(options.pop("sync", False))
            callback = ms.keras.MemorySavingGradients(**options)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                ours = fit([callback], sync)
            found.append(
                {
                    "equal": same(ours, plain[sync]),
                    "plans": [_plan(plan) for plan in callback.plans],
                    "said": [str(w.message) for w in said if "memsaving" in w.category.__module__],
                }
            )
    return {"found": found}


def microbatches() -> dict[str, Any]:
    """Train by fit in microbatches, without batch normalization, and return the difference of the
    weights from plain ones', which is due to rounding."""
    strategy = mirrored()
    x, y = numbers("x", 128, 16), numbers("y", 128, 1)
    weights, plans = [], 0
    for options in (None, {"microbatch": 8}):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(16, activation="gelu") for _ in range(6)]
            net = keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])
            net.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        callbacks = [] if options is None else [ms.keras.MemorySavingGradients(**options)]
        net.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(net.get_weights())
        plans += sum(len(callback.plans) for callback in callbacks)
    far = max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True))
    return {"far": far, "plans": plans}


def explained(rows: int = 2048) -> dict[str, Any]:
    """Explain a step of two replicas, and the same step of half of the batch without a strategy."""
    net = Net(mirrored(), rows)
    found = []
    half = tf.TensorSpec([rows // 2, WIDTH])
    one = tf.TensorSpec([], tf.int32)

    def both(x: tf.Tensor, seed: tf.Tensor) -> Any:
        return net.strategy.run(net.replica(None), args=(x, seed))

    def alone(x: tf.Tensor, seed: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = net.loss(x, seed)
        return tape.gradient(loss, net.weights)

    for step in (both, alone):
        said = ms.explain(step, half, one, hold_gradients=True)
        found.append({"activations": said.parts.activations, "computations": said.computations})
    return {"both": found[0], "alone": found[1]}
