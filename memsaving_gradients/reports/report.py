"""What plans and explanations have in common: a figure, and a page."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report"]


class Report:
    """Values that can be drawn."""

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the report.

        Parameters
        ----------
        path
            A file to write the figure to, as PNG, SVG or PDF by its ending.

        Returns
        -------
        matplotlib.figure.Figure
            Of a plan: memory over the step, plain and planned, the largest buffers at the peak, and
            what becomes of each layer. Of an explanation: what budgets cost, with the lower bound,
            the parts of the memory at the peak, and the largest layers. Notebooks show it, and no
            window is opened.

        Raises
        ------
        MissingExtraError
            Without matplotlib.
        ArgumentError
            If ``path`` has another ending, or there is no such folder.
        """
        from memsaving_gradients.reports import figures

        report: Any = self
        return figures.plot(report, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page of its own with the figures, and tables that can be sorted: all decisions of
        a plan, budgets and layers of an explanation.

        Raises
        ------
        MissingExtraError
            Without matplotlib.
        ArgumentError
            If there is no folder for ``path``.
        """
        from memsaving_gradients.reports import page

        report: Any = self
        page.save(path, report)
