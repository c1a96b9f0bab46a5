"""Planning reports its progress, and a hook, a key, or a time limit can stop it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.engine.feedback.progress import showing
from memsaving_gradients.planners import Interrupted, Limits, Proposal, least_memory
from tests.helpers.greedy import greedy
from tests.helpers.towers import HOLEY, planned, tower

errors = ms.errors


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
    # Buffers of this size leave holes: the first plan fits and leaves a part of the budget unused.
    with pytest.warns(errors.PlanningStoppedWarning, match="interrupted; the best plan so far"):
        plan = planned(HOLEY, budget=0.7, planner=Stops(1, how))
    assert not plan.complete
    assert "planning was stopped" in str(plan)
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


@pytest.mark.parametrize("calls", [0, 1])
def test_interrupted_before_any_plan_fits_takes_the_least(calls: int) -> None:
    left = iter(range(calls))

    def hook(share: float, what: str) -> None:
        if next(left, None) is None:
            raise Interrupted

    with tf.Graph().as_default():
        x, y = tower(8)
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=1)
        # With this budget, the search needs only the first plan of least memory.
        budget = int(1.6 * caught.value.least)
        with pytest.warns(errors.PlanningStoppedWarning, match="interrupted"):
            ms.gradients(y, x, budget=budget, progress=hook)


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

    follow = auto._Planning._follow

    def stops(self: Any, *decisions: Any) -> Any:
        trial = follow(self, *decisions)
        if self._fits():
            raise KeyboardInterrupt
        return trial

    monkeypatch.setattr(auto._Planning, "_follow", stops)
    with pytest.warns(errors.PlanningStoppedWarning, match="interrupted"):
        plan = planned(HOLEY, budget=0.7, planner="auto")
    assert plan.budget is not None
    assert plan.allocated <= plan.budget
    assert not plan.complete


def test_the_least_memory_claims_no_time_that_is_not_known() -> None:
    with tf.Graph().as_default() as graph:
        x, y = tower(8)
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=1)
        ms.gradients(y, x, budget=caught.value.least)
        ms.gradients(y, x, max_slowdown=100.0)
    for plan in ms.plans(graph):
        assert 0 <= plan.lower_bound <= plan.extra_time
        assert "inf" not in str(plan)


@pytest.mark.parametrize("planner", ["chain", pytest.param("auto", marks=pytest.mark.slow)])
def test_fractions_that_are_named_work_where_orders_differ(planner: str) -> None:
    def build() -> tuple[tf.Tensor, tf.Tensor]:
        # Branches of unlike lengths: the executor's order of their ops is random.
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
            ms.gradients(y, x, budget=0.01, planner=planner)
        ms.gradients(y, x, budget=caught.value.fraction, planner=planner)
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
    monkeypatch.setattr(
        "memsaving_gradients.planners.proposal.time.monotonic", lambda: float(next(clock))
    )
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
    monkeypatch.setattr("memsaving_gradients.engine.feedback.progress.PATIENCE_SECONDS", 0.0)
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
    monkeypatch.setattr("memsaving_gradients.engine.feedback.progress.PATIENCE_SECONDS", patience)
    with showing(None) as hook:
        assert hook is not None
        if patience:
            hook(0.5, "cutting")
    assert not capsys.readouterr().err


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(None) as hook:
        assert hook is None
    assert not capsys.readouterr().err
