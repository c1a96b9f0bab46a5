"""The benchmarks of planning: instances and their published peaks, periodic cuts, bars. Little is
planned, nothing measured."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import probes
from benchmarks.__main__ import main
from benchmarks.claims import budgets, deep, explain, first_step, largest
from benchmarks.experiment import Experiment, Figure, Job
from benchmarks.networks import SMALL
from benchmarks.planning import instance_files, instances, periodic
from benchmarks.planning.layered import Instance, fcn8, mobilenet, resnet50, unet_vgg, vgg
from benchmarks.tables import print_figures
from graph_tools.errors import GraphToolsError
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.sampling import examples


@pytest.mark.parametrize(
    ("made", "nodes", "edges", "peak"),
    [
        (vgg, 45, 87, 15_825_108_992),
        (fcn8, 73, 149, 13_484_795_520),
        (unet_vgg, 69, 144, 20_959_461_376),
    ],
)
def test_layered_networks_have_the_published_peaks(
    made: Any, nodes: int, edges: int, peak: int
) -> None:
    instance = made()
    assert (len(instance.reads), instance.edges, instance.peak) == (nodes, edges, peak)


@pytest.mark.parametrize("made", [vgg, mobilenet, resnet50])
def test_training_graphs_of_instances_peak_as_instances_do(made: Any) -> None:
    instance = made()
    graph = instance.graph()
    assert simulate(graph, plain(graph)).peak == instance.peak
    assert graph.clonable.sum() == graph.first_backward == (graph.length - 1) // 2
    assert 0 < instance.least < instance.peak


def graph_of(draw: np.random.Generator, nodes: int) -> Instance:
    reads = [
        tuple(sorted({int(v) for v in draw.integers(0, max(k, 1), min(k, 3))}))
        for k in range(nodes)
    ]
    sizes = tuple(int(size) for size in draw.integers(1, 50, nodes))
    return Instance("random", tuple(reads), sizes, (1.0,) * nodes)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_peaks_are_what_counting_one_step_after_the_other_gives(seed: int, nodes: int) -> None:
    instance = graph_of(np.random.default_rng(seed), nodes)
    counted = max(
        sum(
            instance.size[v]
            for v in range(step + 1)
            if v == step or any(v in instance.reads[later] for later in range(step, nodes))
        )
        for step in range(nodes)
    )
    graph = instance.graph()
    assert instance.peak == counted == simulate(graph, plain(graph)).peak
    assert instance.least <= counted
    assert graph.losable.all()


NODES = [
    {"id": 0, "cost_ram": 8, "cost_cpu": 1, "backward": False},
    {"id": 1, "cost_ram": 4, "cost_cpu": 2, "backward": False},
    {"id": 2, "cost_ram": 8, "cost_cpu": 3, "backward": True},
]
LINKS = [{"source": 0, "target": 1}, {"source": 1, "target": 2}, {"source": 0, "target": 2}]


def test_instances_are_read_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"nodes": NODES, "links": LINKS}))
    other = {
        "graph": {"order": [2, 1, 3]},
        "nodes": [{"name": name, "out_cost": name, "duration": 5} for name in (1, 2, 3)],
        "links": [{"0": 2, "1": 1}, {"0": 1, "1": 3}],
    }
    (tmp_path / "b.json").write_text(json.dumps(other))
    first, second = instance_files.read_folder(tmp_path)
    assert first == Instance("a", ((), (0,), (0, 1)), (8, 4, 8), (1, 2, 3), 2)
    assert second == Instance("b", ((), (0,), (1,)), (2, 1, 3), (5, 5, 5))
    assert second.graph().first_backward == 3


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "no graph"),
        ({"nodes": NODES, "links": [{"source": 2, "target": 1}]}, "order"),
        ({"nodes": [{"id": 0, "cost_ram": 1}], "links": []}, "cost_cpu"),
    ],
)
def test_files_that_are_no_instances(tmp_path: Path, document: Any, problem: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=problem):
        instance_files.read(file)


def test_instances_are_planned_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    assert main(["--only", "instances/no*"]) == 2
    said = ["--only", "instances/VGG16*", "--set", "budgets=0.9,0.5", "--json", str(results)]
    assert main(said) == 0
    written = json.loads(results.read_text())
    fits, impossible = written["cases"]["VGG16 0.9"], written["cases"]["VGG16 0.5"]
    assert fits["fits"] and fits["problem"] is None and fits["known"] is None
    assert fits["bound"] <= fits["extra"] < 2
    assert not impossible["fits"] and not impossible["possible"]
    assert impossible["found"] >= impossible["least"] * impossible["peak"]
    out = capsys.readouterr().out
    assert "least 0.831" in out and "from 0.831" in out


def test_best_known_figures_are_bars() -> None:
    row = {
        "instance": "a",
        "planner": "auto",
        "large": False,
        "share": 0.9,
        "seconds": 1,
        "problem": None,
        "known": 2.0,
        "extra": 2.05,
        "fits": True,
    }
    figures = {f.what: f.passed for f in instances.bars({"a": row, "b": {**row, "extra": 2.2}})}
    assert figures == {
        "seconds to plan": True,
        "schedules that are not valid": True,
        "budgets met in the literature, not here": True,
        "points above the best known extra time": False,
    }
    unmet = instances.bars({"a": {**row, "fits": False, "seconds": 11}})
    assert [figure.passed for figure in unmet] == [False, True, False]


def test_periodic_cuts_are_those_of_checkpoint_sequential() -> None:
    ends = list(range(16))  # 17 blocks
    assert periodic.cuts(ends, 2) == [7]
    assert periodic.cuts(ends, 4) == [3, 7, 11]
    assert periodic.cuts(ends, 17) == ends


def test_periodic_plans_of_a_small_transformer() -> None:
    sizes = {**SMALL["transformer"][1], "layers": 4, "named": True}
    step = periodic.captured_step("transformer", sizes, profile=False)
    ends = list(periodic.named_ends(step, r"block\d+").values())
    assert len(ends) == 5
    with pytest.raises(ValueError, match="layer is called 'bloc'"):
        periodic.named_ends(step, "bloc")
    plans = dict(periodic.periodic_plans(step.graph, ends))
    rows = {str(k): periodic.beside(step.graph, row, "memory") for k, row in plans.items()}
    assert sorted(rows) == ["2", "3", "4"]
    for row in rows.values():
        assert 0 < row["periodic_extra"] <= row["literal_extra"] < 1
        assert row["peak"] <= row["plain"]
    rows = {"2": {**rows["2"], "ratio": 1.5}, "3": {**rows["3"], "ratio": 0.1}}
    worst = periodic.bars({"a": {"segments": rows}})
    assert [(f.value, f.passed) for f in worst[:2]] == [(0.8, False), (1.5, False)]


PLAN = {"allocated_plain": 99, "allocated": 49, "peak_plain": 90, "peak": 48}


def measured(share: float, peak: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "net",
        "share": share,
        "plain": {"peak": 100, "requested": 90},
        "ours": {"peak": peak, "requested": 50, "plan": {**PLAN, "budget": 52}},
        "allowed": int(100 * share),
        "refused": None,
        "time": {"ratio": 1.2, "control": 1.01},
        "predicted": {"static": 0.3, "profiled": 0.15},
        "planning": 1.0,
        **more,
    }


def test_bars_of_budgets() -> None:
    refused = {"refused": {"least": 52, "fraction": 0.52}, "allowed": 35, "share": 0.35}
    results = {
        "net-60": measured(0.6, 50),
        "net-35": {**measured(0.35, 50), **refused},
    }
    values = {figure.what: figure for figure in budgets.bars(results)}
    assert values["worst step / share of plain peak"].value == pytest.approx(50 / 60)
    assert values["worst step / budget planned for"].count == 2
    extra = values["extra step time at 60%, median over models where it is feasible"]
    assert extra.value == pytest.approx(0.2) and not extra.passed
    under = values["simulated against measured peak in requested, most under"]
    assert under.value == pytest.approx(0.04) and under.count == 2
    wrong = values["predicted against measured extra time, profiled, median error"]
    assert wrong.value == pytest.approx(0.25)
    assert [line[0] for line in budgets.COLUMNS.lines(results)] == ["net-60", "net-35"]
    (note,) = budgets.notes(results)
    assert "the least budget that the error names, 52.0% of plain training" in note
    text = io.StringIO()
    print_figures([Figure("x", 0.5, 0.1, True)], Console(file=text, width=180))
    assert "50.00%" in text.getvalue() and "≤ 10.00%" in text.getvalue()


def run_all(experiment: Experiment, rows: list[str], **settings: Any) -> dict[str, dict[str, Any]]:
    """Run all rows in turn and return their results."""
    made: dict[str, dict[str, Any]] = {}
    for row in rows:
        job = Job(row, settings={**experiment.defaults, **settings}, made=made)
        made[row] = experiment.run(job)
    return made


def test_refused_budgets_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fresh(target: str, **kwargs: Any) -> dict[str, Any]:
        if target.endswith(":peak"):
            return {"peak": 100}
        if target.endswith("ratio"):
            return {"ratio": 1.1, "control": 1.0, "predicted": 0.1}
        budget = kwargs["settings"]["budget"]
        asked.append(budget)
        if isinstance(budget, float) and budget < 0.5:
            return {"refused": {"least": 50, "fraction": 0.5, "budget": 1, "seconds": 1}}
        plan = {**PLAN, "extra_time": 0.2, "budget": 50}
        return {"peak": 49, "plan": plan, "seconds": {"gradients": 3, "tensorflow": 1}}

    monkeypatch.setattr(budgets, "fresh", fresh)
    monkeypatch.setitem(budgets.MODELS, "net", ("unet", {}))
    shares = [0.6, 0.45, 0.35]
    rows = [f"net-{100 * share:g}" for share in shares]
    found = run_all(budgets.EXPERIMENT, rows, budgets=shares)
    assert asked == [0.6, 0.45, 50, 0.35]
    assert list(found) == ["net-60", "net-45", "net-35"]
    assert found["net-60"]["refused"] is None and found["net-60"]["planning"] == 2
    assert found["net-35"]["refused"]["least"] == 50 and found["net-35"]["allowed"] == 35
    assert found["net-60"]["predicted"] == {"static": 0.2, "profiled": 0.1}


def test_the_least_budget_named_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"refused": {"least": 50, "fraction": 0.5, "budget": 1, "seconds": 1}}
    answers = {"peak": {"peak": 100}, "budget_peak": refusal}
    monkeypatch.setattr(budgets, "fresh", lambda target, **kwargs: answers[target.split(":")[1]])
    with pytest.raises(GraphToolsError, match="is refused"):
        run_all(budgets.EXPERIMENT, ["unet-35"], pairs=0)


def test_a_budget_is_measured_and_its_plan_saved(tmp_path: Path) -> None:
    chain = {"length": 16, "size": 2**14}
    file = str(tmp_path / "plan.json")
    done = probes.budget_peak("tanh_chain", chain, save=file, settings={"budget": 0.5})
    assert done["peak"] > 0 and done["plan"]["budget"] < done["plan"]["allocated_plain"]
    timed = probes.budget_ratio("tanh_chain", chain, plan=file, pairs=1, profile=False)
    assert timed["predicted"] == pytest.approx(done["plan"]["extra_time"])
    refused = probes.budget_peak("tanh_chain", chain, save=file, settings={"budget": 0.01})
    assert refused["refused"]["least"] > refused["refused"]["budget"]


def test_bars_of_the_deep_network() -> None:
    rows = {"d": measured(1 / 10, 9, model=deep.NAME), "f": measured(0.3, 31, model=deep.NAME)}
    found = deep.bars({**rows, "other": measured(1 / 10, 90)})
    assert [(f.what, f.passed) for f in found] == [
        ("d: seconds to plan", True),
        ("d: worst step / budget", True),
        ("d: step time / plain", False),
        ("f: seconds to plan", True),
        ("f: worst step / budget", False),
    ]
    assert math.isclose(min(deep.TIMES), 1 / 40)


def explained_row(**changes) -> dict:
    """Return a row of ``benchmarks.claims.explain`` that meets every bar."""
    parts = {**dict.fromkeys(explain.PARTS, 1000), "temporaries": 10}
    row = {
        "parts": parts,
        "measured": {**parts, "temporaries": 1},
        "gaps": {"0.6": [4.0, 3.5], "0.45": [9.0, 6.5]},
        "seconds": 14,
        "tracing": 5,
        "curve": [[100, 1.0, 0.0, 0.0], [50, 0.5, 0.2, 0.1]],
    }
    return row | changes


def test_parts_and_gaps_are_judged():
    row = explained_row()
    assert all(figure.passed for figure in explain.bars({"resnet50": row, "unet": row}))
    off = explained_row(measured={**row["measured"], "slots": 1100})
    wide = explained_row(gaps={"0.6": [4.0, 0.5], "0.45": [9.0, 6.5]})
    missed = [
        [figure.what for figure in explain.bars({"resnet50": bad}) if not figure.passed]
        for bad in (off, wide, explained_row(seconds=16))
    ]
    assert missed == [
        ["a part off by (resnet50 slots)"],
        ["points above the bound (resnet50 at 0.6)"],
        ["seconds to explain ResNet-50"],
    ]
    (line,) = explain.COLUMNS.lines({"unet": row})
    assert "9.0 6.5 %" in line


@pytest.mark.parametrize(("named", "reached"), [(8, 8), (8, 7), (8, 10), (1, 1), (2, 1), (1, 0)])
def test_the_largest_batch_that_runs_is_found_from_the_named_one(named, reached):
    tried = []

    def runs(batch):
        tried.append(batch)
        return batch <= reached

    assert largest._most(runs, named) == reached
    assert len(tried) == len(set(tried))


def test_largest_batches_are_judged():
    results = {
        "batch": 20,
        "plain_ran": 10,
        "ran": True,
        "outcomes": [[30, 1, "ResourceExhausted"]],
    }
    assert all(figure.passed for figure in largest.bars({"net": results}))
    for bad in ({"ran": False}, {"plain_ran": 11}, {"outcomes": [[30, 1, "ran"]]}):
        assert sum(not figure.passed for figure in largest.bars({"net": {**results, **bad}})) == 1


def test_first_steps_have_bars_but_for_budgets() -> None:
    run = {"wall": 2.0, "processor": 3.0, "runs": [{}]}
    slow = {"wall": 3.2, "processor": 3.0, "runs": [{}]}
    results = {
        "mixed-500": {"plain": run, "gradients": slow, "budget": slow},
        "import": {"wall": 0.2, "processor": 0.4, "runs": [{}]},
    }
    figures = {figure.what: (figure.value, figure.passed) for figure in first_step.bars(results)}
    assert figures == {
        "mixed-500: gradients, wall time / plain": (1.6, False),
        "mixed-500: gradients, processor time / plain": (1.0, True),
        "import: wall seconds": (0.2, True),
        "import: processor seconds": (0.4, False),
    }
    assert len(first_step.CASES) == 12


@pytest.mark.parametrize("way", ["plain", "gradients", "patched"])
def test_a_first_step_is_counted(way: str) -> None:
    result = first_step.first_step("mixed", SMALL["mixed"][1], way)
    assert 0 < result["traced"] < result["processor"]
    assert 100 < result["forward"] < result["ops"]
    assert ("peaks" in result) == (way != "plain")
