"""`simulate` and an independent reader agree on schedules in which ops are recomputed several
times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners.with_storage import store
from memsaving_gradients.schedules.schedule import Schedule, Step, plain, recompute_lazily
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.storage import Stored
from tests.helpers.checker import check_schedule, naive_peak
from tests.helpers.graphs import GRAPHS, Maker, chain
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import examples
from tests.helpers.schedules import forgetful, halving
from tests.helpers.step_by_step import recompute_op_by_op, simulate_step_by_step


@st.composite
def graphs(draw):
    """Draw forward ops (views, several outputs, ops that must run once) and their backward ops."""
    make = Maker()
    values = [make.op(make.source(), size=draw(st.integers(1, 9)))]
    for _ in range(draw(st.integers(1, 14))):
        read = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        kind = draw(st.sampled_from(["op", "op", "op", "view", "pair", "once"]))
        sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        first = make.op(
            *read,
            size=sizes if kind == "pair" else sizes[0],
            view=kind == "view",
            clonable=kind != "once",
            forwards=kind != "view" and draw(st.booleans()),
            residual=draw(st.sampled_from(["inputs", "output", "both", "none"])),
        )
        values += [first, first + 1] if kind == "pair" else [first]
    make.op(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)), size=1)
    return make.graph(hold=draw(st.booleans()))


_probability = st.sampled_from([0.0, 0.1, 0.5, 0.9])


@given(graphs(), st.integers(0, 2**32), _probability, _probability, st.booleans())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_simulation_agrees_with_the_naive_reader(graph, seed, forget, older, scratch):
    if scratch:
        workspace = np.random.default_rng(seed).integers(0, 9, graph.length)
        graph = dataclasses.replace(graph, workspace=workspace)
    schedule = forgetful(graph, seed, forget=forget, older=older)
    checked = check_schedule(graph, schedule)
    rigid = dataclasses.replace(graph, forwards=np.zeros_like(graph.forwards))
    assert simulate(rigid, schedule).peak == checked.peak
    result = simulate(graph, schedule)
    assert result.peak <= checked.peak
    assert result.extra_seconds == pytest.approx(checked.extra_seconds)


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_copies_on_known_graphs(name):
    graph = GRAPHS[name]()
    schedule = forgetful(graph, 1, forget=0.7)
    checked = check_schedule(graph, schedule)
    assert simulate(graph, schedule).peak <= checked.peak


def test_a_view_looks_at_what_it_read():
    """A second copy of a view keeps the buffer that it reads: the original, or a clone."""
    make = Maker()
    x = make.op(make.source(), size=8)
    seen = make.op(x, view=True, residual="none")
    make.op(seen, size=1)
    graph = make.graph()
    (big, view) = (int(graph.producer[v]) for v in (x, seen))
    forward = [Step(op) for op in range(graph.first_backward)]
    backward = range(graph.first_backward, graph.length)
    reader = next(op for op in backward if seen in graph.reads[op])
    reads = tuple(int(v == seen) for v in graph.reads[reader])

    def peaks(*clones, copy):
        at = tuple(copy * k for k in reads)
        last = [Step(op, 0, at) if op == reader else Step(op) for op in backward]
        schedule = Schedule((*forward, *clones, *last))
        check_schedule(graph, schedule)
        found = simulate(graph, schedule)
        assert found.peak == naive_peak(graph, schedule)
        return found.bytes_alive[len(forward) :].max()

    # Alive at most: the buffer that is read, a gradient of 1 byte, one of 8 bytes.
    assert peaks(copy=0) == 17
    assert peaks(Step(view, 1, (0,)), copy=1) == 17
    # The clone of the big one dies at once if the view, which has the same number, reads the
    # original.
    assert peaks(Step(big, 1, (0,)), Step(view, 1, (0,)), copy=1) == 17
    assert peaks(Step(big, 1, (0,)), Step(big, 2, (0,)), Step(view, 1, (1,)), copy=1) == 17


def test_scratch_space_counts_in_its_step_alone():
    graph = chain([4, 4, 4])
    workspace = np.zeros(graph.length, np.int64)
    workspace[1] = 100
    with_scratch = dataclasses.replace(graph, workspace=workspace)
    before, after = (simulate(g, plain(graph)).bytes_alive for g in (graph, with_scratch))
    assert (after - before).tolist() == [100 * (op == 1) for op in range(graph.length)]
    assert simulate(with_scratch, plain(graph)).allocated_peak >= 100


def test_halving_takes_the_logarithm():
    graph = chain([1] * 64, residual="output")
    schedule = halving(graph)
    checked = check_schedule(graph, schedule)
    assert simulate(graph, schedule).peak <= 10
    assert 64 < schedule.clones <= 64 * 3
    assert max(step.copy for step in schedule.steps) >= 4
    assert checked.extra_seconds == schedule.clones


@given(rich(sums=True), st.data())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_arrays_say_what_steps_do(graph, data):
    """Every figure of every buffer is the same, to the last bit: for recomputed values, for sums
    added as addends come, for encoded and moved values."""
    residuals = sorted(graph.residuals)
    kept = data.draw(st.sets(st.sampled_from(residuals))) if residuals else set()
    chained = data.draw(st.sets(st.sampled_from(sorted(graph.sums)))) if graph.sums else set()
    schedule = recompute_lazily(graph, kept, chained)
    assert schedule == recompute_op_by_op(graph, kept, chained)
    _same(graph, schedule)
    _same(graph, dataclasses.replace(schedule, chained=frozenset(graph.sums)))
    moving = data.draw(st.sampled_from([0.0, 0.3]))
    ways = [
        Stored(value, "offload" if moving else "bfloat16", size // 3, 0.1, 0.2, moving)
        for value in residuals
        if (size := int(graph.size[value])) and len(graph.writes[graph.producer[value]]) == 1
    ]
    chosen = data.draw(st.lists(st.sampled_from(ways), unique=True)) if ways else []
    _same(graph, store(graph, schedule, chosen))


@given(graphs(), st.integers(0, 2**32), _probability, _probability)
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_arrays_say_what_steps_do_with_several_copies(graph, seed, forget, older):
    _same(graph, forgetful(graph, seed, forget=forget, older=older))


def _same(graph, schedule):
    found, wanted = simulate(graph, schedule), simulate_step_by_step(graph, schedule)
    assert (found.peak, found.extra_seconds) == (wanted.peak, wanted.extra_seconds)
    assert found.owner == wanted.owner
    np.testing.assert_array_equal(found.bytes_alive, wanted.bytes_alive)
    np.testing.assert_array_equal(found.buffers, wanted.buffers)
