"""Figures of plans and explanations: their contents, and how they are written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memsaving_gradients as ms
from graph_tools.memory.timeline import Alive
from memsaving_gradients.errors import ArgumentError, MissingExtraError
from memsaving_gradients.reports.explanation import Layer, Parts, Point
from memsaving_gradients.reports.figures import plan_figure
from tests.helpers.reported import MIB, decision, explanation, plan, simulation


def panel(figure: Any, title: str) -> Any:
    """Return the axes with that title."""
    (found,) = [axes for axes in figure.axes if axes.get_title("left").startswith(title)]
    return found


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines() if line.get_label()[0] != "_"}


def names(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def widths(axes: Any) -> dict[str, list[float]]:
    """Return, by kind, the lengths of the pieces of the bars."""
    return {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}


def test_memory_over_the_step_plain_and_planned_with_the_budget() -> None:
    axes = panel(plan().plot(), "Memory over one step")
    drawn = lines(axes)
    assert set(drawn) == {
        "plain: at most 8.00 MiB",
        "planned: at most 4.00 MiB",
        "budget: 5.00 MiB (of the allocator's chunks)",
    }
    planned = drawn["planned: at most 4.00 MiB"].get_ydata()
    assert (np.array(planned) / MIB).tolist() == [1, 4, 2, 3]
    assert set(drawn["budget: 5.00 MiB (of the allocator's chunks)"].get_ydata()) == {5 * MIB}
    assert axes.get_ylabel() == "MiB alive"
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 8 * MIB


def test_no_line_for_a_budget_that_there_is_not_or_that_is_far_above() -> None:
    for budget in (None, 80 * MIB):
        drawn = lines(panel(plan(budget=budget).plot(), "Memory over one step"))
        assert len(drawn) == 2 and not any("budget" in label for label in drawn)


def test_long_timelines_are_drawn_with_their_peaks() -> None:
    size = np.ones(100_000, np.int64)
    size[4_321] = 9
    where, shown = plan_figure.thinned(size)
    assert len(shown) == plan_figure.POINTS and shown.max() == 9 and shown.sum() == len(shown) + 8
    assert abs(where[shown.argmax()] - 0.04321) < 1 / plan_figure.POINTS


def test_what_is_alive_at_the_peak_by_name_and_the_rest() -> None:
    largest = (
        Alive("net/a/Tanh:0", 2 * MIB, "forward", 0, 3),
        Alive("gradient_tape/net/b/ReluGrad:0", MIB, "backward", 1, 1),
        Alive("net/b/Relu_recomputed:0", MIB // 2, "recomputed", 1, 1),
        Alive("", MIB // 4, "scratch", 1, 1),
        Alive("net/tiny:0", 64, "forward", 1, 1),
    )
    axes = panel(plan(simulation=simulation(1, 4, largest=largest)).plot(), "Alive at")
    assert names(axes) == ["a/Tanh", "b/ReluGrad", "b/Relu_recomputed", "scratch space"]
    assert widths(axes)["backward"] == [0, MIB, 0, 0]
    assert axes.get_xlabel() == "MiB, and 256.00 KiB of others"


def test_the_fate_of_each_layer_and_what_has_no_bar() -> None:
    most = plan_figure.MOST_LAYERS
    made = plan(
        decisions=(
            decision("net/a/Tanh:0", MIB),
            decision("net/a/Mul:0", 2 * MIB, fate="recompute"),
            decision("net/b/Mul:0", 9 * MIB, fate="offload"),
            *(decision(f"net/c{k}/Mul:0", 64, fate="encode") for k in range(most)),
        )
    )
    axes = panel(made.plot(), "Fate of each layer")
    shown = widths(axes)
    assert names(axes)[:3] == ["b", "a", "c0"] and len(names(axes)) == most
    assert list(shown) == ["keep", "recompute", "encode", "offload"]
    assert [shown[fate][1] for fate in ("keep", "recompute", "offload")] == [MIB, 2 * MIB, 0]
    assert axes.get_xlabel() == "MiB, and 2 others: encode 128 B"


def test_fates_that_do_not_occur_are_not_in_the_legend() -> None:
    axes = panel(plan(decisions=(decision("a/b:0"),)).plot(), "Fate of")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["keep"]


def test_a_plan_of_nothing_is_drawn() -> None:
    made = plan(simulation=simulation(), simulation_plain=simulation(), budget=None)
    axes = panel(made.plot(), "Fate of")
    assert "nothing large is kept" in {text.get_text() for text in axes.texts}


def test_a_plan_of_a_file_is_drawn_without_what_it_does_not_have() -> None:
    made = plan(
        simulation=None,
        simulation_plain=None,
        chunks=(8 * MIB, 4 * MIB),
        decisions=(decision("a:0"),),
    )
    figure = made.plot()
    assert [axes.get_title("left") for axes in figure.axes] == ["Fate of each layer"]
    assert "read from a file" in figure.get_suptitle()
    with pytest.raises(ms.errors.PlanError, match="no timelines"):
        _ = made.at_peak


def test_the_curve_of_budgets_with_its_bound_and_the_least() -> None:
    axes = panel(explanation().plot(), "Extra time of each budget")
    drawn = lines(axes)
    assert set(drawn) >= {"extra time", "lower bound: no plan takes less"}
    time = drawn["extra time"]
    assert (np.array(time.get_xdata()) / MIB).tolist() == [8, 6, 3]
    assert np.array(time.get_ydata()) == pytest.approx([0, 10, 50])
    bound = drawn["lower bound: no plan takes less"].get_ydata()
    assert np.array(bound) == pytest.approx([0, 5, 20])
    assert [text.get_text() for text in axes.texts] == ["least budget 3.00 MiB"]
    assert axes.get_xlabel() == "budget, MiB"


def test_a_least_budget_that_takes_far_longer_is_said_and_flattens_nothing() -> None:
    known = explanation().curve
    far = Point(MIB, 0.125, 22.0, 0.3, 900)
    axes = panel(explanation(curve=(*known, far)).plot(), "Extra time of each budget")
    assert axes.get_ylim()[1] == pytest.approx(1.6 * 50)
    assert [text.get_text() for text in axes.texts] == ["least budget 1.00 MiB", "↑ 2200 %"]


def test_parts_and_layers_have_bars() -> None:
    figure = explanation().plot()
    parts, layers = panel(figure, "At the peak: 13.00 MiB"), panel(figure, "Activations by layer")
    assert names(parts) == ["activations", "temporaries", "gradients", "parameters", "slots"]
    assert widths(parts)["activations"] == [6 * MIB, 0, 0, 0, 0]
    assert names(layers) == ["block_0", "block_1", "block_2"]
    assert widths(layers)["activations"] == [3 * MIB, 2 * MIB, MIB]
    assert "3.00 MiB · 50 %" in {text.get_text() for text in layers.texts}


def test_an_explanation_of_nothing_is_drawn() -> None:
    nothing = explanation(
        parts=Parts(0, 0, 0, 0, 0),
        allocated_plain=0,
        layers=(),
        curve=(Point(0, 0.0, 0.0, 0.0, 0),),
    )
    assert panel(nothing.plot(), "Extra time of each budget")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "PNG"])
def test_figures_are_written_by_the_ending_of_the_name(tmp_path: Path, ending: str) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending.lower()]
    path = tmp_path / f"figure.{ending}"
    explanation().plot(path)
    first = path.read_bytes()
    assert first.startswith(begins)
    explanation().plot(str(path))
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("figure.bmp", r"give a file name that ends with \.png, \.svg, \.pdf"),
        ("nowhere/figure.png", "there is no folder 'nowhere'"),
    ],
)
def test_paths_that_cannot_be_written_are_refused(path: str, problem: str) -> None:
    for made in (plan(), explanation()):
        with pytest.raises(ArgumentError, match=problem):
            made.plot(path)


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    odd = ["net/$x^{$/a", "net/_b", "net/" + "long_" * 30 + "end", "net/日本/c"]
    found = explanation(layers=tuple(Layer(name, MIB, "") for name in odd))
    axes = panel(found.plot(tmp_path / "figure.png"), "Activations")
    shown = names(axes)
    assert shown[:2] == ["$x^{$/a", "_b"] and shown[3] == "日本/c"
    assert shown[2].startswith("…") and shown[2].endswith("end") and len(shown[2]) < 40


def test_the_style_of_the_user_is_left_alone(monkeypatch: Any) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "font.size", 23.0)
    figure = plan().plot()
    assert matplotlib.rcParams["font.size"] == 23.0
    assert panel(figure, "Memory").xaxis.label.get_size() < 15


def test_pyplot_knows_nothing_of_our_figures() -> None:
    from matplotlib import pyplot

    plan().plot()
    assert not pyplot.get_fignums()


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for made, name in ((plan(), "Plan"), (explanation(), "Explanation")):
        with pytest.raises(MissingExtraError, match=rf"{name}\.plot needs matplotlib, .*\[plot\]"):
            made.plot()
