"""Treeverse: against its recurrence, action by action, and on graphs."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners import Interrupted, Limits
from memsaving_gradients.planners.chains import recursive
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.checker import check_schedule
from tests.helpers.graphs import GRAPHS, chain, residual_chain
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import examples


def fewest_advances(steps: int, slots: int) -> int:
    """Return Griewank's closed form of `least_advances` (1992)."""
    r = recursive.levels(steps, slots)
    return r * steps - math.comb(slots + r, slots + 1)


@cache
def least_advances(steps: int, slots: int) -> int:
    """Return the least advances by the recurrence, with the first checkpoint anywhere."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(
        first + least_advances(steps - first, slots - 1) + least_advances(first, slots)
        for first in range(1, steps)
    )


def followed(steps: int, slots: int) -> tuple[int, int]:
    """Follow the actions of `recursive.reversal` on state numbers. Return the advances and the most
    checkpoints."""
    kept, at, advanced, most = {0}, 0, 0, 1
    left = steps
    for kind, stage, _ in recursive.reversal(steps, slots):
        if kind == "backward":
            assert stage == left - 1 == at
            kept.discard(stage)
            left = stage
            continue
        if stage < at or at >= left:
            at = max(state for state in kept if state <= stage)
        from_kept = max(state for state in kept if state <= stage)
        at = max(at, from_kept) if at <= stage else from_kept
        advanced += stage - at
        at = stage
        if kind == "keep":
            kept.add(stage)
            most = max(most, len(kept))
    assert not left
    return advanced, most


@pytest.mark.parametrize("slots", range(1, 7))
def test_as_few_advances_as_the_recurrence_says(slots):
    for steps in range(1, 60):
        assert fewest_advances(steps, slots) == least_advances(steps, slots)
        advanced, most = followed(steps, slots)
        assert advanced == least_advances(steps, slots)
        assert most <= slots


@pytest.mark.parametrize(
    ("steps", "slots", "times"), [(10, 3, 2), (35, 3, 4), (36, 3, 5), (56, 3, 5), (252, 5, 5)]
)
def test_steps_that_so_many_checkpoints_reverse(steps, slots, times):
    # C(s + r, s) steps, none of which is advanced over more than r times (Griewank 1992).
    assert recursive.levels(steps, slots) == times
    assert math.comb(slots + times, slots) >= steps > math.comb(slots + times - 1, slots)


def test_a_chain_of_1024_in_the_memory_of_22():
    graph = chain([1] * 1024)
    proposal = recursive.plan(graph)
    check_schedule(graph, proposal.schedule)
    assert proposal.peak <= 22
    # The first sweep is the forward pass itself. The first value is as good as the input that it is
    # made of, and no op reads the last one.
    assert proposal.schedule.clones == fewest_advances(1022, 10) - 1021
    runs = Counter(step.op for step in proposal.schedule.steps if step.copy)
    assert max(runs.values()) <= recursive.levels(1024, 10)
    assert sum(runs.values()) == proposal.schedule.clones


def test_every_budget_of_a_chain():
    graph = chain([1] * 100)
    before = math.inf
    least = recursive.plan(graph, Limits(budget=1)).peak
    for budget in range(least, simulate(graph, plain(graph)).peak + 1):
        proposal = recursive.plan(graph, Limits(budget=budget))
        assert proposal.peak <= budget
        assert proposal.extra_seconds <= before
        before = proposal.extra_seconds
    assert before == 0
    assert least <= 6


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_made_by_hand(name):
    graph = GRAPHS[name]()
    most = simulate(graph, plain(graph)).peak
    for budget in (None, *(int(most * share) for share in (0.8, 0.5, 0.3))):
        proposal = recursive.plan(graph, Limits(budget=budget))
        check_schedule(graph, proposal.schedule)
        assert proposal.peak <= most


@given(rich(sums=True), st.floats(0.2, 1))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_any_graph(graph, share):
    most = simulate(graph, plain(graph)).peak
    proposal = recursive.plan(graph, Limits(budget=int(share * most)))
    checked = check_schedule(graph, proposal.schedule)
    assert proposal.extra_seconds == pytest.approx(checked.extra_seconds)


def test_deep_networks():
    graph = residual_chain(1000)
    proposal = recursive.plan(graph)
    check_schedule(graph, proposal.schedule)
    assert proposal.peak <= simulate(graph, plain(graph)).peak / 20


def test_an_interruption_leaves_the_best_so_far():
    graph = chain([1] * 100)
    calls = []

    def hook(share: float, what: str) -> None:
        calls.append((share, what))
        if len(calls) == 3:
            raise Interrupted

    proposal = recursive.plan(graph, Limits(budget=30, progress=hook))
    assert not proposal.complete
    assert len(calls) == 3
    check_schedule(graph, proposal.schedule)
