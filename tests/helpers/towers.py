"""Chains of equal layers, planned within budgets."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.greedy import greedy

v1 = tf.compat.v1

LAYERS, WIDTH = 24, 1 << 18
HOLEY = 325_000


def tower(layers: int = LAYERS, width: int | None = WIDTH) -> tuple[tf.Tensor, tf.Tensor]:
    """Build a chain of equal layers in the current graph; return x, y."""
    x = y = v1.placeholder(tf.float32, [width], name="x")
    for k in range(layers):
        y = tf.tanh(y, name=f"layer{k}")
    return x, y


def planned(width: int | None = WIDTH, mark: int | None = None, **options: Any) -> ms.Plan:
    with tf.Graph().as_default() as graph:
        x, y = tower(width=width)
        if mark is not None:
            ms.checkpoint(graph.get_tensor_by_name(f"layer{mark}:0"))
        ms.gradients(y, x, **{"planner": greedy, **options})
    return ms.plans(graph)[-1]
