"""`explain` counts the memory of a compiled step in the bytes that XLA assigns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.xla.program import compiled
from memsaving_gradients.errors import PlanNote

LAYERS, WIDTH, BATCH = 8, 32, 256
X = tf.TensorSpec([BATCH, WIDTH])


@functools.cache
def _weights() -> list[tf.Variable]:
    return [tf.Variable(np.eye(WIDTH, dtype=np.float32)) for _ in range(LAYERS)]


def _step(gradients=tf.gradients):
    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        y = x
        for w in _weights():
            y = tf.tanh(y @ w)
        return [tf.reduce_sum(g * g) for g in gradients(tf.reduce_sum(y), _weights())]

    return step


@functools.cache
def explained() -> Any:
    return ms.explain(_step(), X, xla=True)


def test_plain_training_is_as_xla_compiles_it():
    found = explained()
    plain, least = found.compiled
    taken = compiled(_step().get_concrete_function(X).graph, batch=1).assignment
    assert found.allocated_plain == plain.assigned == found.curve[0].budget == taken.transient
    assert plain.results == taken.results
    assert 0 < sum(one.bytes for one in plain.at_peak) <= plain.assigned
    assert any("Tanh" in name for one in plain.at_peak for name in one.op_names)
    assert least.assigned < plain.assigned


def test_the_curve_falls_in_xlas_bytes():
    found = explained()
    budgets = [point.budget for point in found.curve]
    assert budgets == sorted(set(budgets), reverse=True)
    assert all(point.share == point.budget / budgets[0] for point in found.curve)
    assert all(point.simulated for point in found.curve)
    assert found.at(0.7).budget <= 0.7 * budgets[0]


def test_the_least_budget_is_kept():
    least = explained().least.budget
    step = _step(lambda y, xs: ms.gradients(y, xs, budget=least))
    graph = step.get_concrete_function(X).graph
    assert compiled(graph, batch=1).assignment.transient <= least


def test_text_page_and_frame(tmp_path):
    found = explained()
    plain = found.compiled[0]
    text = str(found)
    assert f"XLA assigns {plain.assigned:,} bytes" in text
    assert "to the plan of least memory" in text
    assert f"simulated {plain.simulated:,}; compiled in" in text
    assert "simulated" in text.splitlines()[-2 - len(found.curve)]
    found.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Alive at XLA&#x27;s peak" in page or "Alive at XLA's peak of plain training" in page
    assert plain.at_peak[0].instruction in page
    assert list(found.to_dataframe()["simulated"]) == [p.simulated for p in found.curve]


def test_without_compiling_the_bytes_are_simulated():
    found = ms.explain(_step(), X)
    assert found.xla and not found.compiled
    assert "simulated; XLA assigns more" in str(found).splitlines()[-1]


def test_steps_that_xla_compiles_as_they_run_have_simulated_bytes():
    @tf.function(autograph=False)
    def step(x, length):
        y = tf.reshape(x, [length, WIDTH])
        for w in _weights():
            y = tf.tanh(y @ w)
        return tf.gradients(tf.reduce_sum(y), _weights())

    with pytest.warns(PlanNote, match="budgets are simulated bytes"):
        found = ms.explain(step, X, tf.TensorSpec([], tf.int32), xla=True)
    assert found.xla and not found.compiled
