"""One tensor that many ops read, sums of losses, and plans that take less than plain training in
their own order, but not in the executor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.editing.rewiring import CLONE_SUFFIX
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.engine.driver import attempt
from memsaving_gradients.errors import NothingSavedWarning
from tests.helpers.fresh import fresh

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
SHAPE = [1024, 256]
SIGNATURE = tf.TensorSpec(SHAPE), tf.TensorSpec([SHAPE[1], SHAPE[1]])
#: More readers than the planner tries to drop one by one (`least_memory.TRIALS`).
READERS = 130


def fan(h: tf.Tensor, readers: int) -> tf.Tensor:
    """Return the sum of ``readers`` losses, each from one reader of ``h``."""
    total: tf.Tensor | float = 0.0
    for k in range(readers):
        total += tf.reduce_mean(tf.sin(h * (1 + k / 100)))
    return total


def one_tensor(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return fan(tf.tanh(x @ w), READERS)


def each_layer(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    total: tf.Tensor | float = 0.0
    for _ in range(8):
        x = tf.tanh(x @ w)
        for k in range(10):
            total += tf.reduce_mean(tf.sin(x * (1 + k / 100)))
    return total


def behind_a_chain(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    for _ in range(30):
        x = tf.tanh(x @ w)
    return fan(x, 60)


def chain(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    for _ in range(16):
        x = tf.tanh(x @ w)
    return tf.reduce_sum(x)


def step_of(loss: Loss, **options: Any) -> Any:
    """Return a traced step; without ``options``, a plain step."""

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
    ("loss", "share"), [(one_tensor, 0.08), (each_layer, 0.45), (behind_a_chain, 0.18)]
)
def test_readers_run_again_one_after_the_other(loss, share):
    (plan,) = ms.plans(step_of(loss, checkpoints="memory"))
    assert plan.allocated < share * plan.allocated_plain


def test_many_readers_take_what_their_plan_says():
    plan, steps = fresh("tests.promises.test_fan_out:measured")
    assert max(steps) < 1.5 * plan


def measured() -> tuple[int, Sequence[int]]:
    """Return the bytes that a plan promises, and the peaks of steps (in a fresh process)."""
    x, w = tf.random.normal(SHAPE), tf.random.normal([SHAPE[1], SHAPE[1]])
    step = step_of(one_tensor, checkpoints="memory")
    peaks = measure_peak(lambda: step(x, w), warmup=2, steps=4).peaks
    return ms.plans(step)[-1].allocated, peaks


def runs_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rewritten step take as many bytes as plain training does when the executor runs it."""
    monkeypatch.setattr(attempt, "simulate_rewritten", lambda site, *_: site.original()[1])


MODES = [
    {"checkpoints": "memory"},
    {"planner": "memory"},
    {"planner": "chen", "max_slowdown": 1.5},
]


@pytest.mark.parametrize("options", MODES)
def test_a_plan_that_saves_nothing_as_it_runs_is_not_used(options, monkeypatch):
    used = step_of(chain, **options)
    assert ms.plans(used)[-1].clones and any(CLONE_SUFFIX in op.name for op in needed(used))
    runs_as_plain(monkeypatch)
    with pytest.warns(NothingSavedWarning, match="as TensorFlow runs it"):
        step = step_of(chain, **options)
    assert not ms.plans(step)
    assert not any(CLONE_SUFFIX in op.name for op in needed(step))


def needed(step: Any) -> set[tf.Operation]:
    """Return the ops that the results of a traced step need."""
    graph = step.get_concrete_function(*SIGNATURE).graph
    found: set[tf.Operation] = set()
    stack = [tensor.op for tensor in tf.nest.flatten(graph.structured_outputs)]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found


def test_of_named_checkpoints_it_is_said(monkeypatch):
    runs_as_plain(monkeypatch)
    with pytest.warns(NothingSavedWarning, match="as TensorFlow runs it"):
        step = step_of(chain, checkpoints=["Tanh_7"])
    assert ms.plans(step)[-1].clones
    assert any(CLONE_SUFFIX in op.name for op in needed(step))
