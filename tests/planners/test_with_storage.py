"""Plans that store values: on random graphs, against an independent reader of schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Limits, auto, keep, least_memory
from memsaving_gradients.planners.with_storage import planner_that_stores, store
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.storage import Stored
from memsaving_gradients.schedules.validation import problem_of
from tests.helpers.checker import check_schedule
from tests.helpers.graphs import chain, residual_chain
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import examples


def storable(graph, share: float = 0.5, seconds: float = 0.1):
    """Return ``graph`` with every residual that is an op's only result storable."""
    ways = {}
    for value in graph.residuals:
        op = int(graph.producer[value])
        if graph.size[value] and len(graph.writes[op]) == 1:
            kept = int(graph.size[value] * share)
            ways[op] = (Stored(value, "bfloat16" if share else "offload", kept, seconds, seconds),)
    return dataclasses.replace(graph, storable=ways)


@settings(max_examples=examples(100), deadline=None)
@given(rich(sums=True), st.sampled_from([0.0, 0.25, 0.5]), st.data())
def test_any_schedule_with_anything_stored_is_valid(graph, share, data):
    graph = storable(graph, share)
    kept = data.draw(st.sets(st.sampled_from(sorted(graph.residuals) or [0])))
    base = data.draw(
        st.sampled_from(
            [
                plain(graph),
                least_memory.plan(graph, Limits()).schedule,
                least_memory.plan(graph, Limits(keep=dict.fromkeys(kept, ""))).schedule,
            ]
        )
    )
    ways = [ways[0] for ways in graph.storable.values()]
    chosen = data.draw(st.lists(st.sampled_from(ways), unique=True)) if ways else []
    schedule = store(graph, base, chosen)
    checked = check_schedule(graph, schedule)
    simulation = simulate(graph, schedule)
    assert problem_of(graph, schedule) is None
    assert simulation.extra_seconds == pytest.approx(checked.extra_seconds)
    assert simulation.peak <= checked.peak or schedule.chained
    assert {how.value for how in schedule.stored.values()} <= {how.value for how in chosen}
    # No op of the backward pass reads the original of a stored value.
    gone = {how.value for how in schedule.stored.values()}
    for step in schedule.steps[graph.first_backward :]:
        if step.copy and step.op in schedule.stored:
            continue
        reads = step.reads or (0,) * len(graph.reads[step.op])
        for value, copy in zip(graph.reads[step.op], reads, strict=True):
            assert copy or graph.storage[value] not in gone


@settings(max_examples=examples(12), deadline=None)
@given(rich(most=8), st.floats(0.3, 1.0), st.sampled_from([0.0, 0.5]))
def test_never_slower_than_either(graph, part, share):
    graph = storable(graph, share)
    budget = max(1, int(simulate(graph, plain(graph)).peak * part))
    limits = Limits(budget=budget)
    both = planner_that_stores(auto.plan)(graph, limits)
    check_schedule(graph, both.schedule)
    for alone in (auto.plan(graph, limits), planner_that_stores(keep.plan)(graph, limits)):
        if alone.peak <= budget:
            assert both.peak <= budget
            assert both.extra_seconds <= alone.extra_seconds * (1 + 1e-9) + 1e-12


@settings(max_examples=examples(12), deadline=None)
@given(rich(most=8), st.floats(0.3, 1.0))
def test_nothing_is_recomputed_from_what_has_lost_digits(graph, part):
    graph = storable(graph, 0.5)
    budget = max(1, int(simulate(graph, plain(graph)).peak * part))
    schedule = planner_that_stores(auto.plan)(graph, Limits(budget=budget)).schedule
    lost = {how.value for how in schedule.stored.values() if how.means != "offload"}
    for step in schedule.steps:
        looks = all(graph.storage[v] != v for v in graph.writes[step.op])
        if step.copy and step.op not in schedule.stored and not looks:
            assert lost.isdisjoint(graph.storage[v] for v in graph.reads[step.op])


def test_what_must_not_run_twice_may_be_stored():
    graph = chain([8] * 24)
    graph = storable(dataclasses.replace(graph, clonable=np.zeros_like(graph.clonable)), 0.0)
    budget = simulate(graph, plain(graph)).peak // 2
    assert auto.plan(graph, Limits(budget=budget)).peak > budget
    found = planner_that_stores(auto.plan)(graph, Limits(budget=budget))
    assert found.peak <= budget and found.schedule.stored
    check_schedule(graph, found.schedule)


def test_without_a_budget_as_much_is_stored_as_lowers_the_peak():
    graph = storable(chain([8] * 24))
    base = keep.plan(graph, Limits())
    found = planner_that_stores(keep.plan)(graph, Limits())
    assert found.peak < 0.7 * base.peak and not found.schedule.clones
    assert found.extra_seconds == pytest.approx(0.2 * len(found.schedule.stored))


def test_hybrid_is_faster_than_both():
    """Storing is expensive for half of the chain, recomputing for the other half."""
    graph = chain([8] * 32)
    dear = np.where(np.arange(graph.length) < 16, 5.0, 0.1)
    graph = storable(dataclasses.replace(graph, seconds=dear), 0.0)
    ways = {
        op: (ways[0]._replace(store_seconds=s, load_seconds=s),)
        for op, ways in graph.storable.items()
        for s in [0.1 if op < 16 else 5.0]
    }
    graph = dataclasses.replace(graph, storable=ways)
    budget = int(simulate(graph, plain(graph)).peak * 0.4)
    both = planner_that_stores(auto.plan)(graph, Limits(budget=budget))
    stored = planner_that_stores(keep.plan)(graph, Limits(budget=budget))
    again = auto.plan(graph, Limits(budget=budget))
    assert both.peak <= budget
    assert both.extra_seconds < 0.9 * min(
        p.extra_seconds for p in (stored, again) if p.peak <= budget
    )


def test_a_slow_link_is_helped_by_encoding():
    """If transfers cannot be hidden, the plan encodes some values instead."""
    graph = storable(chain([8] * 32), 0.0)
    ways = {
        op: (
            how._replace(store_seconds=0.0, load_seconds=0.0, moving_seconds=3.0),
            how._replace(means="bfloat16", bytes=2, store_seconds=0.2, load_seconds=0.2),
        )
        for op, (how,) in graph.storable.items()
    }
    graph = dataclasses.replace(graph, storable=ways)
    budget = int(simulate(graph, plain(graph)).peak * 0.5)

    def seconds(which):
        offered = {op: tuple(both[k] for k in which) for op, both in ways.items()}
        found = planner_that_stores(keep.plan)(
            dataclasses.replace(graph, storable=offered), Limits(budget=budget)
        )
        means = {how.means for how in found.schedule.stored.values()}
        return found.extra_seconds if found.peak <= budget else np.inf, means

    both, means = seconds((0, 1))
    assert means == {"offload", "bfloat16"}
    assert both < min(seconds((0,))[0], seconds((1,))[0])


def test_a_value_read_twice_far_apart_is_loaded_twice():
    graph = residual_chain(12)
    graph = storable(graph, 0.0)
    schedule = store(graph, plain(graph), [ways[0] for ways in graph.storable.values()])
    loads = [step.op for step in schedule.steps if step.copy]
    assert len(loads) >= len(set(loads)) == len(schedule.stored)
    check_schedule(graph, schedule)


def test_a_planner_that_returns_nothing():
    graph = storable(chain([8] * 4))
    for limits in (Limits(), Limits(budget=1)):
        with pytest.raises(ArgumentError, match="lambda.*returned a NoneType; return a Proposal"):
            planner_that_stores(lambda graph, limits: None)(graph, limits)


def test_validity_knows_what_is_stored():
    graph = storable(chain([8] * 4))
    op, (how,) = next(iter(graph.storable.items()))
    good = store(graph, plain(graph), [how])
    assert problem_of(graph, good) is None
    bad = dataclasses.replace(good, stored={op: how._replace(value=how.value + 1)})
    assert "stored value" in (problem_of(graph, bad) or "")
