"""The modelled order of TensorFlow's executor: what is ready runs, and the planner's order is not asked."""

from __future__ import annotations

import pytest

from memsaving_gradients.executor import as_executed, forward_order
from memsaving_gradients.planners import least_memory
from memsaving_gradients.schedule import plain, simulate
from tests.graphs import GRAPHS, Maker, chain


def recurrence(steps: int):
    """State after state, each from the one before and a product with an input; all inputs come at once."""
    make = Maker()
    first = make.op(make.source(), size=(1,) * steps)
    state = make.op(make.source())
    for k in range(steps):
        state = make.op(state, make.op(first + k, size=4), size=1)
    return make.graph()


@pytest.mark.parametrize("name", GRAPHS)
def test_every_op_runs_once_and_after_what_it_reads(name):
    graph = GRAPHS[name]()
    order = forward_order(graph)
    assert sorted(order) == list(range(graph.first_backward))
    place = {op: k for k, op in enumerate(order)}
    for op in order:
        assert all(place[int(graph.producer[v])] < place[op] for v in graph.reads[op])


def test_a_chain_has_one_order():
    assert forward_order(chain([1] * 30)) == list(range(31))


def test_what_is_ready_from_the_start_runs_at_the_start():
    graph = recurrence(10)
    order = forward_order(graph)
    place = {op: k for k, op in enumerate(order)}
    products = [op for op in order if graph.size[graph.writes[op][0]] == 4]
    assert len(products) == 10
    states = [op for op in order if len(graph.reads[op]) == 2]
    assert max(place[op] for op in products) < place[states[2]]


def test_the_simulation_holds_what_ran_early():
    graph = recurrence(40)
    schedule = least_memory.plan(graph).schedule
    run = as_executed(schedule, forward_order(graph))
    assert sorted(run.steps) == sorted(schedule.steps)
    assert run.steps[graph.first_backward :] == schedule.steps[graph.first_backward :]
    assert simulate(graph, run).peak >= 39 * 4 > simulate(graph, schedule).peak
    before = as_executed(plain(graph), forward_order(graph))
    assert simulate(graph, before).peak == simulate(graph, plain(graph)).peak
