"""Segments of a budget and mirror counts: against the paper's bounds and a literal reading of its
Algorithm 2."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Interrupted, Limits, chen
from memsaving_gradients.planners.chains import mirror_counts
from memsaving_gradients.planners.proposal import Proposal, proposed
from memsaving_gradients.schedules.schedule import Schedule, Step, ordered, plain, recompute_lazily
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.graphs import GRAPHS, Maker, chain, two_states
from tests.helpers.sampling import examples


def valid(graph: TrainingGraph, schedule: Schedule) -> None:
    """Check that originals run once each, the forward ones in order, that ops read existing values,
    and that clones are numbered in order."""
    made: set[tuple[int, int]] = set()
    originals, clones = [], Counter()
    for step in schedule.steps:
        copies = step.reads or (0,) * len(graph.reads[step.op])
        for value, copy in zip(graph.reads[step.op], copies, strict=True):
            assert (value, copy) in made, f"{step} reads copy {copy} of {value} too early"
        if step.copy:
            clones[step.op] += 1
            assert step.copy == clones[step.op]
            assert step.op < graph.first_backward and graph.clonable[step.op]
        else:
            originals.append(step.op)
        made.update((value, step.copy) for value in graph.writes[step.op])
    assert sorted(originals) == list(range(graph.length))
    border = graph.first_backward
    assert originals[:border] == list(range(border))


def algorithm_2(graph: TrainingGraph, counts: dict[int, int]) -> list[tuple]:
    """Return the order of the paper's Algorithm 2, taken line by line, for forward ops of one value
    each: op, level, levels read."""
    border = graph.first_backward
    level = [counts.get(int(graph.storage[v]), 0) for v in range(border)]
    node = {v: (v, 0) for v in range(border)}
    pred = {(v, 0): [(u, 0) for u in graph.reads[v]] for v in range(border)}
    for k in range(1, max(level) + 1):
        for v in range(border):
            if k <= level[v]:
                node[v] = (v, k)
                pred[v, k] = [node[u] for u in graph.reads[v]]
    order = [(v, 0) for v in range(border)]
    seen = set(order)
    for op in range(border, graph.length):
        makers = (int(graph.producer[u]) for u in graph.reads[op])
        pred[op, 0] = [node.get(u, (u, 0)) for u in makers]
        ancestors, todo = set(), [(op, 0)]
        while todo:
            at = todo.pop()
            if at not in ancestors and at not in seen:
                ancestors.add(at)
                todo += pred[at]
        left = set(ancestors)
        while left:
            ready = min(n for n in left if not any(p in left for p in pred[n]))
            left.remove(ready)
            order.append(ready)
        seen |= ancestors
    return [(*n, tuple(k for _, k in pred[n])) for n in order]


def numbered_by_level(graph: TrainingGraph, counts: dict[int, int]) -> list[tuple]:
    """Return the library's schedule, its copies numbered by level: op, level, levels read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_counts, "without_idle", lambda _, schedule: schedule)
        steps = mirror_counts.scheduled(graph, counts, frozenset()).steps
    return [(s.op, s.copy, s.reads or (0,) * len(graph.reads[s.op])) for s in steps]


def mirrored(graph: TrainingGraph, counts: dict[int, int]) -> Schedule:
    return mirror_counts.scheduled(graph, counts, Limits().sums(graph))


def recursive(graph: TrainingGraph, k: int = 1) -> Proposal:
    """Return the plan of least memory by recursion: cuts within cuts, ``k`` at a time."""
    counts = mirror_counts.sectioned(graph, Limits(), k)
    return proposed(graph, Limits(), mirrored(graph, counts))


# --- Chains


@pytest.mark.parametrize("residual", ["inputs", "output"])
@pytest.mark.parametrize("n", [*range(1, 40), 50, 64, 99, 100, 101, 200, 400, 900, 1600])
def test_a_unit_chain_takes_two_roots_of_its_length(n, residual):
    graph = chain([1] * n, residual=residual, forwards=True)
    proposal = chen.plan(graph)
    # One more if n is no square, and one for an op that reads and writes at once.
    assert proposal.peak <= 2 * math.sqrt(n) + 2
    one_pass = graph.seconds[: graph.first_backward].sum()
    assert proposal.extra_seconds <= one_pass, "one extra forward pass"


@pytest.mark.parametrize("n", [9, 16, 25, 100, 400, 900, 1600])
def test_squares_take_no_more_than_the_papers_bound(n):
    assert chen.plan(chain([1] * n)).peak <= 2 * math.sqrt(n)


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_every_whole_budget_of_a_unit_chain(n):
    graph = chain([1] * n)
    least = chen.plan(graph, Limits(budget=0)).peak
    slower = math.inf
    for budget in range(n + 4):
        proposal = chen.plan(graph, Limits(budget=budget))
        valid(graph, proposal.schedule)
        assert simulate(graph, proposal.schedule).peak == proposal.peak
        if budget < least:
            assert proposal.peak == least
            continue
        assert proposal.peak <= budget
        assert proposal.extra_seconds <= slower, "a larger budget is slower"
        slower = proposal.extra_seconds
    assert slower == 0 and proposal.optimal


def test_two_tensors_a_cut():
    graph = two_states(100)
    assert chen.plan(graph).peak <= 4 * math.sqrt(100) + 6 < simulate(graph, plain(graph)).peak / 4


@pytest.mark.parametrize("n", [4, 16, 64, 256, 1024])
def test_recursion_takes_the_logarithm_of_a_unit_chain(n):
    graph = chain([1] * n)
    proposal = recursive(graph)
    valid(graph, proposal.schedule)
    assert proposal.peak <= math.log2(n) + 4
    assert proposal.schedule.clones <= n / 2 * math.log2(n)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_recursion_with_several_cuts_at_a_time(k):
    graph = chain([1] * 500)
    proposal = recursive(graph, k=k)
    valid(graph, proposal.schedule)
    levels = math.log(500, k + 1)
    assert proposal.peak <= k * levels + 4
    assert proposal.schedule.clones <= 500 * levels


# --- Algorithm 3


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 60), st.data())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_division_is_the_papers_loop(sizes, b, data):
    fit = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    held = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    temp = x = y = 0
    cuts = []
    for v, size in enumerate(sizes):
        temp += size
        if v in fit and temp > b:
            x, y, temp = x + 1, max(y, temp), 0
            cuts.append(v)
    found = chen.divide(np.array(held), np.ones(len(sizes), int), np.array(sorted(fit), int), b)
    assert found == chen.Division(tuple(cuts), x, max(y, temp))


# --- Mirror counts


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12), st.sampled_from(["inputs", "output"]))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_counts_of_chains_mean_what_algorithm_2_says(levels, residual):
    graph = chain([1] * len(levels), residual=residual)
    counts = dict(enumerate(levels, 1))
    seed = graph.first_backward  # it is made when it is read
    assert [n for n in numbered_by_level(graph, counts) if n[0] != seed] == [
        n for n in algorithm_2(graph, counts) if n[0] != seed
    ]
    valid(graph, mirrored(graph, counts))


@given(st.data())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_counts_of_networks_mean_what_algorithm_2_says(data):
    graph = data.draw(networks())
    counts = {v: data.draw(st.integers(0, 3)) for v in range(1, graph.first_backward)}
    assert sorted(numbered_by_level(graph, counts)) == sorted(algorithm_2(graph, counts))
    valid(graph, mirrored(graph, counts))


def runs_again(n: int, counts: dict[int, int]) -> list[int]:
    graph = chain([1] * n)
    clones = Counter(s.op for s in mirrored(graph, counts).steps if s.copy)
    return [clones[op] for op in range(1, n + 1)]


def test_a_count_of_two_recomputes_twice():
    # 4 is kept; 2 is the checkpoint of the first recomputation of 1 to 3.
    assert runs_again(5, {1: 2, 2: 1, 3: 2, 4: 0}) == [2, 1, 1, 0, 0]


def test_a_count_of_three_recomputes_three_times():
    # 8 is kept, 4 has one copy, 2 and 6 have copies of their own level.
    counts = {1: 3, 2: 2, 3: 3, 4: 1, 5: 3, 6: 2, 7: 3, 8: 0}
    assert runs_again(9, counts) == [3, 2, 2, 1, 2, 1, 1, 0, 0]


def test_no_counts_are_plain_training_and_ones_are_lazy_recomputation():
    for make in GRAPHS.values():
        graph = make()
        assert mirrored(graph, {}) == plain(graph)
        roots = set(graph.storage[graph.losable].tolist())
        kept = {s for s in roots if s % 3 == 0}
        ones = mirror_counts.scheduled(graph, dict.fromkeys(roots - kept, 1), frozenset())
        lazy = recompute_lazily(graph, kept)
        assert ones.steps == lazy.steps


@pytest.mark.parametrize("count", [-1, 1.5, True, 1000])
def test_counts_that_are_none(count):
    with pytest.raises(ArgumentError, match="how many times it may be recomputed"):
        mirror_counts.checked({1: count})
    with pytest.raises(ArgumentError, match="mirror="):
        chen.plan(chain([1] * 3), Limits(mirror={1: count}))


@pytest.mark.parametrize("budget", [None, 0, 12, 1000])
def test_the_planner_honors_counts(budget):
    graph = chain([1] * 30)
    limits = Limits(keep={20: "asked for"}, budget=budget, mirror={7: 0, 8: 1, 9: 0, 20: 2})
    proposal = chen.plan(graph, limits)
    valid(graph, proposal.schedule)
    clones = Counter(s.op for s in proposal.schedule.steps if s.copy)
    assert clones[7] == clones[9] == clones[20] == 0 < clones[8]


# --- Any network


@st.composite
def networks(draw: st.DrawFn) -> TrainingGraph:
    make = Maker()
    values = [make.op(make.source(), size=4)]
    for _ in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=3, unique=True))
        values.append(
            make.op(
                *reads,
                size=draw(st.sampled_from([1, 4, 9])),
                residual=draw(st.sampled_from(["inputs", "output", "both", "none"])),
                expensive=draw(st.booleans()),
                forwards=draw(st.booleans()),
            )
        )
    make.op(*values[-2:], size=1)
    return make.graph()


@given(networks(), st.floats(0, 1.1), st.floats(0, 1.1))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_budgets_are_kept_and_more_is_never_slower(graph, one, other):
    # Take the peak of the plans' order. There, gradients of penalties come when they are due, which
    # may take more than plain training.
    most = simulate(graph, ordered(graph, graph.sums)).peak
    least = chen.plan(graph, Limits(budget=0)).peak
    tight, loose = sorted(int(most * share) for share in (one, other))
    first, second = (chen.plan(graph, Limits(budget=b)) for b in (tight, loose))
    for budget, proposal in ((tight, first), (loose, second)):
        valid(graph, proposal.schedule)
        assert simulate(graph, proposal.schedule).peak == proposal.peak
        assert proposal.peak <= max(budget, least)
    if tight >= least:
        assert second.extra_seconds <= first.extra_seconds
    assert chen.plan(graph, Limits(budget=most)).extra_seconds == 0
    assert chen.plan(graph, Limits(budget=tight)).schedule == first.schedule
    assert chen.plan(graph).peak <= most


@pytest.mark.parametrize("name", GRAPHS)
def test_hand_made_graphs(name):
    graph = GRAPHS[name]()
    most = simulate(graph, plain(graph)).peak
    for limits in (Limits(), Limits(budget=most // 2), Limits(budget=most // 4)):
        proposal = chen.plan(graph, limits)
        valid(graph, proposal.schedule)
        assert proposal.peak <= most
        assert proposal.schedule == chen.plan(GRAPHS[name](), limits).schedule
    valid(graph, recursive(graph).schedule)


def test_what_is_asked_for_stays():
    graph = chain([1] * 40)
    for budget in (None, 9, 15, 30):
        proposal = chen.plan(graph, Limits({13: "asked for"}, budget=budget))
        assert 13 in proposal.reasons
        assert not any(s.copy and s.op == 13 for s in proposal.schedule.steps)


def test_cuts_part_no_fused_pair():
    graph = chain([1] * 40)
    fuses = graph.fuses.copy()
    fuses[10:20] = True
    graph = replace(graph, fuses=fuses, reads=[*graph.reads])
    proposal = chen.plan(graph)
    valid(graph, proposal.schedule)


# --- Limits


def test_an_interrupted_search_returns_the_best_so_far():
    graph = chain([1] * 60)
    seen = []

    def stop(share: float, what: str) -> None:
        seen.append(share)
        if len(seen) == 5:
            raise Interrupted

    proposal = chen.plan(graph, Limits(budget=20, progress=stop))
    assert not proposal.complete and len(seen) == 5 and seen == sorted(seen)
    valid(graph, proposal.schedule)
    assert not chen.plan(graph, Limits(seconds=0.0)).complete
    assert chen.plan(graph, Limits(seconds=60.0)).complete


def test_steps_of_algorithm_2_by_hand():
    graph = chain([1, 1, 1])
    steps = mirrored(graph, {1: 2, 2: 1}).steps
    assert steps[4:] == (
        Step(1, 1, (0,)),
        Step(2, 1, (1,)),
        Step(4),
        Step(5, 0, (0, 1)),
        Step(1, 2, (0,)),
        Step(6, 0, (0, 2)),
    )
