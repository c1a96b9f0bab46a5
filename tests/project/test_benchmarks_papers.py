"""The founding figures: the published ones, how ours are computed, and the printed and written
text. Little is planned, nothing measured."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import running
from benchmarks.__main__ import DOCS
from benchmarks.experiment import Experiment, Job
from benchmarks.networks.preactivation import SIZES
from benchmarks.papers import checkpointing, chen, meng, rotor, sohoni
from benchmarks.papers.experiment import EXPERIMENT, WORKS, experiment_of
from benchmarks.papers.page import page
from benchmarks.papers.rows import Line, Work, planned_step
from benchmarks.records import read
from benchmarks.running import results_of
from benchmarks.tables import print_results
from benchmarks.techniques import attention
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.graphs import chain


@pytest.mark.parametrize(
    ("better", "ours", "passed"),
    [
        ("more", 4.0, True),
        ("more", 3.9, False),
        ("less", 4.0, True),
        ("less", 4.1, False),
        ("same", 4.8, True),
        ("same", 3.1, False),
        ("more", None, True),
    ],
)
def test_lines_are_judged(better: Any, ours: float | None, passed: bool) -> None:
    assert Line("a", 4.0, ours, better=better).passed is passed


def test_jobs_have_names_of_their_works() -> None:
    names = [name for work in WORKS for name in work.jobs]
    assert len(names) == len(set(names))
    for work in WORKS:
        assert all(name.startswith(f"{work.key}-") for name in work.jobs)
        # Without results, no line has a figure of ours.
        assert all(line.ours is None for line in work.lines({}))


def test_every_published_depth_is_planned() -> None:
    assert list(checkpointing.PUBLISHED) == list(SIZES)
    assert set(checkpointing.MEASURED) <= set(SIZES)


def test_layers_that_plain_training_has_room_for() -> None:
    # 92 layers take 100 bytes, 1001 take 1009: a byte for each layer, and 8 more.
    result = {"shallow": 100, "plain": 1009, "ours": 108, "time": 1.1, "control": 1.0}
    assert checkpointing.as_large_plainly(result) == pytest.approx(100)
    ten, time = checkpointing.lines({"checkpointing-ten": result})
    assert ten.ours == pytest.approx(10.01) and ten.passed and time.passed
    late = {**result, "ours": 120, "time": 1.3}
    assert [line.passed for line in checkpointing.lines({"checkpointing-ten": late})] == [False] * 2


def test_ratios_by_depth() -> None:
    results = {
        "checkpointing-18": {"peak_plain": 600e6, "peak": 300e6, "extra_time": 0.2},
        "checkpointing-18-measured": {"plain": {"peak": 600e6}, "ours": {"peak": 400e6}},
    }
    first, second = checkpointing.lines(results)
    assert first.published == second.published == 818 / 505
    assert (first.ours, first.how, first.passed) == (2.0, "planned", True)
    assert (second.ours, second.how, second.passed) == (1.5, "measured", False)


def test_a_small_step_is_planned_without_being_run() -> None:
    sizes = {"size": 50, "batch": 2, "image": 64, "width": 4, "classes": 10}
    found = planned_step("imagenet_resnet", sizes)
    assert 0 < found["peak"] < found["peak_plain"]
    assert found["mode"] == "memory" and found["extra_time"] > 0


def test_periodic_plans_that_count() -> None:
    row = {"plain": 100, "peak": 50, "ours": 50, "literal_extra": 0.32, "periodic_extra": 0.21}
    fits, late = {**row, "ours_extra": 0.1}, {**row, "ours": 51, "ours_extra": 0.0}
    results: dict[str, Any] = {"rotor-vgg19": {"segments": {"2": fits, "3": late}}}
    (vgg,) = rotor.lines(results)
    assert vgg.ours == pytest.approx(0.2) and vgg.published is None
    assert "none of our plans fits at 1 more" in vgg.note and "+10.0%" in vgg.note
    allocated = {"plain": 100, "periodic": 50, "ours": 49}
    results["rotor-vgg19-measured"] = {
        "ratio": 1.15,
        "control": 1.0,
        "segments": 4,
        "allocated": allocated,
    }
    timed = rotor.lines(results)[1]
    assert timed.ours == pytest.approx(0.15) and timed.how == "measured"
    # The mean is over all networks.
    results |= {f"rotor-{name}": {"segments": {"2": fits}} for name in rotor.NETWORKS}
    mean = rotor.lines(results)[0]
    assert mean.ours == pytest.approx(0.2) and mean.published == 0.172 and mean.passed


def test_where_no_plan_of_ours_fits_nothing_is_said_on_average() -> None:
    row = {
        "plain": 100,
        "peak": 50,
        "ours": 51,
        "literal_extra": 0.3,
        "periodic_extra": 0.2,
        "ours_extra": 0.0,
    }
    (line,) = rotor.lines({"rotor-vgg19": {"segments": {"2": row}}})
    assert line.ours is None and "at 1 more" in line.note


def test_tables_of_meng() -> None:
    both = {"share": 0.2, "recompute": 0.2, "offload": None, "both": 0.05}
    results = {
        "meng-1a-ResNet-50": both,
        "meng-1b-ResNet-101": {**both, "both": None},
        "meng-1b-ResNet-1001": {
            "parameters": 10**9,
            "plain": 50 * 10**9,
            "peak": 4 * 10**9,
            "extra": 0.3,
        },
        "meng-2a-4": {"plain": {"batch": 10}, "ours": {"batch": 30}},
        "meng-2b-400": {"plain": 1, "ours": 111},
    }
    found = {line.what.split(":")[0]: line for line in meng.lines(results)}
    assert found["1a, ResNet-50"].ours == 0.05 and found["1a, ResNet-50"].passed
    assert "swapping does not fit" in found["1a, ResNet-50"].note
    assert found["1b, ResNet-101"].ours == 0.2 and not found["1b, ResNet-101"].passed
    assert found["1b, ResNet-1001, batch 32"].ours == 5000
    assert found["2a, LSTM of 4 layers"].ours == 3 and found["2a, LSTM of 4 layers"].published == 2
    assert found["2b, NMT of 400 steps"].published == 30
    assert found["1a, GAN"].ours is None


def test_nothing_that_fits_is_not_a_published_figure_reached() -> None:
    none = {"share": 0.2, "recompute": None, "offload": None, "both": None}
    line = meng.lines({"meng-1a-ResNet-50": none})[0]
    assert not line.passed and line.ours is None and "both does not fit" in line.note


def test_sizes_of_weights_do_not_count() -> None:
    graph = chain([1] * 8)
    forward = graph.producer < graph.first_backward
    bare = chen.without(graph, {1})
    assert (bare.size[forward] == graph.size[forward]).all()
    assert not bare.size[~forward].any()
    assert simulate(bare, plain(bare)).peak < simulate(graph, plain(graph)).peak
    assert np.array_equal(chen.without(graph, {7}).size, graph.size)


def test_the_largest_batch_is_found_on_a_line() -> None:
    asked: list[int] = []

    def measure(batch: int) -> int:
        asked.append(batch)
        return 100 + 10 * batch

    found = attention.largest_within(1000, 30, measure)
    assert found["batch"] == 90 and asked == [30, 60, 90]
    # Nothing fits: no batch.
    assert attention.largest_within(50, 4, measure, tries=2)["batch"] == 0


def test_accuracy_is_that_of_the_trained_networks() -> None:
    found = sohoni.accuracy(False)
    (line,) = sohoni.lines({"sohoni-accuracy": found})
    assert 0.9 < found["all"] < 1 and line.ours is not None and line.passed


def test_rows_of_another_benchmark_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(job: Job) -> dict[str, Any]:
        asked.append(job.row)
        return {"value": len(asked)}

    other = Experiment("other", lambda settings: ["a"], measure, (), lambda results: [])
    monkeypatch.setattr(running, "RESULTS", tmp_path)
    for again, value in ((False, 1), (False, 1), (True, 2)):
        found = running.rows_of(other, ["a"], again=again)
        assert found["a"]["value"] == value
    assert asked == ["a", "a"]
    assert (tmp_path / "other.json").exists()


def work(lines: list[Line]) -> Work:
    return Work("a", "A work", "a source", "About it.", {"a-1": lambda again: {}}, lambda _: lines)


def test_tables_and_pages_have_both_figures() -> None:
    lines = [
        Line("memory", 48.0, 47.5, "GB", "planned", "same", "a note"),
        Line("time", 0.3, 0.35, "%", "measured", "less"),
        Line("unknown", 2.0, None),
    ]
    text = io.StringIO()
    print_results(experiment_of((work(lines),)), {}, lines, Console(file=text, width=140))
    for part in ("48.00 GB", "47.50 GB", "planned", "35.0 %", "miss", "pass", "a note"):
        assert part in text.getvalue()
    stamp = {"tensorflow": "2.21.0", "machine": "x86_64, 2 cores"}
    written = page([(work(lines), lines)], {"a-1": stamp, "a-2": stamp})
    assert "| memory | 48.00 GB | 47.50 GB | planned | yes | a note |" in written
    assert "| time | 30.0 % | 35.0 % | measured | **no** |  |" in written
    assert "| unknown | 2.00 × | – |  |  |  |" in written
    assert written.count("TensorFlow 2.21.0, x86_64, 2 cores") == 1
    assert "Without results" not in written
    assert "not in these tables: `a-1`." in page([(work(lines), lines)], {})


def test_the_page_is_that_of_the_results() -> None:
    results = read(results_of(EXPERIMENT))
    assert EXPERIMENT.page is not None
    page = (DOCS / EXPERIMENT.page.file).read_text(encoding="utf-8")
    assert page == EXPERIMENT.page.written(results)
    lines = EXPERIMENT.bars(results)
    figures = [line.ours for line in lines if line.ours is not None]  # type: ignore[attr-defined]
    assert len(figures) > 20 and all(math.isfinite(figure) for figure in figures)
