"""Attention in blocks, together with later differentiation, budgets, loops, saved plans."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, BudgetError
from memsaving_gradients.reports.plan import Plan
from tests.helpers.attention_cases import assert_close
from tests.helpers.found_attention import (
    LONG,
    blocks_in,
    by_hand,
    dropped,
    in_blocks,
    loss_of,
    one,
    same,
    stepped,
    tensors,
)
from tests.helpers.sampling import slow
from tests.helpers.support import check_error, numbers

pytestmark = pytest.mark.usefixtures("small_blocks")


# --- later differentiation


def twice(function, inputs, differentiate):
    grads = differentiate(loss_of(function(*inputs)), list(inputs))
    return differentiate(tf.add_n([tf.reduce_sum(tf.sin(g)) for g in grads]), list(inputs))


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_values_of_first_gradients(graph):
    """The differentiated loss and an earlier gradient read the weights; both lead to the same
    products."""
    shape = [2, LONG, 8]
    q, k, v, up = (tf.compat.v1.placeholder(tf.float32, shape) for _ in range(4))
    output = by_hand(q, k, v)
    (of_values,) = in_blocks(output, v, grad_ys=up, checkpoints="speed")
    loss = tf.reduce_sum(tf.sin(output)) + tf.reduce_sum(tf.cos(of_values))
    plain, ours = tf.gradients(loss, [q, k, v]), in_blocks(loss, [q, k, v])
    fed = [numbers(f"{i}", *shape) for i in range(4)]
    with tf.compat.v1.Session() as session:
        found = session.run([ours, plain], {q: fed[0], k: fed[1], v: fed[2], up: fed[3]})
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


# The outer gradients differentiate plain attention, where nothing can be saved.
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_second_order():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))
    found, plain = (
        tf.function(lambda *xs, d=d: twice(by_hand, xs, d), autograph=False)(*inputs)
        for d in (in_blocks, tf.gradients)
    )
    assert_close(found, plain)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_second_order_of_tapes():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))

    def step(*inputs):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                loss = loss_of(by_hand(*inputs))
            grads = tape.gradient(loss, inputs)
            total = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in grads])
        return [*grads, *outer.gradient(total, inputs)]

    plain = tf.function(step, autograph=False)(*inputs)
    with ms.patched(attention="blocks"):
        assert_close(tf.function(step, autograph=False)(*inputs), plain)


def test_two_calls():
    def step(differentiate):
        def both(*inputs):
            output = by_hand(*inputs)
            losses = loss_of(output), tf.reduce_sum(tf.square(output))
            return [g for loss in losses for g in differentiate(loss, list(inputs))]

        return tf.function(both, autograph=False)

    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))
    plain, ours = step(tf.gradients), step(in_blocks)
    assert_close(ours(*inputs), plain(*inputs))
    assert blocks_in(ours, *inputs) == 1


# --- with other features


def deep(*inputs):
    x = inputs[0]
    for _ in range(2):
        y = tf.tanh(x)
        x = x + by_hand(y, y, tf.tanh(y))
    return x


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.9},
        {"planner": "chain"},
        *slow({"checkpoints": "speed"}, {"loops": "segments"}, {"checkpoints": None}),
    ],
    ids=str,
)
def test_plans(options):
    same(deep, one(2, LONG, 16), finds=2, **options)


def test_a_budget_that_cannot_be_kept(graph):
    """The graph stays as it was, and can be differentiated in another way."""
    x = tf.compat.v1.placeholder(tf.float32, [2, LONG, 16])
    loss = loss_of(deep(x))
    before = [(op, list(op.inputs)) for op in graph.get_operations()]
    with pytest.raises(BudgetError):
        in_blocks(loss, x, budget=1000, batch_size=1)
    assert all(a is b for op, read in before for a, b in zip(op.inputs, read, strict=True))
    in_blocks(loss, x)
    assert len(ms.plans(graph)[-1].attention) == 2


def test_with_loops():
    def function(x):
        x = tf.while_loop(
            lambda i, _: i < 40,
            lambda i, x: (i + 1, tf.sin(x) * 1.1),
            [0, x],
            maximum_iterations=40,
        )[1]
        return by_hand(x, x, x)

    step = same(function, one(2, LONG, 16), loops="segments")
    assert ms.plans(step)[-1].replayed


def test_saved_plan(tmp_path):
    x = one(2, LONG, 16)
    step = stepped(deep, differentiate=in_blocks)
    first = step(x)
    plan = ms.plans(step)[-1]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.attention == plan.attention == ("Softmax", "Softmax_1")
    # A saved plan knows that attention was in blocks.
    again = stepped(deep, differentiate=lambda *a: ms.gradients(*a, plan=tmp_path / "plan.json"))
    assert_close(again(x), first, 0)
    assert ms.plans(again)[-1].schedule == plan.schedule


def test_a_plan_that_only_has_attention():
    """The figures of plain training count the attention that TensorFlow built."""
    step = stepped(by_hand, differentiate=in_blocks)
    inputs = tensors(*[(2, 4, 600, 8)] * 3)
    step(*inputs)
    plan = ms.plans(step)[-1]
    assert plan.attention == ("Softmax",)
    assert plan.peak * 4 < plan.peak_plain


def test_text():
    def function(x):
        return dropped(*[deep(x)] * 3)

    step = stepped(function, differentiate=in_blocks)
    step(one(2, LONG, 16))
    text = str(ms.plans(step)[-1])
    assert "attention in blocks (2): Softmax, Softmax_1" in text
    assert "attention kept: Softmax_2: its weights are changed" in text


def test_wrong_way():
    with pytest.raises(ArgumentError) as caught:
        ms.patch(attention="block")
    check_error(caught.value, "attention", "block", "did you mean 'blocks'")


def test_no_keys():
    spec = [tf.TensorSpec([None, None, 8])] * 3

    def step(*inputs):
        return in_blocks(loss_of(by_hand(*inputs)), list(inputs))

    function = tf.function(step, input_signature=spec, autograph=False)
    for grad in function(*tensors((2, 5, 8), (2, 0, 8), (2, 0, 8))):
        assert not np.any(np.asarray(grad))


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_a_vectorized_map_stays_plain():
    (x,) = tensors((3, 6, 8))

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(by_hand(x, x, x))
        return tape.gradient(loss, x)

    plain = tf.vectorized_map(slope, x)
    with ms.patched(attention="blocks"):
        found = tf.function(lambda x: tf.vectorized_map(slope, x), autograph=False)(x)
    assert_close(found, plain)


def test_an_output_that_is_returned_is_said_to_be_plain_as_well():
    inputs = tensors((2, LONG, 8), (2, 70, 8), (2, 70, 8))

    def step(*inputs):
        output = by_hand(*inputs)
        return output, in_blocks(loss_of(output), list(inputs))

    with pytest.warns(ms.errors.NothingSavedWarning, match="plainly as well"):
        tf.function(step, autograph=False)(*inputs)
