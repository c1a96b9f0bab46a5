"""Short sums stay chains only where room is scarce."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.planners import Limits
from memsaving_gradients.planners.proposal import proposed
from memsaving_gradients.planners.short_sums import left_alone
from memsaving_gradients.schedules.order import LONG_SUM
from memsaving_gradients.schedules.schedule import ordered, plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import examples
from tests.helpers.schedules import forgetful
from tests.helpers.support import normalized_network, session_config

v1 = tf.compat.v1


@given(rich(sums=True), st.integers(0, 2**32), st.floats(0.5, 2))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
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
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_with_room_for_all_none_is_a_chain(graph) -> None:
    proposal = proposed(graph, Limits(), ordered(graph, graph.sums))
    short = {op for op in graph.sums if len(graph.sums[op]) < LONG_SUM}
    room = simulate(graph, plain(graph)).peak + proposal.peak + int(graph.size.max(initial=0))
    assert not left_alone(graph, proposal, room).schedule.chained & short


def chains(budget: float, planner: str) -> int:
    """Return how many sums of a normalized network become chains within a budget."""
    with tf.Graph().as_default() as graph:
        x, y = normalized_network()
        ms.gradients(y, x, budget=budget, planner=planner)
    return len(ms.plans(graph)[-1].schedule.chained)


@pytest.mark.parametrize("planner", ["chain", pytest.param("auto", marks=pytest.mark.slow)])
def test_fewer_chains_within_more_memory(planner) -> None:
    # There are six sums of three addends.
    assert chains(0.9, planner) < chains(0.4, planner) <= 6


def variables_of_sums(**options) -> int:
    """Return how many sums grappler makes variables of in a session; ops read a weight of 208 MiB
    until the gradients are there."""
    with tf.Graph().as_default() as graph:
        large = v1.get_variable("large", [6656, 8192], use_resource=True)
        x, y = normalized_network(16)
        y += tf.reduce_sum(tf.linalg.matvec(large, tf.reshape(x[:128], [8192])))
        found = ms.gradients(y, x, budget=0.8, **options)
        fed = [op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder"]
        metadata = v1.RunMetadata()
        with v1.Session(config=session_config()) as session:
            session.run(v1.variables_initializer([large]))
            session.run(
                [found, y],
                {one: np.ones(one.shape, np.float32) for one in fed},
                options=v1.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    (optimized,) = metadata.partition_graphs
    return sum(node.op == "TemporaryVariable" for node in optimized.node)


def test_grappler_makes_variables_of_no_sums_of_large_graphs() -> None:
    """A variable would add in the order in which addends come."""
    assert variables_of_sums() == 0


def test_grappler_makes_variables_of_sums_that_are_left_to_it() -> None:
    assert variables_of_sums(accumulate=False) > 0
