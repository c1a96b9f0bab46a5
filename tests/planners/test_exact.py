"""The planner that proves its plans optimal: against exhaustive search, and the properties of its
bound and its process."""

from __future__ import annotations

import atexit
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.layered import unet_vgg
from memsaving_gradients.errors import ArgumentError, PlanNote, SolverError
from memsaving_gradients.planners import Interrupted, Limits, Proposal, exact, least_memory
from memsaving_gradients.planners.bounds.integer import bound_within, tightest_bound
from memsaving_gradients.planners.retention import constraint_program, prove
from memsaving_gradients.planners.retention.coarsen import coarsen
from memsaving_gradients.planners.retention.simulate import run
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.checker import check_proposal
from tests.helpers.fresh import fresh
from tests.helpers.graphs import chain
from tests.helpers.oracle import least_seconds
from tests.helpers.random_graphs import rich, small
from tests.helpers.sampling import examples

NEAR = 1e-6


def planned(graph: TrainingGraph, budget: int, **limits) -> Proposal:
    """Return the plan, checked for the properties of every plan."""
    proposal = exact.plan(graph, Limits(budget=budget, **limits))
    check_proposal(graph, proposal, budget, NEAR)
    return proposal


def check_against_exhaustive_search(seed: int) -> int:
    """Check every feasible budget of a small graph; return how many of them need clones."""
    graph = small(seed)
    many = 0
    for budget in range(1, simulate(graph, plain(graph)).peak + 1):
        optimum = least_seconds(graph, budget)
        assert tightest_bound(graph, budget) <= optimum + NEAR, (seed, budget)
        if optimum == math.inf:
            continue
        proposal = planned(graph, budget)
        assert proposal.peak <= budget, (seed, budget)
        assert proposal.extra_seconds == pytest.approx(optimum), (seed, budget)
        assert proposal.optimal, (seed, budget)
        many += optimum > 0
    return many


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        (range(50), 20),
        pytest.param(range(200), 80, marks=pytest.mark.slow),
        pytest.param(range(1000, 3000), 800, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_against_exhaustive_search(seeds, least):
    assert sum(map(check_against_exhaustive_search, seeds)) >= least


def test_no_plan_fits_less_than_the_least():
    for seed in range(4):
        graph = small(seed)
        least = next(b for b in range(1, 99) if least_seconds(graph, b) < math.inf)
        proposal = planned(graph, least - 1)
        assert proposal.peak >= least
        assert not proposal.optimal


@settings(max_examples=examples(40), deadline=None)
@given(rich(most=8, sums=True), st.floats(0.3, 1.0))
def test_any_graph_gets_a_valid_plan_and_a_bound_below_it(graph, share):
    planned(graph, int(share * simulate(graph, plain(graph)).peak))


@pytest.mark.parametrize("length", [7, pytest.param(9, marks=pytest.mark.slow)])
def test_a_value_is_made_again_as_often_as_it_pays(length):
    # Within the least memory of a chain its first layers run again and again.
    graph = chain([1] * length)
    least = next(b for b in range(1, 30) if least_seconds(graph, b) < math.inf)
    proposal = planned(graph, least)
    again = [step.op for step in proposal.schedule.steps if step.copy]
    assert max(again.count(op) for op in again) > prove.COPIES
    assert proposal.extra_seconds == least_seconds(graph, least)


def test_executions_say_all_of_a_plan():
    graph = unet_vgg().graph()
    coarse = coarsen(graph)
    kept = set(coarse.storages[::3])
    decisions = coarse.decisions(kept)
    schedule = coarse.schedule(decisions)
    again = run(coarse.problem, decisions).again
    assert coarse.executions(schedule) == again
    assert coarse.follow(coarse.executions(schedule)) == schedule


def test_a_published_optimum_is_found_again():
    instance = unet_vgg()
    proposal = planned(instance.graph(), int(0.8 * instance.peak))
    assert proposal.peak <= 0.8 * instance.peak
    bound = tightest_bound(instance.graph(), int(0.8 * instance.peak))
    assert 0 < bound <= proposal.extra_seconds <= 1.001 * bound


def test_what_the_bound_would_drop_makes_room_at_its_moments():
    instance = unet_vgg()
    graph, budget = instance.graph(), int(0.6 * instance.peak)
    bound = bound_within(graph, budget)
    assert bound.seconds == max(solved.seconds for solved in bound.solved)
    alive = simulate(graph, plain(graph)).bytes_alive
    for moment in (moment for solved in bound.solved for moment in solved.moments):
        assert alive[moment.place] > budget
        assert alive[moment.place] - graph.size[list(moment.absent)].sum() <= budget


@pytest.mark.parametrize("effort", [0.2, pytest.param(exact.EFFORT, marks=pytest.mark.slow)])
def test_effort_gives_the_same_plan_every_time(effort, monkeypatch):
    monkeypatch.setattr(exact, "EFFORT", effort)
    graph = unet_vgg().graph()
    budget = int(0.6 * unet_vgg().peak)
    first, second = (planned(graph, budget) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.lower_bound == second.lower_bound


def test_seconds_are_kept(monkeypatch):
    solve, asked = constraint_program.solve, []

    def noted(*problem, **how):
        asked.append((how["effort"], how["seconds"]))
        return solve(*problem, **how)

    monkeypatch.setattr(constraint_program, "solve", noted)
    instance = unet_vgg()
    proposal = planned(instance.graph(), int(0.45 * instance.peak), seconds=2.0)
    # Only the time limit ends this search.
    assert asked
    assert all(effort is None and 0 < seconds <= 2 for effort, seconds in asked)
    assert proposal.peak <= 0.45 * instance.peak


def test_an_interrupted_search_gives_the_best_so_far_and_the_next_one_works():
    instance = unet_vgg()

    def stop(share: float, what: str) -> None:
        if what == "proving":
            raise Interrupted

    proposal = planned(instance.graph(), int(0.45 * instance.peak), progress=stop)
    assert not proposal.complete
    assert proposal.peak <= 0.45 * instance.peak
    assert planned(small(26), 20).optimal


def test_where_the_process_is_killed_the_plan_there_is_is_used():
    instance = unet_vgg()
    budget = int(0.45 * instance.peak)
    solver = constraint_program._Solver.running()

    def kill(share: float, what: str) -> None:
        if what == "proving":
            solver.process.kill()

    with pytest.warns(PlanNote, match="ended early, with exit status -9: it was killed"):
        proposal = planned(instance.graph(), budget, progress=kill)
    assert proposal.peak <= budget
    constraint_program._Solver.running().process.kill()
    constraint_program._Solver.running().process.wait()
    assert planned(small(26), 20).optimal


@pytest.fixture
def broken(monkeypatch):
    """Let the solver's process end as soon as it begins."""
    constraint_program._Solver._end()
    start = subprocess.Popen
    program = [sys.executable, "-c", "raise ImportError('libortools is missing')"]
    monkeypatch.setattr(
        constraint_program.subprocess, "Popen", lambda _, **how: start(program, **how)
    )


def test_where_no_plan_fits_without_the_solver_its_error_is_raised(broken):
    budget = 14
    assert least_memory.plan(small(6)).peak > budget
    with pytest.raises(SolverError, match=r"exit status 1: ImportError: libortools is missing"):
        exact.plan(small(6), Limits(budget=budget))


def test_what_the_process_says_before_it_ends_is_told(broken):
    instance = unet_vgg()
    budget = int(0.45 * instance.peak)
    with pytest.warns(PlanNote, match=r"exit status 1: ImportError: libortools is missing"):
        assert exact.plan(instance.graph(), Limits(budget=budget)).peak <= budget


def test_without_a_solver_the_way_to_one_is_named(monkeypatch):
    monkeypatch.setattr(constraint_program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"pip install 'memsaving-gradients\[exact\]'"):
        exact.plan(chain([1, 2, 3]), Limits(budget=3))


def ended_with_python() -> tuple[bool, bool]:
    """Return whether the solver's process runs after a plan, and whether it has ended after
    Python's exit functions."""
    exact.plan(small(26), Limits(budget=20))
    process = constraint_program._Solver.running().process
    runs = process.poll() is None
    atexit._run_exitfuncs()
    return runs, process.poll() is not None


def test_the_process_ends_with_the_one_that_asks():
    assert fresh("tests.planners.test_exact:ended_with_python") == (True, True)
