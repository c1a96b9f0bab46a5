"""Warnings and notes for gradient computations that differ from the request: gradients stay plain,
plain training meets the budget, encodings are not used, planning ended early."""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients.budget import (
    DeviceMemory,
    Goal,
    exact_bytes,
    format_bytes,
    format_share,
)
from memsaving_gradients.engine import graph_state
from memsaving_gradients.errors import NothingSavedWarning, PlanningStoppedWarning, PlanNote
from memsaving_gradients.reports.plan import Plan

__all__ = ["ENDED", "OUTER", "note_ample", "note_unused", "warn_nothing_saved", "warn_stopped"]

#: Why gradients of targets of another graph are plain.
OUTER = (
    "ys were computed in another function or outside of the branch or loop that asks for gradients"
)
#: How planning ended, in words.
ENDED = {"interrupted": "was interrupted", "out of time": "ran out of time"}


def warn_nothing_saved(
    graph: tf.Graph,
    why: str,
    what: str = "gradients are plain TensorFlow gradients and save no memory",
) -> None:
    """Warn that gradients are plain, or of ``what`` instead, and why; once for each graph."""
    if graph_state.warned(graph, why):
        return
    warn(f"{what}: {why}.", NothingSavedWarning)


def note_ample(graph: tf.Graph, goal: Goal) -> None:
    most = f", at most {goal.plain_need:,}," if goal.plain_need > goal.base else ""
    device = f", left by {goal.value}" if isinstance(goal.value, DeviceMemory) else ""
    note = (
        f"plain training needs {exact_bytes(goal.base)}{most} and meets the budget of"
        f" {goal.budget:,} ({format_bytes(goal.budget)}{device}): gradients are plain, nothing is"
        " recomputed"
    )
    if not graph_state.warned(graph, note):
        warn(note + ".", PlanNote)


def note_unused(plan: Plan, named: Collection[str]) -> None:
    """Tell the user if none of the tensors ``named`` for encoding is encoded."""
    encoded = {decision.tensor for decision in plan.stored}
    if named and encoded.isdisjoint(named):
        warn(
            f"none of the {len(named)} tensors that encode= names is encoded (the first is"
            f" {min(named)!r}): the plan keeps or recomputes them, since encoding them would not"
            " lower the peak, or is not needed for the budget.",
            PlanNote,
        )


def warn_stopped(plan: Plan, why: str) -> None:
    """Warn that planning ended early."""
    warn(
        f"planning {ENDED[why]}; the best plan so far is used: extra time about"
        f" {format_share(plan.extra_time, 1)}, at most {format_share(plan.gap, 1)} of a step above"
        f" the least extra time ({format_share(plan.lower_bound, 1)}).",
        PlanningStoppedWarning,
    )
