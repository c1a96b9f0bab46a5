"""What was done to one gradient computation, as a value: which tensors stay, which are recomputed,
and why."""

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
        What was asked for: ``"memory"``, ``"speed"``, ``"collection"``, ``"named"``; ``"budget"``,
        ``"slowdown"`` (`max_slowdown`), ``"planner"`` (a planner without limits).
    decisions
        One for each residual, and each tensor kept to recompute from, that is large enough to
        matter, in order of creation.
    peak_plain, peak
        Simulated transient peak of plain training and of this plan, bytes asked for (see
        `allocated_plain`, `allocated`). Of a plan that was made anew to leave room for the
        optimizer, ``peak`` is that of the whole step.
    activations_plain, activations
        The most bytes of residuals (what the backward pass reads of the forward pass) at one time,
        in plain training and with this plan, those that were computed again included; what is only
        passed on while they are is not.
    extra_time
        Estimated time of the recomputation, as a fraction of the plain step's.
    clones
        Number of ops that run a second time.
    checkpoints
        Tensors kept to recompute from, in order of creation (a subset of what stays).
    gating
        ``"control"`` or ``"data"`` (XLA).
    planner
        Who planned.
    budget
        The most bytes in chunks that were allowed; ``None``: no limit.
    planned_for
        The bytes asked for, fewer than the budget, that the planner was given as its limit.
    lower_bound
        No plan within ``planned_for`` takes less extra time, as a fraction of the plain step's.
    optimal
        Whether this one is proven to take the least.
    complete
        Whether planning came to its end, and was not interrupted or out of time.
    packed
        Whether masks were packed in bits.
    loops
        How loops are treated, one of `memsaving_gradients.transforms.loops.selection.WAYS`; empty:
        as TensorFlow built them.
    replayed
        The loops that are replayed. Not saved in files.
    attention
        Attention (names of the softmax ops) that is computed in blocks.
    attention_kept
        Attention that was found, but is computed as TensorFlow built it: names of the softmax ops,
        each with the reason.
    schedule
        What runs when.
    reasons
        For storages (numbers of values) that stay by choice, why.
    fingerprint
        The graph that the plan is for.
    simulation_plain, simulation
        The simulations behind these figures: bytes alive at every op, lives of all buffers. Not
        saved in files.
    chunks
        `allocated_plain` and `allocated`, of a plan that was read from a file, or whose step XLA
        has compiled.
    whole_step
        The most bytes in chunks that the step may take with what follows the gradients (the
        optimizer), and with what they return held to its end. ``None``: no budget, or not known:
        the function was not traced to its end. Not saved in files.
    assigned
        Whether `allocated_plain` and `allocated` are the bytes that XLA assigns to the step, with
        all that it does. Not saved in files.
    assumed_batch
        The batch size that stands in for an unknown dimension, and was told by nobody; ``None``:
        bytes are known.
    assumed_steps
        The number of steps that stands in for that of loops which do not show it, and was told by
        nobody; ``None``: bytes do not depend on any.
    assumed_rows
        The most rows that an op may choose when it runs (a mask, unique values, a slice), which
        figures are for; ``None``: none are chosen.
    file
        The file that it was read from, or an empty string.
    """

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises
        ------
        PlanError
            If the file cannot be read, is damaged or is no plan.
        """
        return plan_file.load(path, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, to be applied to the same graph in another process:
        ``gradients(..., plan=path)``.

        Timelines and simulations are not saved; they come back when the plan is applied.

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
        """This plan beside another one; prints as a table."""
        return Comparison(self, other)

    def to_dataframe(self) -> pd.DataFrame:
        """The decisions as a pandas data frame, a row for each: tensor, layer, bytes, fate, reason,
        op_type, source.

        Raises
        ------
        MissingExtraError
            Without pandas.
        """
        from memsaving_gradients.reports import frames

        return frames.of_plan(self)

    def __repr__(self) -> str:
        return f"<Plan {plan_text.brief(self)}>"

    def __str__(self) -> str:
        return plan_text.text(self)
