"""Figures of plans and explanations, to be looked at or written to a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memsaving_gradients.reports.figures import explanation_figure, plan_figure
from memsaving_gradients.reports.figures.drawing import INK, check_path, styled, svg, write
from memsaving_gradients.reports.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memsaving_gradients.reports.explanation import Explanation

__all__ = ["as_svg", "plot"]


def plot(report: Plan | Explanation, path: str | os.PathLike[str] | None = None) -> Figure:
    """The figure of a plan or an explanation, written to ``path`` if there is one."""
    target = None if path is None else check_path(path)
    with styled(f"{type(report).__name__}.plot"):
        drawn = _drawn(report)
        if target is not None:
            write(drawn, target)
    return drawn


def as_svg(report: Plan | Explanation, purpose: str) -> str:
    """The same as part of a page, which has a headline of its own."""
    with styled(purpose, INK):
        drawn = _drawn(report)
        drawn.suptitle("")
        return svg(drawn)


def _drawn(report: Plan | Explanation) -> Figure:
    if isinstance(report, Plan):
        return plan_figure.figure(report)
    return explanation_figure.figure(report)
