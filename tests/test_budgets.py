"""A budget is kept, by the fastest plan at hand, in every way of asking for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.budgets import Goal, Meter, Search
from memsaving_gradients.planners import Interrupted, Limits, Proposal, least_memory
from memsaving_gradients.progress import showing
from tests.graphs import GRAPHS
from tests.greedy import greedy

v1 = tf.compat.v1
errors = ms.errors

LAYERS, WIDTH = 24, 1 << 18
HOLEY = 325_000


def tower(layers: int = LAYERS, width: int | None = WIDTH) -> tuple[tf.Tensor, tf.Tensor]:
    """A chain of equal layers in the current graph: x, y."""
    x = y = v1.placeholder(tf.float32, [width], name="x")
    for k in range(layers):
        y = tf.tanh(y, name=f"layer{k}")
    return x, y


def planned(width: int | None = WIDTH, mark: int | None = None, **options: Any) -> ms.Plan:
    with tf.Graph().as_default() as graph:
        x, y = tower(width=width)
        if mark is not None:
            ms.checkpoint(graph.get_tensor_by_name(f"layer{mark}:0"))
        ms.gradients(y, x, **{"planner": greedy, **options})
    return ms.plans(graph)[-1]


# --- the search, on graphs made by hand


@pytest.mark.parametrize("gating", ["control", "data"])
@pytest.mark.parametrize("name", GRAPHS)
def test_search_keeps_every_budget(name: str, gating: str) -> None:
    graph = GRAPHS[name]()
    meter = Meter(graph, gating)
    need = meter.need(meter.plain)
    for share in (0.95, 0.8, 0.6, 0.4, 0.2):
        budget = int(share * need)
        try:
            found = Search(meter, greedy).within(Goal(budget, need, need, budget))
        except errors.BudgetError as error:
            least = error.least
        else:
            assert found.need == meter.need(found.proposal) <= budget
            assert found.proposal.peak <= budget
            continue
        assert budget < least <= need
        if least < need:
            assert Search(meter, greedy).within(Goal(least, need, need, least)).need <= least


def test_search_takes_the_fastest_that_fits() -> None:
    graph = GRAPHS["unequal chain"]()
    meter = Meter(graph, "control")
    search = Search(meter, greedy)
    need = meter.need(meter.plain)
    found = search.within(Goal(int(0.7 * need), need, need, 0.7))
    fits = [f for f in search._tried if f.need <= 0.7 * meter.need(meter.plain)]
    assert found.proposal.extra_seconds == min(f.proposal.extra_seconds for f in fits)


def test_out_of_time_the_least_is_asked_for_once() -> None:
    graph = GRAPHS["unequal chain"]()
    meter = Meter(graph, "control")
    need = meter.need(meter.plain)
    asked = []

    def slow(graph: Any, limits: Limits) -> Proposal:
        asked.append(limits.budget)
        time.sleep(0.02)
        return greedy(graph, limits) if limits.budget == 1 else meter.plain

    least = meter.need(greedy(graph, Limits(budget=1)))
    found = Search(meter, slow, seconds=0.01).within(Goal(least, need, need, least))
    assert (found.need, found.stopped) == (least, "out of time")
    assert asked[-1] == 1
    assert asked.count(1) == 1


def test_a_hopeless_budget_asks_for_the_least_alone() -> None:
    graph = GRAPHS["chain"]()
    meter = Meter(graph, "control")
    need = meter.need(meter.plain)
    search = Search(meter, greedy)
    with pytest.raises(errors.BudgetError):
        search.within(Goal(1, need, need, 1))
    assert min(found.asked or 0 for found in search._tried) == 1
    assert len(search._tried) <= 4


def test_slowdown_is_kept_and_more_of_it_saves_more() -> None:
    graph = GRAPHS["chain"]()
    meter = Meter(graph, "control")
    needs = []
    for share in (0.05, 0.1, 0.2, 0.5):
        found = Search(meter, greedy).within_time(share * graph.total_seconds)
        assert found is not None
        assert found.proposal.extra_seconds <= share * graph.total_seconds
        needs.append(found.need)
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] <= needs[0]


# --- in a graph


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_fraction(share: float) -> None:
    plan = planned(budget=share)
    assert plan.mode == "budget"
    assert plan.planner == "greedy"
    assert plan.budget == int(share * plan.allocated_plain)
    assert plan.peak <= plan.allocated <= plan.budget
    assert plan.slack == plan.budget - plan.allocated >= 0
    assert plan.clones


@pytest.mark.parametrize("budget", [12 * WIDTH * 4, "12 MiB", "12.6e3 kB"])
def test_bytes(budget: Any) -> None:
    plan = planned(budget=budget)
    assert plan.budget is not None
    assert plan.budget in (12 << 20, 12_600_000)
    assert plan.allocated <= plan.budget < plan.allocated_plain


def test_larger_budgets_recompute_less() -> None:
    times = [planned(budget=share).extra_time for share in (0.45, 0.6, 0.8)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] > 0


def test_same_plan_twice() -> None:
    assert planned(budget=0.5) == planned(budget=0.5)


def test_values_are_those_of_tensorflow() -> None:
    def values(gradients: Any) -> np.ndarray:
        with tf.Graph().as_default():
            x, y = tower(width=64)
            (grad,) = gradients(y, x)
            with v1.Session() as session:
                return session.run(grad, {x: np.linspace(-1, 1, 64)})

    found = values(lambda y, x: ms.gradients(y, x, budget=0.5, planner=greedy))
    np.testing.assert_array_equal(found, values(tf.gradients))


def step_under_a_budget(share: float) -> dict[str, Any]:
    """Run in a process of its own: what was promised, and what was taken."""
    from graph_tools.measure import measure_peak

    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = x
        for _ in range(LAYERS):
            y = tf.tanh(y)
        return ms.gradients(y, x, budget=share, planner=greedy)

    x = tf.zeros([WIDTH])
    peak = measure_peak(lambda: step(x), steps=3).peak
    return {"peak": peak, "budget": ms.plans(step)[-1].budget}


def test_measured_peak_is_within_the_budget() -> None:
    from graph_tools.measure import in_fresh_process

    result = in_fresh_process("tests.test_budgets:step_under_a_budget", {"share": 0.4})
    assert 0 < result["peak"] <= result["budget"]


def test_ample_budget_gives_plain_gradients_and_says_so_once() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower()
        ops = {op.type for op in graph.get_operations()}
        with pytest.warns(errors.PlanNote, match="plain training needs .* meets the budget"):
            ms.gradients(y, x, budget="1 GiB")
        ms.gradients(y, x, budget="1 GiB")
        names = [op.name for op in graph.get_operations()]
    assert ops < {op.type for op in graph.get_operations()}
    assert not [name for name in names if "recomputed" in name]
    first, second = ms.plans(graph)
    assert first.clones == second.clones == 0
    assert first.peak == first.peak_plain
    assert first.budget == 1 << 30
    assert first.extra_time == 0
    assert "left" in str(first)


def test_fraction_of_one_is_plain() -> None:
    with pytest.warns(errors.PlanNote):
        assert planned(budget=1.0).clones == 0


def test_marks_are_kept_besides() -> None:
    plan = planned(budget=0.6, mark=3)
    assert "layer3:0" in plan.checkpoints
    (mark,) = [d for d in plan.decisions if d.tensor == "layer3:0"]
    assert (mark.fate, mark.reason) == ("keep", "marked")


def test_planner_that_ignores_budgets() -> None:
    plan = planned(budget=0.5, planner="memory")
    assert plan.planner == "memory"
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


def test_planner_without_limits() -> None:
    plan = planned(planner="memory")
    assert (plan.mode, plan.planner, plan.budget) == ("planner", "memory", None)
    assert plan.peak < plan.peak_plain


def test_max_slowdown() -> None:
    much, little = planned(max_slowdown=1.3), planned(max_slowdown=1.1)
    assert much.mode == "slowdown"
    assert much.extra_time <= 0.3
    assert little.extra_time <= 0.1
    assert much.allocated <= little.allocated < little.allocated_plain


def test_slowdown_that_is_unreachable_is_plain_and_said() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower()
        with pytest.warns(errors.NothingSavedWarning, match="max_slowdown=1.0001"):
            ms.gradients(y, x, max_slowdown=1.0001, planner="memory")
        assert not ms.plans(graph)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.BudgetWarning")
def test_unknown_batch() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower(width=None)
        ms.gradients(y, x, budget="200 kB", batch_size=4096, planner=greedy)
        ms.gradients(y, x, budget=0.5, planner=greedy)
    known, fraction = ms.plans(graph)
    assert known.peak_plain > 100 * fraction.peak_plain
    assert known.allocated <= 200_000


def test_patched() -> None:
    @tf.function
    def slope(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(LAYERS):
                y = tf.tanh(y)
        return tape.gradient(y, x)

    with ms.patched(budget=0.5, planner=greedy):
        slope(tf.zeros([4096]))
    (plan,) = ms.plans(slope)
    assert plan.budget is not None
    assert plan.allocated <= plan.budget < plan.allocated_plain


def test_xla_counts_one_buffer() -> None:
    plan = planned(budget=0.5, xla=True)
    assert plan.gating == "data"
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


# --- stopping


def test_progress_is_told() -> None:
    told: list[tuple[float, str]] = []
    planned(budget=0.5, progress=lambda share, what: told.append((share, what)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-2] <= 1
    assert {what for _, what in told[:-1]} == {"keeping"}
    assert told[-1] == (1.0, "done")


@pytest.mark.parametrize(
    "options",
    [{"checkpoints": "memory", "planner": "auto"}, {"planner": "memory"}, {"budget": 1.0}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.PlanNote")
def test_progress_ends_at_one(options: dict[str, Any]) -> None:
    told: list[float] = []
    planned(**options, progress=lambda share, what: told.append(share))
    assert told[-1] == 1


def test_progress_ends_at_one_when_it_stops_planning() -> None:
    told: list[float] = []

    def hook(share: float, what: str) -> None:
        told.append(share)
        if what == "done":
            raise Interrupted

    with pytest.warns(errors.PlanningStoppedWarning):
        planned(HOLEY, budget=0.7, planner=Stops(1, Interrupted), progress=hook)
    assert told[-1] == 1
    assert told.count(1.0) == 1


class Stops:
    """A planner that a hook, or a key, stops after some plans."""

    def __init__(self, plans: int, how: type[BaseException]) -> None:
        self.left, self.how = plans, how

    def __call__(self, graph: Any, limits: Limits) -> Proposal:
        if not self.left:
            raise self.how
        self.left -= 1
        return greedy(graph, limits)


@pytest.mark.parametrize("how", [Interrupted, KeyboardInterrupt])
def test_interrupted_with_a_plan_at_hand(how: type[BaseException]) -> None:
    # Of this size, buffers leave holes: the first plan fits and leaves a part of the budget unused.
    with pytest.warns(errors.PlanningStoppedWarning, match="interrupted; the best plan so far"):
        plan = planned(HOLEY, budget=0.7, planner=Stops(1, how))
    assert not plan.complete
    assert "planning was stopped" in str(plan)
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


def test_interrupted_before_any_plan_leaves_the_graph() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower()
        with pytest.raises(KeyboardInterrupt):
            ms.gradients(y, x, budget=0.5, planner=Stops(0, KeyboardInterrupt))
        with pytest.raises(errors.BudgetError, match="interrupted, and no plan so far fits"):
            ms.gradients(y, x, budget=0.5, planner=Stops(0, Interrupted))
        assert not ms.plans(graph)
        ms.gradients(y, x, budget=0.5, planner=greedy)
    assert ms.plans(graph)[-1] == planned(budget=0.5)


def test_a_stop_is_said_once_and_ends_all_planning() -> None:
    asked = []

    def slow(graph: Any, limits: Limits) -> Proposal:
        asked.append(limits.budget)
        if len(asked) > 1:
            raise Interrupted
        return greedy(graph, limits)

    with pytest.warns(errors.PlanningStoppedWarning) as said:
        plan = planned(HOLEY, budget=0.7, planner=slow)
    assert len([w for w in said if w.category is errors.PlanningStoppedWarning]) == 1
    assert len(asked) == 2
    assert not plan.complete


def test_the_key_ends_the_default_planner_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from memsaving_gradients.planners import auto

    improve = auto.Search.improve

    def stops(self: Any, *arguments: Any) -> Any:
        improve(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(auto.Search, "improve", stops)
    with pytest.warns(errors.PlanningStoppedWarning, match="interrupted"):
        plan = planned(HOLEY, budget=0.7, planner="auto")
    assert plan.budget is not None
    assert plan.allocated <= plan.budget
    assert not plan.complete


def test_the_least_memory_claims_no_time_that_is_not_known() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower()
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=1)
        ms.gradients(y, x, budget=caught.value.least)
        ms.gradients(y, x, max_slowdown=100.0)
    for plan in ms.plans(graph):
        assert 0 <= plan.lower_bound <= plan.extra_time
        assert "inf" not in str(plan)


def test_fractions_that_are_named_work_where_orders_differ() -> None:
    def build() -> tuple[tf.Tensor, tf.Tensor]:
        # Branches of unlike lengths: what runs beside what is chance.
        x = tf.compat.v1.placeholder(tf.float32, [64, 1024])
        ends = []
        for length in (3, 7, 12):
            h = x
            for _ in range(length):
                h = tf.tanh(h)
            ends.append(h)
        return x, tf.add_n(ends)

    with tf.Graph().as_default() as graph:
        x, y = build()
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=0.01)
        ms.gradients(y, x, budget=caught.value.fraction)
    plan = ms.plans(graph)[-1]
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


def test_error_in_a_hook_leaves_the_graph() -> None:
    def hook(share: float, what: str) -> None:
        raise KeyError(what)

    with tf.Graph().as_default() as graph:
        x, y = tower()
        with pytest.raises(KeyError):
            ms.gradients(y, x, budget=0.5, planner=greedy, progress=hook)
        ms.gradients(y, x, budget=0.5, planner=greedy)
    assert len(ms.plans(graph)) == 1


def test_out_of_time_uses_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("memsaving_gradients.budgets.time.monotonic", lambda: float(next(clock)))
    with pytest.warns(errors.PlanningStoppedWarning, match="out of time"):
        plan = planned(HOLEY, budget=0.7, planning_seconds=1.5)
    assert not plan.complete


def test_time_is_passed_on() -> None:
    given: list[float | None] = []

    def asks(graph: Any, limits: Limits) -> Proposal:
        given.append(limits.seconds)
        return greedy(graph, limits)

    planned(budget=0.5, planner=asks, planning_seconds=1000)
    assert all(seconds is not None and 0 < seconds <= 1000 for seconds in given)
    given.clear()
    planned(budget=0.5, planner=asks)
    assert set(given) == {None}


def test_accumulate_is_passed_on() -> None:
    given = []

    def asks(graph: Any, limits: Limits) -> Proposal:
        given.append(limits.accumulate)
        return least_memory.plan(graph, limits)

    planned(budget=0.5, planner=asks, accumulate=False)
    assert set(given) == {False}


@pytest.mark.parametrize("with_rich", [True, False])
def test_bar_in_a_terminal(
    with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("memsaving_gradients.progress.PATIENCE_SECONDS", 0.0)
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with showing(None) as hook:
        assert hook is not None
        hook(0.5, "cutting")
    shown = capsys.readouterr().err
    assert "planning" in shown
    assert "100%" in shown
    with showing(False) as hook:
        assert hook is None


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_no_bar_for_what_is_over(
    patience: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("memsaving_gradients.progress.PATIENCE_SECONDS", patience)
    with showing(None) as hook:
        assert hook is not None
        if patience:
            hook(0.5, "cutting")
    assert not capsys.readouterr().err


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(None) as hook:
        assert hook is None
    assert not capsys.readouterr().err
