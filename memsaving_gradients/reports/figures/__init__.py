"""Figures of plans and explanations, for notebooks, files and pages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memsaving_gradients.reports.explanation_values import ExplanationValues
from memsaving_gradients.reports.figures import explanation_figure, plan_figure
from memsaving_gradients.reports.figures.drawing import INK, check_path, styled, svg, write
from memsaving_gradients.reports.plan_values import PlanValues

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["as_svg", "plot"]


def plot(
    report: PlanValues | ExplanationValues, path: str | os.PathLike[str] | None = None
) -> Figure:
    """Return the figure of a plan or an explanation, and write it to ``path`` if one is given."""
    target = None if path is None else check_path(path)
    with styled(f"{type(report).__name__}.plot"):
        drawn = _drawn(report)
        if target is not None:
            write(drawn, target)
    return drawn


def as_svg(report: PlanValues | ExplanationValues, purpose: str) -> str:
    """Return the figure as SVG for a page; it has no title, as the page has a headline."""
    with styled(purpose, INK):
        drawn = _drawn(report)
        drawn.suptitle("")
        return svg(drawn)


def _drawn(report: PlanValues | ExplanationValues) -> Figure:
    if isinstance(report, PlanValues):
        return plan_figure.figure(report)
    return explanation_figure.figure(report)
