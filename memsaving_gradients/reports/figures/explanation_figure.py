"""An explanation as a figure: the extra time of budgets, parts at the peak, largest layers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from memsaving_gradients.budget import format_bytes, format_share
from memsaving_gradients.reports.explanation_values import ExplanationValues
from memsaving_gradients.reports.figures.drawing import (
    COLORS,
    Bar,
    blank,
    bytes_axis,
    halves,
    horizontal_bars,
    percent_of,
    sized,
    unit_for,
)
from memsaving_gradients.reports.plan_text import common_scope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["figure", "headline"]

#: Layout: bars of the figure; a text gives the bytes of the other layers.
MOST_LAYERS = 14
#: Layout: the least budget's extra time is written, not drawn, above this many times the next one.
FAR = 8
ORDER = ("activations", "temporaries", "gradients", "parameters", "slots")


def figure(explanation: ExplanationValues) -> Figure:
    """Draw an explanation; call within `drawing.styled`."""
    shown = max(min(len(explanation.layers), MOST_LAYERS), len(ORDER))
    below = 1.2 + 0.26 * shown
    drawn = blank(11, below + 4.4)
    top, bottom = halves(drawn, 4.2, below)
    _draw_curve(top.subplots(), explanation)
    parts, layers = bottom.subplots(1, 2, width_ratios=(2, 3))
    _draw_parts(parts, explanation)
    _draw_layers(layers, explanation)
    drawn.suptitle(headline(explanation), fontsize=12, fontweight="bold")
    return drawn


def headline(explanation: ExplanationValues) -> str:
    """Return the explanation in one line."""
    least = explanation.least
    return (
        f"{format_bytes(explanation.allocated_plain)} plain; least budget"
        f" {format_bytes(least.budget)}, at {format_share(least.extra_time)} more time"
    )


def _draw_curve(axes: Axes, explanation: ExplanationValues) -> None:
    curve = explanation.curve
    budgets = [point.budget for point in curve]
    times = [100 * point.extra_time for point in curve]
    bounds = [100 * point.lower_bound for point in curve]
    axes.fill_between(budgets, bounds, times, color=COLORS["planned"], alpha=0.12, linewidth=0)
    axes.plot(budgets, times, "o-", color=COLORS["planned"], markersize=4, label="extra time")
    label = "lower bound: no plan takes less"
    axes.plot(budgets, bounds, "--", color=COLORS["bound"], linewidth=1.3, label=label)
    least = explanation.least
    axes.axvline(least.budget, color=COLORS["budget"], linestyle=":", linewidth=1.3)
    beside: dict[str, Any] = {
        "xycoords": ("data", "axes fraction"),
        "xytext": (6, 0),
        "textcoords": "offset points",
        "va": "top",
        "fontsize": 9,
    }
    said = f"least budget {format_bytes(least.budget)}"
    axes.annotate(said, (least.budget, 0.97), color=COLORS["budget"], **beside)
    highest = max(budgets)
    bytes_axis(axes.xaxis, highest)
    axes.set(
        title="Extra time of each budget",
        xlabel=f"budget, {unit_for(highest)[1]}",
        ylabel="extra time, % of a plain step",
        xlim=(0, max(highest, 1) * 1.02),
        ylim=(0, _ceiling(times)),
    )
    if max(times) > _ceiling(times):
        said = f"↑ {format_share(least.extra_time)}"
        axes.annotate(said, (least.budget, 0.87), color=COLORS["planned"], **beside)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.98))
    whole = explanation.allocated_plain
    if whole:
        above = axes.secondary_xaxis("top", functions=percent_of(whole))
        above.set_xlabel("% of plain training", fontsize=9)
        above.spines["top"].set_visible(False)
        above.tick_params(length=0)


def _ceiling(times: list[float]) -> float:
    """Return the end of the axis of extra times: the least budget of a deep network may take dozens
    of times as long as others, and must not flatten them."""
    others = max([*times[:-1], 1.0])
    highest = max([*times, 1.0])
    return 1.6 * others if len(times) > 1 and highest > FAR * others else 1.15 * highest


def _draw_parts(axes: Axes, explanation: ExplanationValues) -> None:
    parts = explanation.parts
    sizes = {field.name: getattr(parts, field.name) for field in fields(parts)}
    bars: list[Bar] = [
        (name, {name: sizes[name]}, sized(sizes[name], parts.total)) for name in ORDER
    ]
    horizontal_bars(axes, bars, ORDER)
    # The texts to the right of the bars are long for a narrow panel.
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
    axes.set_title(f"At the peak: {format_bytes(parts.total)}")


def _draw_layers(axes: Axes, explanation: ExplanationValues) -> None:
    layers = explanation.layers
    scope = common_scope([f"{layer.name}/" for layer in layers])
    whole = sum(layer.bytes for layer in layers)
    shown, rest = layers[:MOST_LAYERS], layers[MOST_LAYERS:]
    bars: list[Bar] = [
        (
            layer.name[len(scope) :] or layer.name,
            {"activations": layer.bytes},
            sized(layer.bytes, whole),
        )
        for layer in shown
    ]
    size = sum(layer.bytes for layer in rest)
    said = f"and {format_bytes(size)} in {len(rest)} others" if rest else ""
    horizontal_bars(axes, bars, ("activations",), said)
    if not bars:
        axes.text(0.5, 0.5, "nothing is kept", transform=axes.transAxes, ha="center")
    axes.set_title(f"Activations by layer: {format_bytes(whole)}")
