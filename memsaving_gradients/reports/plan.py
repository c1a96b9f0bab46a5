"""Plans of one gradient computation as values: the tensors that are kept, the tensors that are
recomputed, and the reasons."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsaving_gradients.reports import plan_file, plan_text
from memsaving_gradients.reports.comparison import Comparison
from memsaving_gradients.reports.plan_values import Decision as Decision
from memsaving_gradients.reports.plan_values import PlanValues
from memsaving_gradients.reports.report import Report

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Decision", "Plan"]


@dataclass(frozen=True, repr=False)
class Plan(PlanValues, Report):
    """The plan behind one gradient computation.

    Attributes
    ----------
    mode
        The request: ``"memory"``, ``"speed"``, ``"collection"``, ``"named"``; ``"budget"``,
        ``"slowdown"`` (`max_slowdown`), ``"planner"`` (a planner without limits).
    decisions
        A decision for each residual, and each tensor kept to recompute from, of at least 1/1024 of
        the largest tensor; in order of creation.
    peak_plain, peak
        Simulated transient peaks of plain training and of this plan, in bytes asked for
        (`allocated_plain` and `allocated` count chunks). Of a plan that was made anew to leave room
        for the optimizer, ``peak`` is the peak of the whole step.
    activations_plain, activations
        The most bytes of residuals (forward tensors that backward ops read) alive at one time, in
        plain training and with this plan. Recomputed residuals count; tensors that only lead to
        them do not.
    extra_time
        Estimated extra time, as a fraction of the plain step's time.
    clones
        Number of ops that run a second time.
    checkpoints
        Tensors kept to recompute from, in order of creation (a subset of the kept tensors).
    gating
        ``"control"`` or ``"data"`` (XLA).
    planner
        Name of the planner.
    budget
        The limit on bytes in chunks; ``None``: no limit.
    planned_for
        The planner's limit in bytes asked for, which is below the budget.
    lower_bound
        Extra time that no plan within ``planned_for`` can go below, as a fraction of the plain
        step's time.
    optimal
        Whether this plan is proven to take the least extra time.
    complete
        Whether planning finished, neither interrupted nor out of time.
    packed
        Whether masks were packed into bits.
    loops
        How loops are treated, one of `memsaving_gradients.transforms.loops.selection.WAYS`; empty:
        as TensorFlow built them.
    replayed
        The loops that are replayed. Not saved in files.
    attention
        Names of the softmax ops of attention that is computed in blocks.
    attention_kept
        Names of the softmax ops of attention that stays as TensorFlow built it, with the reasons.
    schedule
        The order in which ops and clones run.
    reasons
        For each storage (number of a value) that is kept by choice, the reason.
    fingerprint
        The graph that the plan is for.
    simulation_plain, simulation
        The simulations behind these figures: bytes alive at every op, lifetimes of all buffers. Not
        saved in files.
    chunks
        `allocated_plain` and `allocated`, if the plan was read from a file or XLA has compiled its
        step; else ``None``.
    whole_step
        The most bytes in chunks that the whole step may take: with the ops that follow the
        gradients (the optimizer), and with returned tensors held to its end. ``None``: no budget,
        or the function was not traced to its end. Not saved in files.
    assigned
        Whether `allocated_plain` and `allocated` are the bytes that XLA assigns to the whole step.
        Not saved in files.
    assumed_batch
        The batch size assumed for an unknown dimension, as none was given; ``None``: bytes are
        known.
    assumed_steps
        The steps assumed for loops of unknown length, as none were given; ``None``: bytes depend on
        no such loop.
    assumed_rows
        The rows that figures are for: the most that an op may choose when it runs (a mask, unique
        values, a slice); ``None``: no op chooses rows.
    file
        The file that the plan was read from, or an empty string.
    """

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises
        ------
        PlanError
            If the file cannot be read, is damaged, is no plan, or has another version.
        """
        return plan_file.load(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file; ``gradients(..., plan=path)`` applies it to the same graph
        in another process.

        Timelines and simulations are not saved; applying the plan simulates them again.

        Examples
        --------
        >>> import tempfile, tensorflow as tf
        >>> import memsaving_gradients as ms
        >>> def step(**options):
        ...     with tf.Graph().as_default() as graph:
        ...         x = y = tf.compat.v1.placeholder(tf.float32, [1024])
        ...         for _ in range(16):
        ...             y = tf.tanh(y)
        ...         ms.gradients(y, x, **options)
        ...     return ms.plans(graph)[-1]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step(checkpoints="memory").save(folder + "/plan.json")
        ...     again = step(plan=folder + "/plan.json")
        >>> again == step(checkpoints="memory")
        True
        """
        plan_file.save(self, path)

    def compare(self, other: Plan) -> Comparison:
        """Return a comparison of this plan with ``other``, which prints as a table."""
        return Comparison(self, other)

    def to_dataframe(self) -> pd.DataFrame:
        """Return the decisions as a pandas data frame, a row for each: tensor, layer, bytes, fate,
        reason, op_type, source.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        from memsaving_gradients.reports import frames

        return frames.of_plan(self)

    def __repr__(self) -> str:
        return f"<Plan {plan_text.brief(self)}>"

    def __str__(self) -> str:
        return plan_text.text(self)
