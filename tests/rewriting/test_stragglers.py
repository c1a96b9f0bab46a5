"""The ops that a gate waits for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.rewriting.backends.stragglers import Stragglers
from memsaving_gradients.schedules.schedule import Schedule, recompute_lazily
from memsaving_gradients.schedules.simulate import Simulation, simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.graphs import Maker

v1 = tf.compat.v1


def layers() -> tuple[TrainingGraph, int, int]:
    """Return a chain and two of its backward ops: one whose result no op reads, and one whose
    result another op reads."""
    make = Maker()
    at = make.op(make.source(), size=4)
    for _ in range(3):
        at = make.op(at, make.source(), size=4)
    graph = make.graph()
    read = {v for values in graph.reads for v in values}
    leaves = [
        op for op in range(graph.first_backward, graph.length) if read.isdisjoint(graph.writes[op])
    ]
    inner = next(op for op in range(graph.first_backward, graph.length) if op not in leaves)
    return graph, leaves[0], inner


def with_room(graph: TrainingGraph, room: int) -> tuple[Schedule, Simulation, tuple[int, int]]:
    """Return a schedule, its simulation with ``room`` bytes below the peak wherever there are
    clones, and its first clone."""
    schedule = recompute_lazily(graph, set())
    simulation = simulate(graph, schedule)
    first = next(k for k, step in enumerate(schedule.steps) if step.copy)
    alive = np.full(len(schedule.steps), 100 - room)
    alive[0] = 100
    simulation = dataclasses.replace(simulation, bytes_alive=alive, peak=100)
    return schedule, simulation, schedule.steps[first][:2]


@pytest.mark.parametrize(("room", "is_left"), [(50, True), (3, False)])
def test_what_has_room_may_finish_later(room, is_left):
    graph, leaf, inner = layers()
    schedule, simulation, clone = with_room(graph, room)
    stragglers = Stragglers(graph, schedule, simulation, {})
    assert stragglers.waited_for([inner, leaf], clone) == ([inner] if is_left else [inner, leaf])
    # The next gate waits for the leaf.
    after = stragglers.waited_for([inner], (0, 99))
    assert after == ([leaf, inner] if is_left else [inner])


def test_what_others_read_is_waited_for():
    graph, _, inner = layers()
    schedule, simulation, clone = with_room(graph, 50)
    stragglers = Stragglers(graph, schedule, simulation, {})
    assert stragglers.waited_for([inner, inner], clone) == [inner] * 2


def test_a_gate_waits_for_something():
    graph, leaf, _ = layers()
    schedule, simulation, clone = with_room(graph, 50)
    assert Stragglers(graph, schedule, simulation, {}).waited_for([leaf], clone) == [leaf]


def waited_for_by() -> list[int | None]:
    """Return the number of the gate that waits for each weight's gradient in a tower."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [64, 64])
        weights = [v1.get_variable(f"w{k}", [64, 64], use_resource=True) for k in range(24)]
        ys = [x]
        for weight in weights:
            ys.append(tf.tanh(ys[-1] @ weight))
        # The peak is in the last, long segment; the others have room below it.
        grads = ms.gradients(tf.reduce_sum(ys[-1]), weights, checkpoints=[ys[4], ys[8]])
        gates = [op for op in graph.get_operations() if op.name.endswith("_gate")]
    waits = {op: number for number, gate in enumerate(gates) for op in gate.control_inputs}
    return [waits.get(grad.op) for grad in grads]


def test_gradients_of_weights_run_beside_clones(monkeypatch):
    late = waited_for_by()
    monkeypatch.setattr(Stragglers, "waited_for", lambda self, ops, clone: list(ops))
    in_time = waited_for_by()
    pairs = [(a, b) for a, b in zip(in_time, late, strict=True) if a is not None]
    assert all(b is None or b in (a, a + 1) for a, b in pairs)
    assert any(b != a for a, b in pairs)


@pytest.mark.parametrize("budget", [0.6, 0.4])
def test_budgets_are_kept_with_stragglers(budget):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [256, 64])
        y = x
        for k in range(30):
            y = tf.tanh(y @ v1.get_variable(f"w{k}", [64, 64], use_resource=True))
        ms.gradients(tf.reduce_sum(y), v1.trainable_variables(), budget=budget)
        (plan,) = ms.plans(graph)
    assert plan.allocated <= plan.budget
