"""Plans as events that TensorBoard shows: text, figure, scalars, and memory over the step.

``tf.summary.write`` writes the events under the names of TensorBoard's own plugins, as its summary
functions would. TensorBoard must be installed where events are shown, not where they are written.

The step of these events is the number of the plan:

- ``memory/plan``: the plan as it prints; ``memory/figure``: its figure
- ``memory/simulated_peak``: its simulated peak, bytes; ``memory/plain_peak``: plain training's
- ``memory/extra_time``: its extra time, as a share of a plain step's time
- ``memory/budget``: its budget in bytes, if it has one

The step of these events is the number of the op:

- ``timeline_0/planned``: bytes alive over the step of plan 0; ``timeline_0/plain``: without it

A long timeline has as many points as a chart can show; each is the highest of its stretch.
"""

from __future__ import annotations

import io
import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from memsaving_gradients.reports import figures
from memsaving_gradients.reports.extras import needed
from memsaving_gradients.reports.figures.drawing import DPI, styled

if TYPE_CHECKING:
    from memsaving_gradients.reports.plan import Plan

__all__ = ["Events"]

#: Layout: points of a timeline.
POINTS = 1000
#: Fact: the kind of data that each plugin reads (``summary.proto``).
_KINDS = {"scalars": 1, "text": 2, "images": 3}


class Events:
    """A writer of plans to a folder that TensorBoard reads.

    Parameters
    ----------
    log_dir
        The folder, which is made when the first plan is written.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        # Raises when training is set up, not after the first step.
        needed("matplotlib", "log_dir=")
        self._folder = os.fspath(log_dir)
        self._writer: Any = None
        self._count = 0

    def write(self, plan: Plan) -> None:
        """Write another plan."""
        number, self._count = self._count, self._count + 1
        with tf.init_scope():
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(
                    self._folder, filename_suffix=".memsaving_gradients"
                )
            with self._writer.as_default(), tf.summary.record_if(True):
                _write(plan, number)
            self._writer.flush()


def _write(plan: Plan, number: int) -> None:
    # Indented text is shown as it prints.
    _event(
        "text", "memory/plan", "\n".join(f"    {line}" for line in str(plan).splitlines()), number
    )
    _event("images", "memory/figure", _image(plan), number)
    scalars: dict[str, float] = {
        "simulated_peak": plan.peak,
        "plain_peak": plan.peak_plain,
        "extra_time": plan.extra_time,
    }
    if plan.budget is not None:
        scalars["budget"] = plan.budget
    for name, value in scalars.items():
        _event("scalars", f"memory/{name}", np.float32(value), number)
    for name, timeline in (("plain", plan.timeline_plain), ("planned", plan.timeline)):
        for op, size in _points(timeline):
            _event("scalars", f"timeline_{number}/{name}", np.float32(size), op)


def _points(timeline: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ops and their bytes alive: the highest of each stretch of a timeline.

    Examples
    --------
    >>> _points(np.array([3, 5, 4]))
    [(0, 3), (1, 5), (2, 4)]
    """
    count = len(timeline)
    bounds = np.linspace(0, count, min(POINTS, count) + 1).astype(int).tolist()
    highest = [
        first + int(np.argmax(timeline[first:end])) for first, end in itertools.pairwise(bounds)
    ]
    return [(op, int(timeline[op])) for op in highest]


def _image(plan: Plan) -> list[bytes]:
    """Return the width, the height and the PNG of a plan's figure, as TensorBoard reads images."""
    png = io.BytesIO()
    figure = figures.plot(plan)
    with styled("log_dir="):
        figure.savefig(png, format="png", dpi=DPI)
    width, height = (int(inches * DPI) for inches in figure.get_size_inches())
    return [str(width).encode(), str(height).encode(), png.getvalue()]


def _event(plugin: str, tag: str, value: Any, step: int) -> None:
    metadata = tf.compat.v1.SummaryMetadata(data_class=_KINDS[plugin])
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(tag, value, step, metadata)
