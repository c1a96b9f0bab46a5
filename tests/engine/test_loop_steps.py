"""Loops whose number of steps is known only at run time: budgets hold for the number that the user
gives, and are never promised on a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.errors import ArgumentError
from tests.helpers.fresh import fresh

ROWS, WIDTH = 64, 64
#: Bytes of a state.
STATE = 4 * ROWS * WIDTH
SPECS = tf.TensorSpec([ROWS, WIDTH]), tf.TensorSpec([], tf.int32)


def looping(x: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
    """Return the sum of the result of ``n`` steps, which have four residuals each."""

    def body(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(4):
            h = tf.tanh(h + x)
        return i + 1, h

    return tf.reduce_sum(tf.while_loop(lambda i, _: i < n, body, (0, x))[1])


def step(**options: Any) -> Any:
    @tf.function(autograph=False)
    def of(x: tf.Tensor, n: tf.Tensor) -> Any:
        return ms.gradients(looping(x, n), x, **options)

    of.get_concrete_function(*SPECS)
    return of


def planned(**options: Any) -> ms.Plan:
    return ms.plans(step(**options))[-1]


@tf.function(autograph=False)
def called(x: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
    return looping(x, n)


def of_call(**options: Any) -> ms.Plan:
    @tf.function(autograph=False)
    def of(x: tf.Tensor, n: tf.Tensor) -> Any:
        return ms.gradients(called(x, n), x, **options)

    of.get_concrete_function(*SPECS)
    return ms.plans(of)[-1]


@pytest.mark.parametrize("options", [{}, {"loops": "segments"}], ids=str)
@pytest.mark.parametrize("make", [planned, of_call])
def test_a_budget_in_bytes_is_refused_on_a_guess(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="give loop_steps=") as caught:
        make(budget="1 GB", **options)
    assert caught.value.argument == "loop_steps" and "'while" in str(caught.value)


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    found = planned(checkpoints="memory")
    assert found.assumed_steps == 256 and found.assumed_batch is None
    assert "; for loops of 256 steps, assumed: give loop_steps=" in str(found)
    found.save(tmp_path / "plan.json")
    assert ms.Plan.load(tmp_path / "plan.json").assumed_steps == 256
    assert planned(budget=0.5).assumed_steps == 256


@pytest.mark.parametrize("network", [looping, called])
@pytest.mark.parametrize("steps", [10, 512])
def test_bytes_are_those_of_the_steps_that_were_told(network: Any, steps: int) -> None:
    def of(x: tf.Tensor, n: tf.Tensor) -> Any:
        return tf.gradients(network(x, n), x)

    guessed, told = ms.explain(of, *SPECS), ms.explain(of, *SPECS, loop_steps=steps)
    assert guessed.assumed_steps == 256 and "for loops of 256 steps, assumed" in str(guessed)
    assert told.assumed_steps is None and "assumed" not in str(told)
    assert 4 * steps * STATE <= told.parts.activations <= 4 * (steps + 1) * STATE


def test_loops_that_show_their_steps_need_not_be_told() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [ROWS, WIDTH])
        ms.gradients(looping(x, tf.constant(12)), x, checkpoints="memory", loop_steps=500)
    plan = ms.plans(graph)[-1]
    assert plan.assumed_steps is None
    assert plan.peak_plain < 4 * 20 * STATE


def test_loops_without_residuals_need_not_be_told() -> None:
    def of(x: tf.Tensor, n: tf.Tensor) -> Any:
        y = x
        for _ in range(8):
            y = tf.tanh(y)
        _, end = tf.while_loop(lambda i, _: i < n, lambda i, h: (i + 1, 0.9 * h), (0, y))
        return ms.gradients(
            tf.reduce_sum(y) + tf.stop_gradient(tf.reduce_sum(end)), x, budget=10**9
        )

    traced = tf.function(of, autograph=False)
    with pytest.warns(ms.errors.PlanNote):
        traced.get_concrete_function(*SPECS)
    assert ms.plans(traced)[-1].assumed_steps is None


def test_a_graph_forgets_what_was_told_of_another() -> None:
    """Two steps call one function, and each of them makes its own plan for it."""

    def of(x: tf.Tensor, n: tf.Tensor) -> Any:
        return tf.gradients(called(x, n), x)

    assert ms.explain(of, *SPECS, loop_steps=500).assumed_steps is None
    assert ms.explain(of, *SPECS).assumed_steps == 256


def measured(loops: str, told: int, budget: int) -> dict[int, int]:
    """Return the peaks by number of steps (in a fresh process)."""
    ours = step(budget=budget, loop_steps=told, loops=loops)
    x = tf.zeros([ROWS, WIDTH])
    return {
        n: measure_peak(lambda n=n: ours(x, tf.constant(n)), warmup=1, steps=3).peak
        for n in (3, told // 3, told)
    }


@pytest.mark.parametrize("loops", ["segments", "treeverse"])
def test_a_budget_is_kept_up_to_the_steps_that_were_told(loops: str) -> None:
    told, budget = 300, 150 * STATE
    found = fresh(f"{__name__}:measured", loops=loops, told=told, budget=budget)
    assert max(found.values()) <= budget < 4 * told * STATE
