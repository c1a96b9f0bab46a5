"""Long sums: the bits of TensorFlow's kernel whatever the order in which addends come, and few addends at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.roles import capture_step
from memsaving_gradients.sums import Sums
from tests.support import session_config

v1 = tf.compat.v1
WIDTH = 64


@pytest.mark.parametrize("many", [*range(10, 20), 33, 64])
@pytest.mark.parametrize("in_order", [True, False])
def test_bits_are_those_of_the_kernel(many: int, in_order: bool) -> None:
    numbers = np.random.default_rng(many).standard_normal((many, 257)).astype(np.float32)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, numbers.shape)
        y = tf.reduce_sum(x)
        border = len(graph.get_operations())
        addends = [tf.tanh(x[k]) for k in range(many)]
        total = tf.add_n(addends)
        step = capture_step(border, [y], [total], batch=1, hold_gradients=False, may_chain=True)
        ops, (position,) = step.source.ops, step.graph.sums
        sums = Sums(step.graph, ops, {position})
        made = [ops.index(addend.op) for addend in addends]
        if not in_order:
            random.Random(many).shuffle(made)
        added = [sums.add(k, ops[k]) for k in made]
        chain = sums.total(position)
        with v1.Session(config=session_config()) as session:
            # Each in a run of its own: the kernel begins with the first input that nobody else reads.
            found, expected = (session.run(one, {x: numbers}) for one in (chain, total))
    assert found.tobytes() == expected.tobytes()
    if in_order:
        # Each addend but those that begin the sum, or a group, is added at once.
        assert sum(op is None for op in added) == 1 + (many - 1) // 8 - (many % 8 == 1)
    assert sums.bytes_of(made[0]) == numbers.nbytes
    assert sums.bytes_of(position) == 0


def test_addends_wait_until_the_last_one_is_added() -> None:
    steps = 48
    with tf.Graph().as_default() as graph:
        weights = v1.placeholder(tf.float32, [WIDTH, WIDTH])
        state = v1.placeholder(tf.float32, [2, WIDTH])
        for _ in range(steps):
            state = tf.tanh(state @ weights)
        ms.gradients(tf.reduce_sum(state), weights, budget=0.5)
    (plan,) = ms.plans(graph)
    addend = 4 * WIDTH * WIDTH
    assert plan.peak_plain > steps * addend
    # As the executor runs it: the states, the sum, its last group, an addend, and little else.
    assert plan.peak < steps * 2 * WIDTH * 4 + 5 * addend
    assert plan.clones == 0
