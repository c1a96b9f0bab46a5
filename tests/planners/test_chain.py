"""Plans of graphs as chains of stages: valid, within their budgets, monotone, and as good as known
figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners import Interrupted, Limits, least_memory
from memsaving_gradients.planners.chains import chain
from memsaving_gradients.planners.chains.stages import cut_stages
from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.graphs import GRAPHS, Maker, residual_chain, two_states, u_shape
from tests.helpers.graphs import chain as unit_chain
from tests.helpers.sampling import examples


def check(graph: TrainingGraph, schedule) -> None:
    """Check the schedule: originals run once, in order; inputs exist; clones are allowed."""
    made: set[tuple[int, int]] = set()
    ran: set[tuple[int, int]] = set()
    for step in schedule.steps:
        copies = step.reads or (0,) * len(graph.reads[step.op])
        for value, copy in zip(graph.reads[step.op], copies, strict=True):
            assert (value, copy) in made, f"{step} reads copy {copy} of {value}"
        assert (step.op, step.copy) not in ran
        ran.add((step.op, step.copy))
        if step.copy:
            assert step.op < graph.first_backward
            assert graph.clonable[step.op]
            assert (step.op, step.copy - 1) in ran
        made.update((value, step.copy) for value in graph.writes[step.op])
    assert [step.op for step in schedule.steps if not step.copy] == run_order(graph)


def budgets_of(graph: TrainingGraph, count: int = 6) -> list[int]:
    """Return budgets from more than plain training needs down to nothing."""
    most = simulate(graph, plain(graph)).peak
    return [round(most * (1.1 - 1.1 * k / count)) for k in range(count + 1)]


def plans(graph: TrainingGraph, budgets):
    return [chain.plan(graph, Limits(budget=b)) for b in budgets]


def check_budgets(graph: TrainingGraph, count: int = 6) -> None:
    """Check that every plan is valid, that it is within its budget if possible, and that more
    memory never takes more time."""
    least = chain.plan(graph)
    check(graph, least.schedule)
    budgets = sorted({*budgets_of(graph, count), least.peak}, reverse=True)
    before = 0.0
    for budget, proposal in zip(budgets, plans(graph, budgets), strict=True):
        check(graph, proposal.schedule)
        result = simulate(graph, proposal.schedule)
        assert (proposal.peak, proposal.extra_seconds) == (result.peak, result.extra_seconds)
        if budget < least.peak:
            assert proposal.peak <= least.peak
            continue
        assert proposal.peak <= budget
        assert proposal.extra_seconds >= before
        before = proposal.extra_seconds


def shuffled(graph: TrainingGraph, seed: int) -> TrainingGraph:
    """Return the graph with its backward ops in another topological order."""
    draw = random.Random(seed)
    border = graph.first_backward
    waiting = {
        op: {int(graph.producer[v]) for v in graph.reads[op] if graph.producer[v] >= border}
        for op in range(border, graph.length)
    }
    order = list(range(border))
    while waiting:
        ready = sorted(op for op, needs in waiting.items() if needs.isdisjoint(waiting))
        order.append(draw.choice(ready))
        del waiting[order[-1]]
    number = {op: k for k, op in enumerate(order)}
    flags = ("clonable", "joins", "forwards", "fuses", "seconds", "expensive")
    return replace(
        graph,
        reads=[graph.reads[op] for op in order],
        writes=[graph.writes[op] for op in order],
        producer=np.array([number[op] for op in graph.producer.tolist()], np.int64),
        **{name: getattr(graph, name)[order] for name in flags},
    )


@st.composite
def networks(draw) -> TrainingGraph:
    """Draw ops with recent or far inputs; views, joins, several outputs, draws, several losses."""
    make = Maker(forwards=draw(st.booleans()))
    values = [make.op(make.source(), size=4)]
    sizes = {values[0]: 4}
    losses = []
    for _ in range(draw(st.integers(1, 24))):
        near = st.integers(max(0, len(values) - 3), len(values) - 1)
        index = draw(
            st.lists(st.one_of(near, st.integers(0, len(values) - 1)), min_size=1, max_size=3)
        )
        reads = tuple(dict.fromkeys(values[k] for k in index))
        what = draw(st.sampled_from(["op"] * 6 + ["view", "join", "two", "draw", "loss"]))
        size = draw(st.sampled_from([1, 4, 4, 4, 9, 30]))
        residual = draw(st.sampled_from(["inputs", "output", "both", "none"]))
        if what == "view":
            size = sizes[reads[0]]
            new = make.op(reads[0], size=size, view=True, residual="none")
        elif what == "join":
            size = sum(sizes[r] for r in reads)
            new = make.op(*reads, size=size, joins=True, residual="none")
        elif what == "two":
            new = make.op(*reads, size=(size, 3))
            sizes[new + 1] = 3
            values.append(new + 1)
        elif what == "loss":
            losses.append(make.op(*reads, size=1, residual=residual))
            continue
        else:
            expensive = draw(st.booleans())
            new = make.op(
                *reads, size=size, residual=residual, clonable=what == "op", expensive=expensive
            )
        sizes[new] = size
        values.append(new)
    make.op(*losses, *values[-2:], size=1)
    return make.graph(hold=draw(st.booleans()))


# --- Every graph


@pytest.mark.parametrize("name", GRAPHS)
def test_plans_are_valid_within_the_budget_and_faster_with_more(name):
    check_budgets(GRAPHS[name]())


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_where_few_plans_can_be_simulated(name, monkeypatch):
    monkeypatch.setattr(chain, "MANY_TRIALS", chain.TRIALS.most + 1)
    check_budgets(GRAPHS[name]())


def test_the_least_is_found_from_any_budget(monkeypatch):
    graph = unit_chain([1 + k % 3 for k in range(60)])
    least = chain.plan(graph).peak
    monkeypatch.setattr(chain, "MANY_TRIALS", chain.TRIALS.most + 1)
    for budget in (1, least // 2, least - 1):
        assert chain.plan(graph, Limits(budget=budget)).peak <= 1.1 * least
    assert chain.plan(graph, Limits(budget=least + 1)).peak <= least + 1


def test_every_budget_of_a_chain():
    graph = unit_chain([1 + 7 * (k % 5 == 0) + k % 3 for k in range(20)])
    check_budgets(graph, simulate(graph, plain(graph)).peak)


@given(networks())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_random_networks(graph):
    check_budgets(graph, 4)


@given(networks(), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_random_networks_with_backward_ops_in_any_order(graph, seed):
    check_budgets(shuffled(graph, seed), 3)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_least_peak_is_no_higher_than_with_one_recomputation(name):
    graph = GRAPHS[name]()
    once = least_memory.plan(graph)
    most = int(graph.size.max())
    assert chain.plan(graph).peak <= once.peak
    # The values that a cut keeps die when backward reaches the cut, though the stage before it may
    # read them, too.
    same = chain.plan(graph, Limits(budget=once.peak + most))
    assert same.extra_seconds <= 1.2 * once.extra_seconds


@pytest.mark.parametrize("name", ["chain", "u", "growing", "draws"])
def test_the_same_graph_gives_the_same_plan(name):
    peak = simulate(GRAPHS[name](), plain(GRAPHS[name]())).peak
    first, second = (chain.plan(GRAPHS[name](), Limits(budget=peak // 2)) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.reasons == second.reasons


# --- Known figures


@pytest.mark.parametrize(
    ("units", "extra"), [(50, 51), (30, 71), (20, 81), (16, 85), (12, 124), (10, 147), (8, 184)]
)
def test_a_chain_of_a_hundred(units, extra):
    proposal = chain.plan(unit_chain([1] * 100), Limits(budget=units))
    assert proposal.peak <= units
    assert proposal.extra_seconds <= extra


@pytest.mark.parametrize(
    ("length", "units"), [(200, 12), pytest.param(1024, 24, marks=pytest.mark.slow)]
)
def test_long_chains_fit_a_few_units(length, units):
    graph = unit_chain([1] * length)
    proposal = chain.plan(graph, Limits(budget=units))
    check(graph, proposal.schedule)
    assert proposal.peak <= units
    # On average, each op runs at most twice more.
    assert math.comb(units + 2, 2) < length <= math.comb(units + 3, 3)
    assert proposal.extra_seconds <= 2 * length
    runs: dict[int, int] = {}
    for step in proposal.schedule.steps:
        runs[step.op] = max(runs.get(step.op, 0), step.copy)
    assert max(runs.values()) >= 2


def test_residual_networks_keep_only_the_stream():
    graph = residual_chain(100)
    once = least_memory.plan(graph)
    proposal = chain.plan(graph, Limits(budget=10))
    assert proposal.peak <= 10 < once.peak
    assert proposal.extra_seconds <= 2.5 * once.extra_seconds


def test_two_states_are_cut_at_two_tensors():
    widths = [len(i) for i in cut_stages(two_states(20)).inputs]
    # Between the two ops of a step, both of its inputs and its first output are alive.
    assert max(widths) == 3
    assert widths.count(2) >= 15
    assert chain.plan(two_states(100)).peak <= 12


def test_skips_across_stages_are_kept_once():
    graph = u_shape(6)
    stages = cut_stages(graph)
    added = stages.chain.added
    sizes = [sum(int(graph.size[s]) for s in i) for i in stages.inputs]
    # At the bottom of the net, inputs share the skips, and add less than their own bytes.
    assert any(0 < added[s, s + 1] < sizes[s + 1] for s in range(1, stages.chain.length - 1))
    for s in range(stages.chain.length):
        for j in range(s + 1, stages.chain.length):
            new = set(stages.inputs[j]) - set(stages.inputs[s])
            pinned = added[0, j] - sizes[j] - (added[0, s] - sizes[s] if s else 0)
            assert added[s, j] == sum(int(graph.size[v]) for v in new) + pinned


def test_what_is_made_for_a_loss_in_the_middle_is_not_made_twice_for_little():
    make = Maker()
    at = make.op(make.source(), size=8)
    side = None
    for k in range(40):
        at = make.op(at, size=8)
        if k == 20:
            head = make.op(at, size=2)
            side = make.op(head, size=1)
    make.op(at, side, size=1)
    graph = make.graph()
    # The head's backward ops come first, as they may in a graph of TensorFlow's.
    heads = [op for op in range(graph.first_backward, graph.length) if head in graph.reads[op]]
    assert heads
    check_budgets(shuffled(graph, 1))


def test_less_than_the_whole_history_is_an_option():
    make = Maker()
    at = make.op(make.source(), size=16)
    for _ in range(12):
        inner = make.op(at, size=16, expensive=True)
        for _ in range(4):
            inner = make.op(inner, size=16)
        at = make.op(at, inner, size=16, residual="none")
    make.op(at, size=1)
    graph = make.graph()
    stages = cut_stages(graph, most=12)
    assert stages.chain.saved.shape[1] >= 3
    everything = simulate(graph, plain(graph)).peak
    proposal = chain.plan(graph, Limits(budget=round(everything * 0.6)))
    # The plan recomputes cheap ops, and no expensive ones.
    again = {step.op for step in proposal.schedule.steps if step.copy}
    assert again
    assert not any(graph.expensive[op] for op in again)


# --- Limits


def test_what_has_to_be_kept_is_kept():
    graph = unit_chain([1] * 30)
    proposal = chain.plan(graph, Limits({5: "asked for", 17: "asked for"}, budget=8))
    again = {step.op for step in proposal.schedule.steps if step.copy}
    assert again
    assert not again & {int(graph.producer[5]), int(graph.producer[17])}
    assert {5, 17} <= set(proposal.reasons)


def test_workspaces_count():
    graph = unit_chain([1] * 30)
    wide = replace(graph, workspace=np.where(np.arange(graph.length) < graph.first_backward, 7, 0))
    stages, wider = cut_stages(graph), cut_stages(wide)
    assert (wider.chain.running[0, 1:-2] == stages.chain.running[0, 1:-2] + 7).all()


def test_a_plan_can_be_interrupted():
    graph = unit_chain([1] * 200)
    seen = []

    def stop(share: float, what: str) -> None:
        seen.append(share)
        if len(seen) > 5:
            raise Interrupted

    proposal = chain.plan(graph, Limits(budget=20, progress=stop))
    assert not proposal.complete
    check(graph, proposal.schedule)
    assert seen == sorted(seen)
    assert not chain.plan(graph, Limits(budget=20, seconds=0.0)).complete


def test_candidates_go_from_much_memory_to_little():
    graph = unit_chain([1] * 60)
    results = [simulate(graph, schedule) for schedule in chain.candidates(graph)]
    peaks = [result.peak for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert (peaks[0], results[0].extra_seconds) == (61, 0.0)
    assert peaks[-1] <= 4
    assert len(set(peaks)) > 20
