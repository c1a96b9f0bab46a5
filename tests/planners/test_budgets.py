"""The fastest plan at hand keeps the budget, whichever way the user asks for it."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.networks import small
from graph_tools.memory.bfc_allocator import Peaks
from graph_tools.memory.timeline import CHANCE
from memsaving_gradients.engine.driver.attempt import take_back
from memsaving_gradients.engine.driver.attempts import Attempts
from memsaving_gradients.engine.planning import within_limits
from memsaving_gradients.planners import Limits, Proposal, auto, least_memory
from memsaving_gradients.planners import meter as meter_module
from memsaving_gradients.planners.bounds.relaxation import least_extra_seconds
from memsaving_gradients.planners.budget_search import FLOORS, Search
from memsaving_gradients.planners.meter import Meter
from tests.helpers.fresh import fresh
from tests.helpers.graphs import GRAPHS, chain
from tests.helpers.greedy import greedy
from tests.helpers.sampling import covering
from tests.helpers.towers import LAYERS, WIDTH, planned, tower

v1 = tf.compat.v1
errors = ms.errors

# --- the search, on graphs made by hand


@pytest.mark.parametrize(("name", "gating"), covering([*GRAPHS], ["control", "data"]))
def test_search_keeps_every_budget(name: str, gating: str) -> None:
    graph = GRAPHS[name]()
    meter = Meter(graph, gating)
    need = meter.need(meter.plain)
    for share in (0.95, 0.8, 0.6, 0.4, 0.2):
        budget = int(share * need)
        search = Search(meter, greedy)
        found = search.within(budget)
        assert found.need == meter.need(found.proposal)
        least = search.least().need
        if found.need <= budget:
            assert found.proposal.peak <= budget
        else:
            assert budget < least <= found.need
        assert least == Search(meter, greedy).least().need


def test_search_takes_the_fastest_that_fits() -> None:
    graph = GRAPHS["unequal chain"]()
    meter = Meter(graph, "control")
    search = Search(meter, greedy)
    need = meter.need(meter.plain)
    found = search.within(int(0.7 * need))
    fits = [f for f in search._tried if f.need <= 0.7 * meter.need(meter.plain)]
    assert found.proposal.extra_seconds == min(f.proposal.extra_seconds for f in fits)


def test_what_a_quick_plan_has_not_come_down_to_is_asked_for_no_more() -> None:
    asked: list[tuple[int | None, bool]] = []

    def hasty(graph: Any, limits: Limits) -> Proposal:
        """Find nothing better than plain training if planning has to be quick."""
        asked.append((limits.budget, limits.quick))
        if limits.quick:
            return dataclasses.replace(meter.plain, quick=True)
        return greedy(graph, limits)

    graph = GRAPHS["residual chain"]()
    meter = Meter(graph, "control")
    search, half = Search(meter, hasty), meter.plain.peak // 2
    assert search.at(half).proposal.quick
    assert search.at(half - 1).proposal.quick
    assert asked == [(half, True)]
    assert search.at(half - 1, quick=False).proposal.peak < half
    assert asked[1:] == [(half - 1, False)]


def test_the_least_is_sought_only_where_it_may_be() -> None:
    asked: list[int] = []

    def noted(graph: Any, limits: Limits) -> Proposal:
        assert limits.budget is not None
        asked.append(limits.budget)
        return greedy(graph, limits)

    graph = GRAPHS["unequal chain"]()
    meter = Meter(graph, "control")
    least = greedy(graph, Limits(budget=1))
    possible = [k for k in range(1, least.peak) if least_extra_seconds(graph, k) < math.inf]
    factors = (1.0, (possible[0] - 1) / least.peak, 1.0001 * meter.need(least) / least.peak, 0.999)
    Search(meter, noted, floors=factors).least()
    assert asked == [1, int(0.999 * least.peak)]
    # If values may be stored, there is no bound.
    asked.clear()
    storable = dataclasses.replace(graph, storable={0: ()})
    Search(Meter(storable, "control"), noted, floors=factors).least()
    assert possible[0] - 1 in asked


def test_the_least_is_sought_further_down_as_long_as_quick_plans_fit() -> None:
    asked: list[tuple[int | None, bool]] = []

    def lost(graph: Any, limits: Limits) -> Proposal:
        """Return a plan of much memory for a budget of one byte, which no plan keeps."""
        assert limits.budget is not None
        asked.append((limits.budget, limits.quick))
        return greedy(graph, Limits(budget=limits.budget if limits.budget > 1 else high))

    graph = GRAPHS["unequal chain"]()
    meter = Meter(graph, "control")
    least = greedy(graph, Limits(budget=1)).peak
    high = (least + 2 * meter.plain.peak) // 3
    assert Search(meter, lost).least().proposal.peak == least
    assert all(quick for _, quick in asked)
    assert len(asked) > len(FLOORS)


def test_schedules_are_simulated_amidst_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # The regions of these buffers have room for one more buffer each, but not for two.
    graph = chain([1 << 18] * 8)
    alone = Meter(graph, "control")
    there = dataclasses.replace(alone.plain.simulation, persistent=((5 << 17) + 256,) * 2)
    amidst = Meter(graph, "control", there)
    assert amidst.need(amidst.plain) != alone.need(alone.plain)
    assert Meter(graph, "data", there).need(alone.plain) == Meter(graph, "data").need(alone.plain)
    monkeypatch.setattr(meter_module, "peaks_in_turn", lambda *_, **__: Peaks(300, 420))
    assert amidst.need(amidst.plain) == 420 / (1 + CHANCE)
    monkeypatch.setattr(meter_module, "MANY_OPS", 1)
    assert amidst.need(amidst.plain) == 300


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
    search = Search(meter, slow, seconds=0.01)
    assert search.within(least).need == need
    found = search.least()
    assert (found.need, found.stopped) == (least, "out of time")
    assert asked[-1] == 1
    assert asked.count(1) == 1


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


def test_the_plan_that_is_used_is_polished_once() -> None:
    asked: list[Limits] = []

    def slow(graph: Any, limits: Limits) -> Proposal:
        """Return a plan of much extra time if planning has to be quick."""
        asked.append(limits)
        if not limits.quick:
            return auto.plan(graph, limits)
        dear = least_memory.plan(graph, Limits(accumulate=limits.accumulate))
        return dataclasses.replace(dear, quick=True)

    plan = planned(budget=0.8, planner=slow)
    assert [limits.quick for limits in asked] == [*[True] * (len(asked) - 1), False]
    assert asked[-1].budget in [limits.budget for limits in asked[:-1]]
    assert plan.extra_time < planned(planner="memory").extra_time
    assert plan.budget is not None
    assert plan.allocated <= plan.budget
    assert plan.lower_bound <= plan.extra_time


def test_the_least_is_that_of_the_rewritten_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(graph: Any, limits: Limits) -> Proposal:
        """Plan for ``most`` bytes, whatever the budget is, unless it is one byte."""
        assert limits.budget is not None
        return greedy(graph, Limits(budget=limits.budget if limits.budget == 1 else most))

    def least() -> int:
        with pytest.raises(errors.BudgetError) as refused:
            planned(budget=WIDTH, planner=loose)
        assert refused.value.least is not None
        return refused.value.least

    most = int(0.6 * planned().peak_plain)
    expected = least()
    assert expected < most
    # The holes are misjudged: the lower a peak is, the more bytes a plan is said to need.
    need = property(lambda self: lambda found: self.plain.peak - found.peak // 3)
    monkeypatch.setattr(meter_module.Meter, "need", need)
    assert least() == expected
    assert planned(budget=expected, planner=loose).allocated <= expected


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
    """Return the promised and the measured bytes (in a fresh process).

    A plan leaves a twentieth of its budget to chance, here two tensors: a busy machine may stop a
    thread in the middle of the step.
    """
    from graph_tools.memory.measure import measure_peak

    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = x
        for _ in range(4 * LAYERS):
            y = tf.tanh(y)
        return ms.gradients(y, x, budget=share, planner=greedy)

    x = tf.zeros([WIDTH])
    peak = measure_peak(lambda: step(x), steps=3).peak
    return {"peak": peak, "budget": ms.plans(step)[-1].budget}


def test_measured_peak_is_within_the_budget() -> None:
    result = fresh("tests.planners.test_budgets:step_under_a_budget", {"share": 0.4})
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


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.BudgetWarning")
def test_what_was_tried_in_vain_does_not_run():
    """If a plan needs more bytes when it runs, another plan replaces it. Grappler would keep the
    protected ops that the first plan built."""
    network = small("cifar_resnet")

    @tf.function
    def step(*batch: Any) -> Any:
        loss, variables = network.loss(*batch), list(network.variables)
        found = ms.gradients(loss, variables, budget=0.65, planner="recursive")
        return [tf.convert_to_tensor(g) for g in found]

    graph = step.get_concrete_function(*map(tf.constant, network.batch)).graph
    live: set[tf.Operation] = set()
    stack = [*(t.op for t in graph.outputs), *graph.control_outputs]
    while stack:
        if (op := stack.pop()) not in live:
            live.add(op)
            stack += [*(t.op for t in op.inputs), *op.control_inputs]
    protected = {
        op for op in graph.get_operations() if "_grappler_do_not_remove" in op.node_def.attr
    }
    held = {op for op in graph.get_operations() if "_held" in op.name}
    assert protected and protected <= live
    assert held - live, "the first plan is followed here, which proves nothing"


def plan_of_dropouts(layers: int, share: float, **options: Any) -> ms.Plan:
    """Return the plan, within a share of the bytes, for layers with dropout."""
    weights = [tf.Variable(tf.eye(64)) for _ in range(layers)]

    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = x
        for weight in weights:
            y = tf.nn.dropout(tf.tanh(y @ weight), 0.4)
        return ms.gradients(tf.reduce_sum(y), weights, budget=share, **options)

    (plan,) = ms.plans(step.get_concrete_function(tf.TensorSpec([512, 64])))
    return plan


@pytest.mark.parametrize("packed", [False, True])
def test_the_other_packing_is_tried(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they run, plans with packed, or unpacked, masks may need more bytes than simulated."""
    kept = Attempts.kept

    def refusing(attempts: Attempts, limit: float = math.inf) -> Any:
        found = kept(attempts, limit)
        assert found is not None
        if found.outcome.plan.packed == packed:
            return found
        take_back(attempts.site, found)
        return None

    monkeypatch.setattr(Attempts, "kept", refusing)
    plan = plan_of_dropouts(6, 0.8, planner="chain")
    assert plan.packed == packed
    assert plan.budget is not None
    assert plan.allocated <= plan.budget


@pytest.mark.parametrize("share", [0.5, 0.8])
@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_forecast_does_not_choose_the_packing(
    packed: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first plan within few bytes may fail though plans that keep the budget are fast."""
    expected = plan_of_dropouts(12, share)
    forecast = within_limits._cost

    def wrong(state: Any, site: Any, packing: float | None = None) -> float:
        return math.inf if packed == (packing is not None) else forecast(state, site, packing)

    monkeypatch.setattr(within_limits, "_cost", wrong)
    assert plan_of_dropouts(12, share).packed == expected.packed
