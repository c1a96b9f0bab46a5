"""A budget is the whole step's: its calls for gradients and all its other ops keep it together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.engine.planning.within_limits import seek
from memsaving_gradients.engine.rewire import observing
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.planners import Limits, Proposal
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.schedules.training_graph import TrainingGraph

LAYERS, WIDTH, ROWS = 8, 64, 2048
#: Bytes of a hidden value.
HIDDEN = 4 * WIDTH * ROWS

Weights = Sequence[tf.Variable]
Step = Callable[[tf.Tensor, Weights], Any]


def weights() -> list[tf.Variable]:
    return [
        tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [k, 0]) / WIDTH**0.5)
        for k in range(LAYERS)
    ]


def batch() -> tf.Tensor:
    return tf.random.stateless_normal([ROWS, WIDTH], [0, 1])


def network(x: tf.Tensor, ws: Weights) -> tf.Tensor:
    for w in ws:
        x = tf.tanh(x @ w)
    return x


def descend(ws: Weights, grads: Sequence[tf.Tensor]) -> None:
    for w, g in zip(ws, grads, strict=True):
        w.assign_sub(0.1 * g)


def microbatches(x: tf.Tensor, ws: Weights) -> Any:
    """Train on four parts in turn, whose gradients do not depend on one another."""
    total = [tf.zeros_like(w) for w in ws]
    for part in tf.split(x, 4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(network(tf.tile(part, [4, 1]), ws) ** 2)
        total = [a + g for a, g in zip(total, tape.gradient(loss, ws), strict=True)]
    descend(ws, total)
    return total[0]


def sharpness(x: tf.Tensor, ws: Weights) -> Any:
    """Move variables between two calls; the second call reads the moved variables."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(network(x, ws) ** 2)
    moves = [0.05 * g / (tf.norm(g) + 1e-6) for g in tape.gradient(loss, ws)]
    for w, move in zip(ws, moves, strict=True):
        w.assign_add(move)
    with tf.GradientTape() as tape:
        sharp = tf.reduce_sum(network(x, ws) ** 2)
    grads = tape.gradient(sharp, ws)
    for w, move in zip(ws, moves, strict=True):
        w.assign_sub(move)
    descend(ws, grads)
    return loss, sharp


def adversarial(x: tf.Tensor, ws: Weights) -> Any:
    """Make two calls that share a forward pass, with an update between them."""
    first, second = ws[: LAYERS // 2], ws[LAYERS // 2 :]
    with tf.GradientTape(persistent=True) as tape:
        hidden = network(x, first)
        found = network(hidden, second)
        mine, theirs = tf.reduce_mean(found**2), tf.reduce_mean((1 - found) ** 2)
    grads = tape.gradient(mine, first)
    descend(first, grads)
    more = tape.gradient(theirs, second)
    descend(second, more)
    return mine, theirs


def beside_a_small_one(x: tf.Tensor, ws: Weights) -> Any:
    """Make a call that no plan can lower, and a large call."""
    with tf.GradientTape() as tape:
        scale = tf.reduce_sum(x[:8] @ ws[0])
    small = tape.gradient(scale, ws[:1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(network(x, ws) ** 2)
    descend(ws, tape.gradient(loss, ws))
    return loss, small[0]


def second_order(x: tf.Tensor, ws: Weights) -> Any:
    """Make two calls of ``tf.gradients``; the second one differentiates the first."""
    y = network(x, ws)
    (slope,) = tf.gradients(y, x)
    loss = tf.reduce_mean(slope**2) + tf.reduce_mean(y**2)
    return [loss, *tf.gradients(loss, x)]


def looped(x: tf.Tensor, ws: Weights) -> Any:
    """Train a loop whose steps read a variable that the training step updates."""
    w = ws[0]
    with tf.GradientTape() as tape:
        state = x
        _, state = tf.while_loop(
            lambda k, s: k < 24,
            lambda k, s: (k + 1, tf.tanh(s @ w)),
            (0, x),
        )
        loss = tf.reduce_sum(state**2)
    (grad,) = tape.gradient(loss, [w])
    w.assign_sub(0.1 * grad)
    return loss, grad


def weighted_by_a_later_one(x: tf.Tensor, ws: Weights) -> Any:
    """Make a call that needs the loss of the last call, with another call between the two."""
    first, last = (tf.reduce_mean((network(x + k, ws) - k) ** 2) for k in range(2))
    grads = tf.gradients(first, ws, grad_ys=last)
    other = tf.reduce_mean((network(x + 2, ws) - 1) ** 2)
    more = tf.gradients(other, ws)
    for found in (grads, more, tf.gradients(last, ws)):
        descend(ws, found)
    return first, last, other


def noisy(x: tf.Tensor, ws: Weights) -> Any:
    """Make three calls whose forward passes keep random numbers."""
    total = [tf.zeros_like(w) for w in ws]
    for call in range(3):
        with tf.GradientTape() as tape:
            y = x
            for k, w in enumerate(ws[:5]):
                y = tf.nn.dropout(tf.tanh(y @ w), 0.2, seed=k) + tf.random.normal(
                    y.shape, seed=call
                )
            loss = tf.reduce_mean(y**2)
        total = [a + g for a, g in zip(total, tape.gradient(loss, ws[:5]), strict=False)]
    descend(ws[:5], total)
    return total[0]


def with_momenta(x: tf.Tensor, ws: Weights) -> Any:
    """Make two calls, and decay momenta while their gradients are computed."""
    found = []
    for k in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(x, ws[:4]) - k) ** 2)
        found.append(tape.gradient(loss, ws[:4]))
    for w, momentum, g, h in zip(ws[:4], ws[4:], *found, strict=True):
        momentum.assign(0.9 * momentum + g + h)
        w.assign_sub(0.1 * momentum)
    return found[0]


def run(function: Step, budget: float | str | None) -> tuple[list[Any], tuple[ms.Plan, ...]]:
    """Return the results of two steps, the variables after them, and the plans."""
    ws = weights()
    step = tf.function(lambda x: function(x, ws), autograph=False)
    found = []
    with ms.patched(budget=budget) if budget else tf.name_scope(""):
        for _ in range(2):
            found += tf.nest.flatten(step(batch()))
    return [*found, *ws], ms.plans(step)


def check(function: Step, budget: float | str) -> tuple[ms.Plan, ...]:
    """Check that a step keeps its budget with TensorFlow's own results; return its plans."""
    found, plans = run(function, budget)
    for mine, theirs in zip(found, run(function, None)[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert plans
    for plan in plans:
        assert plan.whole_step is not None
        assert plan.budget is not None
        assert plan.whole_step <= plan.budget
    return plans


pytestmark = pytest.mark.usefixtures("exact")


def test_calls_that_need_nothing_of_one_another_take_turns() -> None:
    plans = check(microbatches, 15 * HIDDEN)
    assert len(plans) == 4
    assert not any(plan.clones for plan in plans)


def test_calls_that_take_turns_recompute_where_that_is_not_enough() -> None:
    assert any(plan.clones for plan in check(microbatches, 12 * HIDDEN))


def test_saved_plans_of_calls_that_take_turns_are_followed() -> None:
    plans = check(microbatches, 12 * HIDDEN)
    ws = weights()
    step = tf.function(lambda x: microbatches(x, ws), autograph=False)
    with ms.patched(plan=list(plans)):
        step.get_concrete_function(batch())
    again = ms.plans(step)
    assert [plan.schedule for plan in again] == [plan.schedule for plan in plans]
    assert [plan.whole_step for plan in again] == [plan.whole_step for plan in plans]


@pytest.mark.parametrize("budget", [0.75, 0.6])
def test_calls_between_which_variables_move(budget: float) -> None:
    first, second = check(sharpness, budget)
    assert first.clones
    assert second.clones


def test_calls_of_one_forward_pass_have_one_plan() -> None:
    (plan,) = check(adversarial, 0.7)
    assert plan.clones


def test_a_small_call_is_left_alone() -> None:
    small, large = check(beside_a_small_one, 0.6)
    assert not small.clones
    assert large.clones


def test_calls_of_which_one_differentiates_the_other_have_one_plan() -> None:
    (plan,) = check(second_order, 0.7)
    assert plan.clones


def test_a_loop_reads_variables_before_they_are_updated() -> None:
    (plan,) = check(looped, 0.55)
    assert plan.loops


@pytest.mark.slow
def test_a_budget_that_the_calls_do_not_keep_together_names_one_that_they_keep() -> None:
    with pytest.raises(ms.errors.BudgetError) as refused:
        run(sharpness, 0.05)
    check(sharpness, refused.value.fraction)


def test_what_no_plan_keeps_is_refused_soon() -> None:
    """Calls with their plans of least memory are planned once more, not five times."""
    asked: list[int | None] = []

    def counting(graph: TrainingGraph, limits: Limits) -> Proposal:
        asked.append(limits.budget)
        return chain.plan(graph, limits)

    ws = weights()
    step = tf.function(lambda x: sharpness(x, ws), autograph=False)
    with ms.patched(budget=0.01, planner=counting), pytest.raises(ms.errors.BudgetError):
        step.get_concrete_function(batch())
    calls, rounds, plans = 2, 2, 3
    assert 0 < len(asked) <= calls * rounds * plans


def test_a_refusal_says_that_planning_was_cut_short() -> None:
    ws = weights()
    step = tf.function(lambda x: sharpness(x, ws), autograph=False)
    options = {"budget": 0.01, "planning_seconds": 1e-4}
    with ms.patched(**options), pytest.raises(ms.errors.BudgetError, match="ran out of time"):
        step.get_concrete_function(batch())


def test_a_search_for_a_step_with_packed_masks_ends_with_unpacking() -> None:
    looked: list[bool] = []

    def look(site: Site) -> None:
        site.call = replace(site.call, mode="slowdown")
        site.options = replace(site.options, max_slowdown=1.0)
        site.search_state = seek(site)
        assert site.packed.tensors and site.search_state is not None
        site.treat_loops(None)
        looked.append(site.search_state is None)

    with observing(look), tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 1024])
        y = x
        for _ in range(8):
            y = tf.nn.dropout(tf.tanh(y), 0.5, seed=1)
        ms.gradients(tf.reduce_sum(y), x)
    assert looked == [True]


def test_no_call_waits_for_gradients_that_need_its_loss() -> None:
    assert len(check(weighted_by_a_later_one, 0.75)) == 2


@pytest.mark.slow
def test_the_least_budget_of_calls_that_are_planned_beside_one_another_is_kept() -> None:
    ws = weights()

    def planned(budget: float) -> tuple[ms.Plan, ...]:
        step = tf.function(lambda x: noisy(x, ws), autograph=False)
        with ms.patched(budget=budget, planner="chain"):
            step.get_concrete_function(batch())
        return ms.plans(step)

    with pytest.raises(ms.errors.BudgetError) as refused:
        planned(0.7)
    plans = planned(refused.value.fraction)
    assert all(plan.whole_step <= plan.budget for plan in plans)
    assert any(plan.clones for plan in plans)


def test_a_step_that_keeps_its_budget_runs_as_tensorflow_built_it() -> None:
    def waits(budget: float | None) -> int:
        ws = weights()
        step = tf.function(lambda x: with_momenta(x, ws), autograph=False)
        with ms.patched(budget=budget) if budget else tf.name_scope(""):
            graph = step.get_concrete_function(batch()).graph
        return sum(len(op.control_inputs) for op in graph.get_operations())

    with pytest.warns(ms.errors.PlanNote, match="meets the budget"):
        ample = waits(1.0)
    assert ample == waits(None) < waits(0.7)


def test_a_function_whose_end_is_not_told_is_planned_at_once() -> None:
    ws = weights()

    def step(x: tf.Tensor) -> tf.Tensor:
        (grad,) = tf.gradients(tf.reduce_sum(network(x, ws)), x)
        return grad

    with ms.patched(budget=0.7):
        wrapped = tf.compat.v1.wrap_function(step, [tf.TensorSpec([ROWS, WIDTH])])
    (plan,) = ms.plans(wrapped)
    assert plan.clones
    np.testing.assert_array_equal(wrapped(batch()), tf.function(step)(batch()))


def looped_microbatches(x: tf.Tensor, ws: Weights) -> Any:
    """Sum gradients of microbatches in a loop; TensorFlow would run several steps at once."""
    rows = ROWS // 4

    def add(k: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(network(x[rows * k : rows * k + rows], ws) ** 2)
        grads = tape.gradient(loss, ws)
        return k + 1, *(s + g for s, g in zip(sums, grads, strict=True))

    _, *total = tf.while_loop(lambda k, *_: k < 4, add, (0, *map(tf.zeros_like, ws)))
    descend(ws, total)
    return total[0]


def test_steps_of_a_loop_that_keep_a_budget_run_one_at_a_time() -> None:
    ws = weights()
    step = tf.function(lambda x: looped_microbatches(x, ws), autograph=False)
    with ms.patched(budget=0.6):
        graph = step.get_concrete_function(batch()).graph
    (loop,) = (op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
    assert loop.get_attr("parallel_iterations") == 1
    (plan,) = check(looped_microbatches, 0.6)
    assert plan.assumed_rows is None


def fixed_point(x: tf.Tensor, ws: Weights) -> Any:
    """Run a loop at the peak of the step, whose steps compute a slope that no step changes."""
    with tf.GradientTape() as tape:
        y = network(x, ws)
        loss = tf.reduce_sum(y**2)

    def step(k: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return k + 1, x + tf.matmul(v * (1 - y * y), ws[0], transpose_b=True) / 2

    _, slope = tf.while_loop(lambda k, _: k < 12, step, (0, x))
    descend(ws, tape.gradient(loss, ws, output_gradients=tf.reduce_mean(slope)))
    return loss


@pytest.mark.parametrize(("budget", "parallel"), [(0.5, 1), (40 * HIDDEN, 10)])
def test_steps_of_a_loop_run_ahead_where_the_budget_has_room(budget: float, parallel: int) -> None:
    ws = weights()
    step = tf.function(lambda x: fixed_point(x, ws), autograph=False)
    with ms.patched(budget=budget), warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.PlanNote)  # plain training fits the larger one
        graph = step.get_concrete_function(batch()).graph
    (loop,) = (op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
    assert loop.get_attr("parallel_iterations") == parallel


def test_a_loop_that_waits_gives_the_same() -> None:
    check(fixed_point, 0.5)


def test_what_stands_for_gradients_is_where_they_are():
    """Strategies that train on several workers read the devices of gradients."""
    ws = weights()

    def devices(gradients):
        found = []

        @tf.function(autograph=False)
        def step(x):
            with tf.device("/device:CPU:0"):
                grads = gradients(tf.reduce_sum(network(x, ws) ** 2), ws)
            found.extend(grad.device for grad in grads)
            descend(ws, grads)

        step.get_concrete_function(batch())
        return found

    plain = devices(tf.gradients)
    assert all(plain)
    assert devices(lambda y, xs: ms.gradients(y, xs, budget=0.7)) == plain
