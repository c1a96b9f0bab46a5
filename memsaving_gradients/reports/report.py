"""The base class of plans and explanations, which can be drawn and saved as a page."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Report"]


class Report:
    """A plan or an explanation: values that can be drawn."""

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the report.

        Parameters
        ----------
        path
            A file to write the figure to; its ending selects PNG, SVG or PDF.

        Returns
        -------
        matplotlib.figure.Figure
            For a plan: memory over the step, plain and planned, the largest buffers at the peak,
            and the fate of each layer. For an explanation: the extra time of each budget with its
            lower bound, the parts of the memory at the peak, and the largest layers. Notebooks show
            the figure; no window opens.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ArgumentError
            If ``path`` has another ending, or its folder does not exist.
        """
        from memsaving_gradients.reports import figures

        report: Any = self
        return figures.plot(report, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the figures and sortable tables: all decisions of a plan, or the
        budgets and layers of an explanation.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ArgumentError
            If the folder of ``path`` does not exist, or ``path`` is a folder.
        """
        from memsaving_gradients.reports.web import page

        report: Any = self
        page.save(path, report)
