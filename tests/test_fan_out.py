"""One tensor that many ops read, sums of losses beside it, and plans that take less in order than plain training, but not as they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.edit import CLONE_SUFFIX
from graph_tools.measure import measure_peak
from memsaving_gradients.errors import NothingSavedWarning
from tests.fresh import fresh

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
SHAPE = [1024, 256]
SIGNATURE = tf.TensorSpec(SHAPE), tf.TensorSpec([SHAPE[1], SHAPE[1]])
#: More than there are moves of single tensors in the search for a plan (`least_memory.MOST_MOVES`).
READERS = 130


def fan(h: tf.Tensor, readers: int) -> tf.Tensor:
    """The sum of so many losses, each of what one reader makes of ``h``."""
    total = tf.constant(0.0)
    for k in range(readers):
        total += tf.reduce_mean(tf.sin(h * (1 + k / 100)))
    return total


def one_tensor(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return fan(tf.tanh(x @ w), READERS)


def each_layer(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    total = tf.constant(0.0)
    for _ in range(8):
        x = tf.tanh(x @ w)
        total += fan(x, 10)
    return total


def behind_a_chain(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    for _ in range(30):
        x = tf.tanh(x @ w)
    return fan(x, 60)


def sum_of_readers(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loss whose forward pass holds what all readers make: nothing can be saved as it runs."""
    h = tf.tanh(x @ w)
    total = tf.zeros_like(h)
    for k in range(60):
        total += tf.sin(h * (1 + k / 100))
    return tf.reduce_mean(total**2)


def step_of(loss: Loss, **options: Any) -> Any:
    """A traced step, plain without ``options``."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = loss(x, w)
        return value, tape.gradient(value, w)

    if options:
        with ms.patched(**options):
            step.get_concrete_function(*SIGNATURE)
    return step


@pytest.mark.parametrize(
    ("loss", "share"), [(one_tensor, 0.08), (each_layer, 0.4), (behind_a_chain, 0.18)]
)
def test_readers_run_again_one_after_the_other(loss, share):
    (plan,) = ms.plans(step_of(loss, checkpoints="memory"))
    assert plan.allocated < share * plan.allocated_plain


def test_many_readers_take_what_their_plan_says():
    plain, saving, simulated = fresh("tests.test_fan_out:measured")
    assert saving < 0.15 * plain
    assert saving < 1.5 * simulated


def measured() -> tuple[int, int, int]:
    """Peaks of plain training and of ours, and what the plan says; for fresh processes."""
    x, w = tf.random.normal(SHAPE), tf.random.normal([SHAPE[1], SHAPE[1]])
    plain, saving = step_of(one_tensor), step_of(one_tensor, checkpoints="memory")
    peaks = [
        max(measure_peak(lambda s=s: s(x, w), warmup=2, steps=4).peaks) for s in (plain, saving)
    ]
    return peaks[0], peaks[1], ms.plans(saving)[-1].allocated


@pytest.mark.parametrize("options", [{"checkpoints": "memory"}, {"planner": "memory"}])
def test_a_plan_that_saves_nothing_as_it_runs_is_not_used(options):
    with pytest.warns(NothingSavedWarning, match="as TensorFlow runs it"):
        step = step_of(sum_of_readers, **options)
    assert not ms.plans(step)
    assert not any(CLONE_SUFFIX in op.name for op in needed(step))


def needed(step: Any) -> set[tf.Operation]:
    """The ops that the results of a traced step need."""
    graph = step.get_concrete_function(*SIGNATURE).graph
    found: set[tf.Operation] = set()
    stack = [tensor.op for tensor in tf.nest.flatten(graph.structured_outputs)]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found


def test_of_named_checkpoints_it_is_said():
    with pytest.warns(NothingSavedWarning, match="as TensorFlow runs it"):
        step = step_of(sum_of_readers, checkpoints=["Tanh"])
    (plan,) = ms.plans(step)
    assert plan.clones and plan.allocated >= plan.allocated_plain
