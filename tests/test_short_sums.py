"""Short sums stay chains only where room is scarce."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.planners import Limits
from memsaving_gradients.planners.proposal import proposed
from memsaving_gradients.planners.short_sums import left_alone
from memsaving_gradients.schedule import ordered, plain, simulate
from memsaving_gradients.training_graph import LONG_SUM
from tests.random_graphs import rich
from tests.schedules import forgetful
from tests.support import normalized_network


@given(rich(sums=True), st.integers(0, 2**32), st.floats(0.5, 2))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_budget_is_kept_and_nothing_else_changes(graph, seed, share) -> None:
    proposal = proposed(graph, Limits(), forgetful(graph, seed, chained=True))
    for budget in (int(share * proposal.peak), None):
        found = left_alone(graph, proposal, budget)
        assert found.peak <= max(budget or 0, proposal.peak)
        assert found.peak == simulate(graph, found.schedule).peak
        assert found.schedule.steps == proposal.schedule.steps
        assert found.extra_seconds == proposal.extra_seconds
        assert found.schedule.chained <= proposal.schedule.chained
        gone = proposal.schedule.chained - found.schedule.chained
        assert all(len(graph.sums[op]) < LONG_SUM for op in gone)


@given(rich(sums=True))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_with_room_for_all_none_is_a_chain(graph) -> None:
    proposal = proposed(graph, Limits(), ordered(graph, graph.sums))
    short = {op for op in graph.sums if len(graph.sums[op]) < LONG_SUM}
    room = simulate(graph, plain(graph)).peak + proposal.peak + int(graph.size.max(initial=0))
    assert not left_alone(graph, proposal, room).schedule.chained & short


def chains(budget: float) -> int:
    """How many sums of a normalized network become chains within a budget."""
    with tf.Graph().as_default() as graph:
        x, y = normalized_network()
        ms.gradients(y, x, budget=budget)
    return len(ms.plans(graph)[-1].schedule.chained)


def test_fewer_chains_within_more_memory() -> None:
    # There are six sums of three addends.
    assert chains(0.9) < chains(0.4) <= 6
