"""Replicas on several devices: they have the same weights, each device uses its own memory, and no
replica waits for another."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.graph.capture import capture
from graph_tools.ops import op_types
from graph_tools.ops.devices import Home
from memsaving_gradients.engine import replicas
from tests.helpers.fresh import fresh
from tests.helpers.support import numbers
from tests.helpers.versions import KERAS


def run(what: str, **kwargs: Any) -> Any:
    return fresh(f"tests.helpers.distributing:{what}", kwargs)


# --- replicas on two logical devices


CHAIN = {"batch_size": 1024, "planner": "chain"}


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        pytest.param(
            [{"checkpoints": "memory", "function": True}, {"budget": "3 MB", **CHAIN}],
            {"layers": 3, "epochs": 1},
            id="few layers",
        ),
        pytest.param(
            [
                {"checkpoints": "memory"},
                {"checkpoints": "memory", "function": True},
                {"budget": "6 MB", **CHAIN},
            ],
            {},
            id="more",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_custom_loops(settings: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    result = run("loops", settings=settings, **sizes)
    assert result["finite"]
    for found in result["found"]:
        assert found["equal"]
        # The first device also has clones of abandoned plans.
        assert found["clones"]["CPU:0"] >= found["clones"]["CPU:1"] > 0
        assert not found["nowhere"] and not found["across"]
        assert found["collectives"] and not found["copied"]
        assert not found["said"]
    # Two replicas, in the trace of a full batch and in the trace of a batch with a single example.
    plans = result["found"][-1]["plans"]
    assert len(plans) == 4
    for one, other in (plans[:2], plans[2:]):
        assert one["clones"] == other["clones"]
        assert max(one["whole"], other["whole"]) <= one["budget"] == other["budget"]


def test_clones_run() -> None:
    found = run("optimized")
    for device in ("CPU:0", "CPU:1"):
        assert found[f"saving {device}"] > found[f"plain {device}"] > 0


def test_both_devices_take_less() -> None:
    found = run("peaks")
    one, other = found["plans"]
    assert one["allocated"] == other["allocated"]
    assert found["memory"] < 0.4 * found["plain"]
    assert found["memory"] < 1.1 * (one["allocated"] + other["allocated"])


needs_shared_statistics = pytest.mark.skipif(
    KERAS < (3, 6),
    reason=f"plain fit fails in Keras {keras.__version__}, too, where replicas share statistics",
)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        pytest.param([{}, {"budget": 0.7, **CHAIN}], {}, id="each", marks=pytest.mark.slow),
        pytest.param(
            [{"sync": True, "budget": 0.7, **CHAIN}],
            {"blocks": 2, "epochs": 1},
            id="synchronized, few layers",
            marks=needs_shared_statistics,
        ),
        pytest.param(
            [{"sync": True}],
            {},
            id="synchronized",
            marks=[needs_shared_statistics, pytest.mark.slow],
        ),
    ],
)
def test_fit(settings: list[dict[str, Any]], sizes: dict[str, int]) -> None:
    result = run("fits", settings=settings, **sizes)
    for found in result["found"]:
        assert found["equal"]
        assert not found["said"]
        assert len(found["plans"]) % 2 == 0
        for plan in found["plans"]:
            assert plan["clones"] and plan["peak"] < plan["plain"]
    for options, found in zip(settings, result["found"], strict=True):
        for plan in found["plans"]:
            assert "budget" not in options or plan["whole"] <= plan["budget"]


def test_microbatches() -> None:
    found = run("microbatches")
    assert found["plans"] and found["far"] < 1e-5


def test_explained_is_one_replica() -> None:
    found = run("explained")
    assert found["both"]["computations"] == found["alone"]["computations"] == 1
    # One replica updates weights, so the peaks are not at the same op. The activations may differ
    # by the output of one layer; two replicas would be twice as much.
    assert found["both"]["activations"] == pytest.approx(found["alone"]["activations"], rel=0.05)


# --- one device of several


def test_captured_for_one_device() -> None:
    with tf.Graph().as_default():
        with tf.device("/CPU:1"):
            there = tf.sin(tf.compat.v1.placeholder(tf.float32, [1024], name="x"))
            alone = tf.cos(there)
        with tf.device("/CPU:0"):
            here = tf.tanh(there)
            end = tf.exp(here)
        whole = capture([end, alone])
        part = capture([end, alone], home=Home("/device:CPU:0"))
    size = dict(zip((op.name for op in part.ops), part.value_bytes(1), strict=True))
    # An op of this device reads the value, so it is copied here.
    assert size[there.op.name] == size[here.op.name] == size[end.op.name] == 4096
    assert size[alone.op.name] == 0
    assert not part.clonable[part.position[there.op.name]]
    assert whole.clonable[whole.position[there.op.name]] and whole.here.all()


def test_collectives_are_kept_in_order() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4])
        one, other = (
            tf.raw_ops.CollectiveReduceV2(
                input=x * k,
                group_size=2,
                group_key=1,
                instance_key=k,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            for k in (1, 2)
        )
        # The ends come in the other order.
        graph = capture([other, one])
    first, second = graph.position[one.op.name], graph.position[other.op.name]
    assert first in graph.controls[second]
    assert op_types.is_collective(one.op) and not op_types.is_clonable(one.op)
    assert not op_types.is_collective(x.op)


# --- strategies


def step_of(strategy: Any) -> Any:
    x = tf.constant(numbers("x", 256, 32))

    def replica() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(8):
                y = tf.sin(y)
            y = tf.reduce_sum(y)
        return tape.gradient(y, x)

    return tf.function(lambda: strategy.run(replica), autograph=False)


def test_one_device() -> None:
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    plain, step = step_of(strategy)(), step_of(strategy)
    with ms.patched(checkpoints="memory"):
        found = step()
    assert found.numpy().tobytes() == plain.numpy().tobytes()
    assert ms.plans(step)[-1].clones


def test_tpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    monkeypatch.setattr(tf.distribute, "TPUStrategy", tf.distribute.OneDeviceStrategy)
    step = step_of(strategy)
    with (
        pytest.warns(ms.errors.NothingSavedWarning, match="not supported"),
        ms.patched(checkpoints="memory"),
    ):
        step()
    assert not ms.plans(step)


def test_shares_of_batches() -> None:
    assert replicas.per_replica(7, tf.distribute.get_strategy()) == 7
    assert replicas.home_of([]) is None and not replicas.in_sync()


# --- in the manner of Horovod


def reduced(tensor: Any) -> Any:
    """Return the mean that an all-reduce over two equal workers would return."""
    return None if tensor is None else (tensor + tensor) / 2.0


class WrappedTape(tf.GradientTape):
    """A tape like Horovod's: it has a class of its own and the attributes of the recording tape."""

    def __init__(self, tape: tf.GradientTape) -> None:
        self.__dict__.update(tape.__dict__)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        found = super().gradient(target, sources, output_gradients)
        return [reduced(grad) for grad in found]


class HoldingTape:
    """A tape that holds another one."""

    def __init__(self, tape: tf.GradientTape) -> None:
        self._tape = tape

    def gradient(self, target: Any, sources: Any) -> Any:
        return [reduced(grad) for grad in self._tape.gradient(target, sources)]


class WrappedOptimizer(keras.optimizers.SGD):
    """An optimizer like Horovod's: it reduces gradients before it applies them."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        pairs = [(reduced(grad), variable) for grad, variable in grads_and_vars]
        return super().apply_gradients(pairs, **options)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("wrap", [WrappedTape, HoldingTape, None], ids=["is", "has", "optimizer"])
def test_reducing_wrappers(wrap: Any) -> None:
    x = tf.constant(numbers("x", 512, 32))

    def weights_after(**options: Any) -> tuple[list[np.ndarray], Any]:
        weights = [tf.Variable(numbers(f"w{k}", 32, 32, scale=32**-0.5)) for k in range(6)]
        optimizer = (keras.optimizers.SGD if wrap else WrappedOptimizer)(0.1, momentum=0.9)
        optimizer.build(weights)

        @tf.function(autograph=False)
        def step() -> None:
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.tanh(tf.matmul(h, weight))
                loss = tf.reduce_mean(tf.square(h))
            tape = wrap(tape) if wrap else tape
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        with ms.patched(**options) if options else contextlib.nullcontext():
            for _ in range(3):
                step()
        return [w.numpy() for w in weights], step

    expected, _ = weights_after()
    ours, step = weights_after(checkpoints="memory")
    assert ms.plans(step)[-1].clones
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(a, b)
