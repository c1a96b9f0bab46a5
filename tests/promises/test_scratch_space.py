"""Budgets on CPUs without oneDNN, where gradients of convolutions take much scratch space."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.measure import in_fresh_process, measure_peak

LAYERS = 12


def peaks(asked: dict[str, float]) -> tuple[int, int, float]:
    """Return the simulated bytes of plain training and of the plan, and the measured bytes."""
    filters = [
        tf.Variable(tf.random.stateless_normal([3, 3, 16, 16], [i, 0]) / 12) for i in range(LAYERS)
    ]
    x = tf.random.stateless_normal([16, 32, 32, 16], [1, 1])

    @tf.function(autograph=False)
    def step():
        y = x
        for w in filters:
            y = tf.nn.relu(tf.nn.conv2d(y, w, 1, "SAME")) + y
        loss = tf.reduce_mean(y**2)
        for w, gradient in zip(filters, ms.gradients(loss, filters, **asked), strict=True):
            w.assign_sub(0.01 * gradient)
        return loss

    (plan,) = ms.plans(step.get_concrete_function().graph)
    measured = measure_peak(step, warmup=2, steps=2).peak
    return plan.allocated_plain, plan.allocated, float(measured)


@pytest.mark.parametrize("asked", [{}, {"budget": 0.75}], ids=["default", "budget"])
def test_two_gradients_take_no_scratch_space_at_once(asked):
    settings = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    plain, planned, measured = in_fresh_process(f"{__name__}:peaks", {"asked": asked}, settings)
    # The gradient of a filter takes 25 MB, more than all activations together.
    assert max(planned, measured) <= 0.75 * plain
    assert abs(planned - measured) < 0.1 * measured
