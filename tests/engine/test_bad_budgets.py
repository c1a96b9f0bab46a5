"""Bad input around budgets, one case of each kind: its message, and a graph left usable."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.budget import safe_bytes
from memsaving_gradients.planners import Limits, Proposal
from memsaving_gradients.planners.proposal import propose
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.greedy import greedy
from tests.helpers.sampling import covering
from tests.helpers.support import check_error

v1 = tf.compat.v1
errors = ms.errors


class Net:
    """Chains with a known batch, an unknown batch, two unknown sizes, and an unknown rank."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x, self.y = self._chain(v1.placeholder(tf.float32, [64, 1024], name="x"))
            self.batch, self.of_batch = self._chain(
                v1.placeholder(tf.float32, [None, 1024], name="batch")
            )
            self.two, self.of_two = self._chain(
                v1.placeholder(tf.float32, [None, None, 64], name="two")
            )
            self.any, self.of_any = self._chain(v1.placeholder(tf.float32, None, name="any"))

    def _chain(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = x
        for _ in range(16):
            y = tf.tanh(y)
        return x, y

    def gradients(self, **options: Any) -> Any:
        return ms.gradients(self.y, self.x, **{"planner": greedy, **options})


@pytest.fixture
def net() -> Net:
    return Net()


def invalid(graph: Any, limits: Limits) -> Proposal:
    schedule = Schedule((*(Step(op) for op in range(graph.first_backward)), Step(0, 1)))
    return Proposal(schedule, {}, simulate(graph, schedule))


def unreachable(graph: Any, limits: Limits) -> Proposal:
    return propose(graph, limits, dict.fromkeys(graph.residuals, "checkpoint"))


# The call, the argument that the message names, what it says of the value, and the way out that it
# tells.
CASES: dict[str, tuple[Callable[[Net], Any], str, str, str]] = {
    "zero": (lambda n: n.gradients(budget=0), "budget", "0", "is not positive"),
    "negative": (lambda n: n.gradients(budget=-1), "budget", "-1", "is not positive"),
    "gigs": (lambda n: n.gradients(budget="2 gigs"), "budget", "'2 gigs'", "kB, MB, GB"),
    "True": (lambda n: n.gradients(budget=True), "budget", "True", "a string with one of"),
    "not a number": (
        lambda n: n.gradients(budget=float("nan")),
        "budget",
        "nan",
        "give an int (bytes)",
    ),
    "float above one": (lambda n: n.gradients(budget=2e9), "budget", "2000000000.0", "give an int"),
    "below the least": (
        lambda n: n.gradients(budget="300 kB"),
        "budget",
        "'300 kB'",
        "the least budget that works is",
    ),
    "fraction below the least": (
        lambda n: n.gradients(budget=0.01),
        "budget",
        "0.01",
        "bytes of plain training",
    ),
    "nothing can be saved": (
        lambda n: n.gradients(budget=0.9, planner=unreachable),
        "budget",
        "0.9",
        "as much as plain training, which needs",
    ),
    "no plan": (lambda n: ms.gradients(n.y, n.x, plan=[]), "plan", "[]", "leave plan= out"),
    "slower than time": (
        lambda n: n.gradients(max_slowdown=10**400),
        "max_slowdown",
        "1000",
        "give a factor",
    ),
    "progress of nothing": (lambda n: n.gradients(progress=0), "progress", "0", "a function of"),
    "with a mode": (
        lambda n: n.gradients(budget=0.5, checkpoints="memory"),
        "budget",
        "0.5",
        "cannot be combined with checkpoints='memory'",
    ),
    "with another mode": (
        lambda n: n.gradients(budget=0.5, checkpoints="collection"),
        "budget",
        "0.5",
        "leave one of them out",
    ),
    "with a list": (
        lambda n: n.gradients(budget=0.5, checkpoints=["Tanh_3"]),
        "budget",
        "0.5",
        "cannot be combined with checkpoints=('Tanh_3',)",
    ),
    "with nothing kept": (
        lambda n: n.gradients(budget=0.5, checkpoints=None),
        "budget",
        "0.5",
        "leave one of them out",
    ),
    "planner with a mode": (
        lambda n: n.gradients(planner="chain", checkpoints="speed"),
        "planner",
        "'chain'",
        "use planner='speed'",
    ),
    "slowdown with a mode": (
        lambda n: n.gradients(planner="auto", max_slowdown=1.2, checkpoints="speed"),
        "max_slowdown",
        "1.2",
        "cannot be combined with checkpoints='speed'",
    ),
    "slowdown with a budget": (
        lambda n: n.gradients(budget=0.5, max_slowdown=1.2),
        "max_slowdown",
        "1.2",
        "cannot be combined with budget=0.5",
    ),
    "slowdown below one": (
        lambda n: n.gradients(max_slowdown=0.9),
        "max_slowdown",
        "0.9",
        "at least 1.0",
    ),
    "slowdown in percent": (
        lambda n: n.gradients(max_slowdown="20%"),
        "max_slowdown",
        "'20%'",
        "at least 1.0",
    ),
    "unknown planner": (
        lambda n: n.gradients(planner="chian"),
        "planner",
        "'chian'",
        "did you mean 'chain'",
    ),
    "number as a planner": (lambda n: n.gradients(planner=3), "planner", "3", "a function of"),
    "planner without a proposal": (
        lambda n: n.gradients(budget=0.5, planner=lambda graph, limits: None),
        "planner",
        "lambda",
        "returned a NoneType; return a Proposal",
    ),
    "planner with a wrong schedule": (
        lambda n: n.gradients(budget=0.5, planner=invalid),
        "planner",
        "invalid",
        "must not run twice",
    ),
    "accumulate": (lambda n: n.gradients(accumulate=1), "accumulate", "1", "True or False"),
    "profile": (lambda n: n.gradients(profile="yes"), "profile", "'yes'", "True or False"),
    "progress": (lambda n: n.gradients(progress=True), "progress", "True", "a bar in a terminal"),
    "no time": (
        lambda n: n.gradients(planning_seconds=0),
        "planning_seconds",
        "0",
        "positive number",
    ),
    "unknown batch": (
        lambda n: ms.gradients(n.of_batch, n.batch, budget="1 MiB", planner=greedy),
        "batch_size",
        "'batch:0' has shape (None, 1024)",
        "give batch_size=",
    ),
    "two unknown dimensions": (
        lambda n: ms.gradients(n.of_two, n.two, budget="1 kB", planner=greedy, batch_size=8),
        "budget",
        "'two:0'",
        "tf.ensure_shape; batch_size= replaces one",
    ),
    "unknown rank": (
        lambda n: ms.gradients(n.of_any, n.any, budget="1 kB", planner=greedy, batch_size=8),
        "budget",
        "'any:0'",
        "batch_size=",
    ),
    "plan that is no plan": (lambda n: ms.gradients(n.y, n.x, plan=3), "plan", "3", "give a Plan"),
    "list with no plan": (
        lambda n: ms.gradients(n.y, n.x, plan=[3]),
        "plan",
        "3",
        "give a Plan",
    ),
    "no such file": (
        lambda n: ms.gradients(n.y, n.x, plan="/nowhere/plan.json"),
        "plan",
        "'/nowhere/plan.json'",
        "cannot be read",
    ),
    "device memory in patched": (
        lambda n: ms.patch(device_memory="80GiB"),
        "device_memory",
        "'80GiB'",
        "give budget= here",
    ),
    "budget of patch": (lambda n: ms.patch(budget="2 gigs"), "budget", "'2 gigs'", "kB, MB, GB"),
    "callback: no device": (
        lambda n: ms.keras.MemorySavingGradients(device_memory=0),
        "device_memory",
        "0",
        "is not positive",
    ),
    "callback: share of a device": (
        lambda n: ms.keras.MemorySavingGradients(device_memory=0.5),
        "device_memory",
        "0.5",
        "give an int (bytes)",
    ),
    "callback: device and budget": (
        lambda n: ms.keras.MemorySavingGradients(device_memory="1GiB", budget=0.5),
        "device_memory",
        "'1GiB'",
        "cannot be combined with budget=0.5",
    ),
    "callback: budget and mode": (
        lambda n: ms.keras.MemorySavingGradients("speed", budget=0.5),
        "budget",
        "0.5",
        "use planner='speed'",
    ),
    "callback: unknown option": (
        lambda n: ms.keras.MemorySavingGradients(buget=0.5),
        "buget",
        "0.5",
        "did you mean 'budget'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_names_argument_value_and_way_out(net: Net, case: str) -> None:
    ask, argument, value, way_out = CASES[case]
    with net.graph.as_default(), pytest.raises(errors.ArgumentError) as caught:
        ask(net)
    check_error(caught.value, argument, value, way_out)


def edges(graph: tf.Graph) -> dict[str, list[str]]:
    """Return the inputs and control inputs of each op of a graph."""
    return {
        op.name: [t.name for t in op.inputs] + [c.name for c in op.control_inputs]
        for op in graph.get_operations()
    }


@functools.cache
def expected() -> ms.Plan:
    """Return the plan of a graph in which no call failed."""
    net = Net()
    with net.graph.as_default():
        net.gradients(budget=0.5)
    (plan,) = ms.plans(net.graph)
    return plan


def assert_left_as_it_was(net: Net, *cases: str) -> None:
    with net.graph.as_default():
        for case in cases:
            before = edges(net.graph)
            with pytest.raises(errors.ArgumentError):
                CASES[case][0](net)
            after = edges(net.graph)
            assert {name: after[name] for name in before} == before, case
        net.gradients(budget=0.5)
    (plan,) = ms.plans(net.graph)
    assert plan == expected()


def test_graph_is_left_as_it_was_by_all(net: Net) -> None:
    assert_left_as_it_was(net, *CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_graph_is_left_as_it_was(net: Net, case: str) -> None:
    assert_left_as_it_was(net, case)


def test_masks_are_packed_no_more_after_an_error() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [64, 1024], name="x")
        for k in range(8):
            y = tf.nn.dropout(tf.tanh(y), 0.5, seed=k)
        before = edges(graph)
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=0.001, planner=greedy)
        after = edges(graph)
        assert {name: after[name] for name in before} == before
        readers = [op for op in graph.get_operations() if op.name not in before]
        masks = [t for op in readers for t in op.inputs if "_packed" in t.name]
        # Clones of abandoned plans stay in the graph as well, but no op reads them.
        clones = ("_packed", "_recomputed", "_held", "_gate")
        outside = [op for op in readers if not any(part in op.name for part in clones)]
        assert masks
        assert not [t for op in outside for t in op.inputs if "_packed" in t.name]
        ms.gradients(y, x, budget=caught.value.least, planner=greedy)
    (plan,) = ms.plans(graph)
    assert plan.packed
    assert plan.allocated <= caught.value.least


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.BudgetWarning")
@pytest.mark.parametrize(("planner", "gates"), covering([greedy, "memory", "speed"], [False, True]))
def test_least_budget_that_is_named_works(planner: Any, gates: bool) -> None:
    net = Net()
    with net.graph.as_default():
        with pytest.raises(errors.BudgetError) as caught:
            net.gradients(budget="300 kB", planner=planner, xla=gates)
        error = caught.value
        assert error.budget == 300_000 < error.least
        assert f"{error.least:,} bytes" in str(error)
        assert f"{error.fraction:g} of" in str(error)
        net.gradients(budget=error.least, planner=planner, xla=gates)
        net.gradients(budget=error.fraction, planner=planner, xla=gates)
        with pytest.raises(errors.BudgetError):
            net.gradients(budget=error.least - 1, planner=planner, xla=gates)
    in_bytes, as_fraction = ms.plans(net.graph)
    for plan in (in_bytes, as_fraction):
        assert plan.budget is not None
        assert plan.allocated <= plan.budget
    assert safe_bytes(in_bytes.simulation, in_bytes.gating) == error.least
    assert as_fraction.budget == int(error.fraction * as_fraction.allocated_plain)


@pytest.mark.parametrize(
    ("ends", "needs"),
    [(("batch", "of_batch"), "batch_size="), (("two", "of_two"), "the shapes of all tensors")],
)
def test_least_budget_is_named_as_a_fraction_where_bytes_are_unknown(
    ends: tuple[str, str], needs: str
) -> None:
    net = Net()
    x, y = (getattr(net, name) for name in ends)
    with net.graph.as_default():
        with pytest.raises(errors.BudgetError) as caught:
            ms.gradients(y, x, budget=0.05, planner=greedy)
        error = caught.value
        assert f"budget={error.fraction!r}, a fraction" in str(error)
        assert f"a budget in bytes needs {needs})" in str(error)
        assert f"{error.least:,}" not in str(error)
        with pytest.raises(errors.ArgumentError):
            ms.gradients(y, x, budget=error.least, planner=greedy)
        ms.gradients(y, x, budget=error.fraction, planner=greedy)
    assert ms.plans(net.graph)[-1].budget is not None


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_can_be_copied(again: Callable[[Exception], Exception]) -> None:
    error = errors.BudgetError("budget", "1 kB", "is too small", 1000, 2000, 0.5)
    other = again(error)
    assert isinstance(other, errors.BudgetError)
    assert str(other) == str(error) == "budget='1 kB': is too small"
    assert (other.budget, other.least, other.fraction) == (1000, 2000, 0.5)


def test_error_leaves_a_function_as_itself() -> None:
    @tf.function
    def slope(x: tf.Tensor) -> Any:
        y = x
        for _ in range(16):
            y = tf.tanh(y)
        return ms.gradients(y, x, budget=100, planner=greedy)

    with pytest.raises(errors.BudgetError) as caught:
        slope(tf.ones([4096]))
    assert caught.value.budget == 100


DAMAGED: dict[str, tuple[Callable[[str], str], str]] = {
    "cut short": (lambda text: text[: len(text) // 2], "is damaged or not a plan"),
    "empty": (lambda text: "", "is damaged or not a plan"),
    "another JSON": (lambda text: json.dumps({"loss": [1, 2]}), "is not a plan"),
    "a list": (lambda text: "[1, 2]", "is not a plan"),
    "a number changed": (
        lambda text: text.replace('"clones":', '"clones":1'),
        "its checksum is wrong",
    ),
    "of the future": (lambda text: text.replace('"version":1', '"version":2'), "has version 2"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_plan_is_refused(net: Net, case: str, tmp_path: Path) -> None:
    damage, says = DAMAGED[case]
    path = tmp_path / "plan.json"
    expected().save(path)
    path.write_text(damage(path.read_text()))
    with net.graph.as_default():
        before = edges(net.graph)
        with pytest.raises(errors.PlanError, match="plan.json") as caught:
            ms.gradients(net.y, net.x, plan=path)
        assert edges(net.graph) == before
    assert says in str(caught.value)
    assert caught.value.argument == "plan"
