"""Plans in files: written in one process, applied in another, refused for another graph."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.reports.plan_file import packed_steps, unpacked_steps
from memsaving_gradients.schedules.schedule import Step
from tests.helpers.fresh import fresh
from tests.helpers.greedy import greedy

v1 = tf.compat.v1
errors = ms.errors


def build(
    *,
    layers: int = 16,
    width: int = 2048,
    kind: str = "tanh",
    dropout: bool = False,
    **options: Any,
) -> tuple[tf.Graph, ms.Plan]:
    """Return the graph of a chain with gradients, and their plan."""
    with tf.Graph().as_default() as graph:
        batch = options.pop("batch", 8)
        x = y = v1.placeholder(tf.float32, [batch, width])
        for k in range(layers):
            y = tf.tanh(y) if k != 5 else getattr(tf.math, kind)(y)
            if dropout:
                y = tf.nn.dropout(y, 0.5, seed=k)
        with tf.name_scope(options.pop("scope", "here")):
            ms.gradients(y, x, **options)
    return graph, ms.plans(graph)[-1]


@functools.cache
def for_memory() -> ms.Plan:
    return build(checkpoints="memory")[1]


def edges(graph: tf.Graph) -> dict[str, list[str]]:
    # TensorFlow lists control inputs that were added later in any order.
    return {
        op.name: [t.name for t in op.inputs] + sorted(c.name for c in op.control_inputs)
        for op in graph.get_operations()
    }


def apply_in_this_process(path: str, dropout: bool) -> dict[str, Any]:
    """Apply the plan of a file (in a process of its own)."""
    graph, plan = build(plan=path, dropout=dropout)
    return {"edges": edges(graph), "peak": plan.peak, "allocated": plan.allocated, "str": str(plan)}


@pytest.mark.parametrize("dropout", [False, True])
def test_applied_in_another_process(tmp_path: Path, dropout: bool) -> None:
    path = str(tmp_path / "plan.json")
    graph, plan = build(planner="memory", dropout=dropout)
    plan.save(path)
    result = fresh(
        "tests.reports.test_plan_file:apply_in_this_process", {"path": path, "dropout": dropout}
    )
    assert plan.clones
    assert plan.packed == dropout
    assert result["edges"] == edges(graph)
    assert (result["peak"], result["allocated"]) == (plan.peak, plan.allocated)
    assert result["str"] == str(plan)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoints": "memory"},
        {"checkpoints": "speed"},
        {"checkpoints": ["Tanh_4", "Tanh_9"]},
        # The first plan keeps these limits: more plans would leave idle ops behind.
        {"budget": 0.71, "planner": greedy},
        {"max_slowdown": 1.3, "planner": greedy},
        {"budget": 0.5, "planner": greedy, "xla": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_same_after_a_file(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    graph, plan = build(**options)
    plan.save(path)
    loaded = ms.Plan.load(path)
    assert loaded == plan
    assert loaded.fingerprint == plan.fingerprint
    assert str(loaded) == str(plan)
    assert (loaded.allocated, loaded.allocated_plain) == (plan.allocated, plan.allocated_plain)
    again, used = build(plan=loaded, xla=options.get("xla"))
    assert used == plan
    assert edges(again) == edges(graph)
    assert used.timeline.tolist() == plan.timeline.tolist()


def test_plan_with_no_clones(tmp_path: Path) -> None:
    with pytest.warns(errors.PlanNote):
        _, plan = build(budget="1GiB")
    plan.save(tmp_path / "plan.json")
    graph, used = build(plan=tmp_path / "plan.json")
    assert used.clones == 0
    assert not [name for name in edges(graph) if "recomputed" in name]


def test_loaded_plan_has_no_timeline(tmp_path: Path) -> None:
    plan = for_memory()
    plan.save(tmp_path / "plan.json")
    with pytest.raises(errors.PlanError, match="which has no timelines; apply it"):
        _ = ms.Plan.load(tmp_path / "plan.json").timeline


def test_names_do_not_matter() -> None:
    plan = for_memory()
    _, used = build(plan=plan, scope="there")
    assert used.peak == plan.peak


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"layers": 17}, "the plan is for 36 ops, 17 of them forward; this graph has 38 and 18"),
        ({"kind": "sin"}, "op 6 is a Tanh in the plan and a Sin ('Sin') here"),
        ({"width": 4096}, "op 0, the Placeholder 'Placeholder', has other inputs or another shape"),
        ({"dropout": True}, "the plan is for 36 ops"),
    ],
    ids=lambda options: "-".join(map(str, options)) if isinstance(options, dict) else str(options),
)
def test_plan_for_another_graph_is_refused(other: dict[str, Any], says: str) -> None:
    plan = for_memory()
    with pytest.raises(errors.PlanError) as caught:
        build(plan=plan, **other)
    assert says in str(caught.value)


def test_refusal_names_what_was_given(tmp_path: Path) -> None:
    plan = for_memory()
    path = tmp_path / "plan.json"
    plan.save(path)
    for asked, shown in (
        (path, repr(str(path))),
        (ms.Plan.load(path), repr(str(path))),
        (plan, repr(plan)),
        ([plan, path], f"[{plan!r}, '{path}"[:100]),
    ):
        with pytest.raises(errors.PlanError) as caught:
            build(plan=asked, layers=17)
        assert str(caught.value).startswith(f"plan={shown}")
    with pytest.raises(errors.PlanError) as caught:
        _ = ms.Plan.load(path).timeline
    assert str(caught.value).startswith(f"plan={str(path)!r}: was read")
    steps = tuple(step for step in plan.schedule.steps if not step.copy)
    wrong = replace(ms.Plan.load(path), schedule=replace(plan.schedule, steps=steps))
    with pytest.raises(errors.PlanError, match="cannot be applied here") as caught:
        build(plan=wrong)
    assert str(caught.value).startswith(f"plan={str(path)!r}: ")


def test_plan_that_would_break_its_budget_is_refused_by_its_file(tmp_path: Path) -> None:
    def step(**options: Any) -> tuple[ms.Plan, ...]:
        with tf.Graph().as_default() as graph:
            y = v1.placeholder(tf.float32, [64, 256])
            ws = [v1.placeholder(tf.float32, [256, 256]) for _ in range(12)]
            for w in ws:
                y = tf.tanh(y @ w)
            ms.gradients(y, ws, **options)
        return ms.plans(graph)

    (plan,) = step(budget=0.8, planner=greedy)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(errors.PlanError, match="more than its budget of") as caught:
        step(plan=tmp_path / "plan.json", hold_gradients=True)
    assert "plan.json" in str(caught.value)


def test_plan_for_another_batch_is_refused() -> None:
    _, plan = build(checkpoints="memory", batch=None, batch_size=16)
    with pytest.raises(errors.PlanError, match="batch_size=16, and this is batch_size=32"):
        build(plan=plan, batch=None)
    _, used = build(plan=plan, batch=None, batch_size=16)
    assert used == plan


def test_refusal_leaves_the_graph_usable() -> None:
    plan = for_memory()
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [4096])
        for _ in range(16):
            y = tf.sin(y)
        with pytest.raises(errors.PlanError):
            ms.gradients(y, x, plan=plan)
        assert not ms.plans(graph)
        ms.gradients(y, x, checkpoints="memory")
    assert ms.plans(graph)[-1].clones


def test_wrong_schedule_is_refused() -> None:
    plan = for_memory()
    assert plan.schedule is not None
    steps = tuple(step for step in plan.schedule.steps if not step.copy)
    wrong = replace(plan, schedule=replace(plan.schedule, steps=steps))
    with pytest.raises(errors.PlanError, match="cannot be applied here: op .* has not made"):
        build(plan=wrong)


def test_one_of_several() -> None:
    small = for_memory()
    _, large = build(checkpoints="memory", layers=20)
    with ms.patched(plan=[small, large]):
        for layers, expected in ((20, large), (16, small)):
            with tf.Graph().as_default() as graph:
                x = y = v1.placeholder(tf.float32, [8, 2048])
                for _ in range(layers):
                    y = tf.tanh(y)
                tf.gradients(y, x)
            assert ms.plans(graph)[-1].peak == expected.peak


@pytest.mark.parametrize(
    "options", [{"budget": 0.5}, {"checkpoints": "memory"}, {"planner": "memory"}], ids=str
)
def test_plan_excludes_other_wishes(options: dict[str, Any]) -> None:
    plan = for_memory()
    with pytest.raises(errors.ArgumentError, match="cannot be combined with plan="):
        build(plan=plan, **options)


def test_compare() -> None:
    _, tight = build(budget=0.5, planner=greedy)
    _, loose = build(budget=0.8, planner=greedy)
    comparison = tight.compare(loose)
    assert isinstance(comparison, ms.Comparison)
    assert comparison.same_graph
    assert comparison.changed
    assert all(a is None or b is None or a.fate != b.fate for a, b in comparison.changed)
    rows = {what: (a, b) for what, a, b in comparison.rows}
    assert rows["extra time"][0] == f"{100 * tight.extra_time:.1f} %"
    assert rows["peak"] == (f"{tight.peak:,}", f"{loose.peak:,}")
    assert rows["tensors that change"][1] == str(len(comparison.changed))
    assert str(comparison).count("\n") == len(comparison.rows)
    assert not loose.compare(loose).changed
    _, other = build(checkpoints="memory", layers=20)
    assert "different graphs" in str(tight.compare(other))


def traced(name: str, **options: Any) -> ms.Plan:
    """Return the plan of a network of numbered blocks under a scope."""
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [options.pop("width", 4096)])
        for k in range(options.pop("layers", 12)):
            y = tf.tanh(y, name=f"{name}/block_{k}/Tanh")
        ms.gradients(y, x, **options)
    return ms.plans(graph)[-1]


def test_compare_tensors_of_the_same_graph_by_position() -> None:
    one, two = traced("functional_14", checkpoints="memory"), traced("other", checkpoints="speed")
    same = traced("functional_15", checkpoints="memory")
    assert not one.compare(same).changed
    pairs = one.compare(two).pairs
    assert all(a and b for a, b in pairs)
    assert len(pairs) == len(one.decisions)


def test_compare_tensors_of_different_graphs_by_name() -> None:
    one = traced("functional_14", checkpoints="memory")
    two = traced("functional_15", checkpoints="memory", width=2048, layers=13)
    comparison = one.compare(two)
    assert not comparison.same_graph
    both = [(a.layer, b.layer) for a, b in comparison.pairs if a and b]
    assert both == [(f"functional_14/block_{k}", f"functional_15/block_{k}") for k in range(12)]
    (new,) = [b for a, b in comparison.pairs if a is None]
    assert new is not None
    assert new.layer == "functional_15/block_12"


steps_strategy = st.lists(
    st.builds(Step, st.integers(0, 30), st.integers(0, 3), st.lists(st.integers(0, 2)).map(tuple))
)


@given(steps_strategy)
def test_steps_in_a_file(steps: list[Step]) -> None:
    expected = [Step(op, copy, reads if copy or any(reads) else ()) for op, copy, reads in steps]
    assert list(unpacked_steps(packed_steps(steps))) == expected


def test_file_of_a_long_chain_is_small(tmp_path: Path) -> None:
    _, plan = build(layers=400, width=64, checkpoints="memory")
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 400 * 200
