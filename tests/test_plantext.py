"""What a plan says of itself when it is printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.schedule import Buffers, Simulation
from tests.greedy import greedy

v1 = tf.compat.v1
KILO = 1024


def buffers(*sizes: int) -> Buffers:
    """Buffers that are alive together."""
    return np.zeros(len(sizes), np.int64), np.ones(len(sizes), np.int64), np.array(sizes)


def simulation(size: int, worst: int) -> Simulation:
    """One that takes ``size`` bytes in the best of two orders, ``worst`` in the other."""
    return Simulation(np.array([size]), size, 0.0, buffers(size), other_orders=(buffers(worst),))


def plan(**fields: Any) -> ms.Plan:
    known: dict[str, Any] = {
        "mode": "budget",
        "decisions": (),
        "peak_plain": 200 * KILO,
        "peak": 100 * KILO,
        "extra_time": 0.04,
        "clones": 26,
        "checkpoints": (),
        "gating": "control",
        "planner": "auto",
        "simulation_plain": simulation(200 * KILO, 210 * KILO),
        "simulation": simulation(100 * KILO, 116 * KILO),
    }
    return ms.Plan(**{**known, **fields})


def lines(text: object) -> list[str]:
    return str(text).splitlines()


def test_first_come_chunks_of_those_that_fractions_are_of() -> None:
    found = plan(budget=120 * KILO, lower_bound=0.03)
    assert (found.allocated, found.allocated_plain) == (116 * KILO, 200 * KILO)
    assert lines(found)[:3] == [
        "plan 'budget': 118,784 bytes (116.00 KiB) in the allocator's chunks, 58 % of plain training's 204,800; extra time "
        "about 4 %, 26 ops run again",
        "budget 122,880 bytes (120.00 KiB, 0.6 of plain): 4,096 left; planner 'auto': at most 1.0 % of a step above the least "
        "extra time (3.0 %)",
        "simulated peak 102,400 bytes asked for, plain 204,800",
    ]
    assert repr(found) == "<Plan 'budget': 116.00 KiB of 200.00 KiB, 26 ops run again>"


def test_under_xla_there_is_one_buffer() -> None:
    found = plan(gating="data")
    assert (found.allocated, found.allocated_plain) == (100 * KILO, 200 * KILO)
    assert "in one buffer of XLA, 50 % of" in str(found)


def test_what_a_budget_leaves() -> None:
    assert "(100.00 KiB, 0.5 of plain): NOT KEPT, 16,384 over; planner 'auto'" in str(
        plan(budget=100 * KILO)
    )
    ample = plan(budget=2**30, clones=0, extra_time=0.0, simulation=simulation(0, 200 * KILO))
    assert "100 % of plain training's 204,800; nothing is run again" in str(ample)
    assert "budget 1,073,741,824 bytes (1.00 GiB): 1,073,537,024 left" in str(ample)


def test_messages_name_the_same_figure() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [300, 1000])
        for k in range(8):
            y = tf.tanh(y) @ tf.ones([1000, 1000 + 100 * k]) @ tf.ones([1000 + 100 * k, 1000])
        ms.gradients(y, x, budget=0.8, planner=greedy)
        with pytest.warns(ms.errors.PlanNote) as noted:
            ms.gradients(y, x, budget="1 GiB", planner=greedy)
        with pytest.raises(ms.errors.BudgetError) as caught:
            ms.gradients(y, x, budget=0.001, planner=greedy)
    said = f"{ms.plans(graph)[0].allocated_plain:,}"
    assert f"plain training needs {said} bytes" in str(noted[0].message)
    assert f"of the {said} bytes of plain training" in str(caught.value)
    assert f"of plain training's {said};" in str(ms.plans(graph)[0])
