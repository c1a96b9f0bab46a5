"""A plan as a figure: memory over the step, buffers at its peak, and the fate of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memsaving_gradients.budget import format_bytes, format_share
from memsaving_gradients.reports.figures.drawing import (
    COLORS,
    Bar,
    blank,
    bytes_axis,
    halves,
    horizontal_bars,
    legend_above,
    percent_of,
    unit_for,
)
from memsaving_gradients.reports.plan_text import common_scope
from memsaving_gradients.reports.plan_values import PlanValues

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["FATES", "PARTS", "by_layer", "figure", "headline"]

#: Fates and parts, in the order of the pieces of a bar.
FATES = ("keep", "recompute", "encode", "offload")
PARTS = ("forward", "recomputed", "backward", "scratch")
#: Layout: bars of a panel; a text gives the bytes of the rest.
MOST_LAYERS = 16
#: Layout: the least height of panels, in bars.
FEWEST_ROWS = 5
#: Layout: points of a line; each is the highest of its stretch of the step.
POINTS = 2000


def figure(plan: PlanValues) -> Figure:
    """Draw a plan; call within `drawing.styled`. A plan from a file has no timelines: its figure
    shows the fates of layers only."""
    layers = by_layer(plan)
    shown = max(min(len(layers), MOST_LAYERS), FEWEST_ROWS)
    below = 1.3 + 0.27 * shown
    if plan.simulation is None or plan.simulation_plain is None:
        drawn = blank(9, below + 0.7)
        _draw_fates(drawn.subplots(), layers)
        drawn.suptitle(
            f"{headline(plan)}\nread from a file, which does not contain the memory over the step:"
            " apply the plan to see it",
            fontsize=11,
        )
        return drawn
    drawn = blank(11, below + 4.2)
    top, bottom = halves(drawn, 4.0, below)
    _draw_timeline(top.subplots(), plan)
    fates, at_peak = bottom.subplots(1, 2, width_ratios=(1, 1))
    _draw_fates(fates, layers)
    _draw_peak(at_peak, plan)
    drawn.suptitle(headline(plan), fontsize=12, fontweight="bold")
    return drawn


def headline(plan: PlanValues) -> str:
    """Return the plan in one line."""
    share = format_share(plan.allocated / max(plan.allocated_plain, 1))
    return (
        f"{format_bytes(plan.allocated)} of {format_bytes(plan.allocated_plain)} ({share}) "
        f"at about {format_share(plan.extra_time)} more time"
    )


def by_layer(plan: PlanValues) -> list[tuple[str, dict[str, int]]]:
    """Return the bytes of each fate by layer, largest first; names omit the scope of all layers."""
    scope = common_scope([decision.tensor for decision in plan.decisions])
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for decision in plan.decisions:
        name = decision.layer[len(scope) :] or decision.tensor[len(scope) :]
        fates = found[name]
        fates[decision.fate] = fates.get(decision.fate, 0) + decision.bytes
    return sorted(found.items(), key=lambda layer: -sum(layer[1].values()))


def thinned(values: Any) -> tuple[Any, Any]:
    """Return at most `POINTS` points of a timeline: their places as shares of the step, and the
    highest value of the stretch around each.

    Examples
    --------
    >>> thinned(np.arange(3 * POINTS))[1][:3]
    array([2, 5, 8])
    """
    count = len(values)
    bounds = np.linspace(0, count, min(POINTS, count) + 1).astype(int)
    return (bounds[:-1] + bounds[1:]) / (2 * max(count, 1)), np.maximum.reduceat(
        values, bounds[:-1]
    )


def _draw_timeline(axes: Axes, plan: PlanValues) -> None:
    lines = {"plain": plan.timeline_plain, "planned": plan.timeline}
    highest = max(int(line.max(initial=0)) for line in lines.values())
    for name, line in lines.items():
        if not len(line):
            continue
        where, size = thinned(line)
        top = int(np.argmax(size))
        label = f"{name}: at most {format_bytes(int(size[top]))}"
        axes.plot(where, size, color=COLORS[name], label=label, linewidth=1.4)
        axes.fill_between(where, size, color=COLORS[name], alpha=0.15, linewidth=0)
        axes.plot(where[top], size[top], "o", color=COLORS[name], markersize=5)
    if plan.budget is not None and plan.budget <= 1.5 * highest:
        highest = max(highest, plan.budget)
        label = f"budget: {format_bytes(plan.budget)} (of the allocator's chunks)"
        axes.axhline(plan.budget, color=COLORS["budget"], linestyle="--", label=label)
    bytes_axis(axes.yaxis, highest)
    axes.set(
        title="Memory over one step",
        xlabel="one training step, from its first op to its last",
        ylabel=f"{unit_for(highest)[1]} alive",
        xlim=(0, 1),
        ylim=(0, max(highest, 1) * 1.06),
    )
    axes.set_xticks([])
    legend_above(axes)
    if peak := int(plan.timeline_plain.max(initial=0)):
        _share_axis(axes, peak)


def _share_axis(axes: Axes, whole: int) -> None:
    """Add an axis on the right, in percent of plain training's peak."""
    beside = axes.secondary_yaxis("right", functions=percent_of(whole))
    beside.set_ylabel("% of plain")
    beside.spines["right"].set_visible(False)
    beside.tick_params(length=0)


def _draw_peak(axes: Axes, plan: PlanValues) -> None:
    """Draw the largest buffers at the plan's peak; a text gives the bytes of the rest."""
    alive = plan.at_peak
    scope = common_scope([one.tensor for one in alive if one.part == "forward"])
    whole = int(plan.timeline.max(initial=0))
    # Buffers below 1 % of the peak explain nothing.
    shown = [one for one in alive[:MOST_LAYERS] if 100 * one.bytes >= whole]
    bars: list[Bar] = [
        (_bare(one.tensor, scope), {one.part: one.bytes}, format_bytes(one.bytes)) for one in shown
    ]
    rest = whole - sum(one.bytes for one in shown)
    horizontal_bars(axes, bars, PARTS, f"and {format_bytes(rest)} of others" if rest else "")
    axes.set_title("Alive at the planned peak")
    legend_above(axes)


def _bare(tensor: str, scope: str) -> str:
    """Return a tensor's name without the common scope and the prefix that the color shows."""
    for before in ("gradient_tape/", "gradients/"):
        tensor = tensor.removeprefix(before)
    return tensor.removeprefix(scope).removesuffix(":0") or "scratch space"


def _draw_fates(axes: Axes, layers: Sequence[tuple[str, dict[str, int]]]) -> None:
    shown, rest = layers[:MOST_LAYERS], layers[MOST_LAYERS:]
    said = ""
    if rest:
        total = {fate: sum(fates.get(fate, 0) for _, fates in rest) for fate in FATES}
        kinds = ", ".join(f"{fate} {format_bytes(size)}" for fate, size in total.items() if size)
        said = f"and {len(rest)} others: {kinds}"
    horizontal_bars(
        axes,
        [(name, fates, format_bytes(sum(fates.values()))) for name, fates in shown],
        FATES,
        said,
    )
    axes.set_title("Fate of each layer")
    legend_above(axes)
    if not shown:
        axes.text(0.5, 0.5, "nothing large is kept", transform=axes.transAxes, ha="center")
