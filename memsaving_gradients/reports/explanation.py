"""Explanations: the parts of a training step's memory and the extra time of each budget."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from memsaving_gradients.budget import exact_bytes, format_bytes, format_share
from memsaving_gradients.reports.assumptions import assumed
from memsaving_gradients.reports.explanation_values import (
    Compiled,
    ExplanationValues,
    Layer,
    Parts,
    Point,
)
from memsaving_gradients.reports.plan_text import below_here, columns, common_scope, shorten
from memsaving_gradients.reports.report import Report

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Explanation", "Layer", "Parts", "Point"]

#: Layout: lines of the tables.
MOST_LAYERS = 12
#: Layout: letters of a layer's name; longer names lose their beginning.
NAME_WIDTH = 56


@dataclass(frozen=True, repr=False)
class Explanation(ExplanationValues, Report):
    """The parts of a training step's memory and the extra time of each budget; prints as a table.

    Points are conservative: their plans leave room for the bytes that the executor adds. A plan
    made for one budget alone may take less time.

    Attributes
    ----------
    parts
        Bytes of each part at the peak of plain training: at the first moment within 1 % of the
        peak.
    allocated_plain
        The least bytes that plain training takes in the chunks of TensorFlow's allocator, without
        variables. Budgets given as fractions are fractions of it.
    layers
        The layers whose activations are kept, largest first.
    curve
        A point for each budget, from the largest to the least: the first is plain training, the
        last the least budget that works.
    seconds
        Estimated time of a plain step.
    computations
        How many times the step asks for gradients. The explanation is of the request with most ops.
    assumed_batch
        The batch size assumed for an unknown dimension; ``None``: bytes are known.
    assumed_steps
        The steps assumed for loops of unknown length; ``None``: bytes depend on no such loop.
    assumed_rows
        The rows that figures are for: the most that an op may choose when it runs; ``None``: no op
        chooses rows.
    sums
        In a step with microbatches, of which one is explained: bytes of the summed gradients, which
        are held in addition to it.
    xla
        Whether XLA compiles the step. Its budgets count the bytes that XLA assigns, but the curve
        has simulated bytes unless `compiled` has entries.
    compiled
        With ``xla=True``: plain training and the plan of least memory, as XLA has compiled them.
        The budgets of the curve and `allocated_plain` are then bytes that XLA assigns.
    """

    def to_dataframe(self, of: str = "curve") -> pd.DataFrame:
        """Return one table of the explanation as a pandas data frame.

        Parameters
        ----------
        of
            ``"curve"``: a row for each budget, with share, extra_time, lower_bound, clones.
            ``"layers"``: a row for each layer, with name, bytes, source. ``"parts"``: a row for
            each part at the peak, with bytes and share of all.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        ArgumentError
            If ``of`` is something else.
        """
        from memsaving_gradients.reports import frames

        return frames.of_explanation(self, of)

    def __repr__(self) -> str:
        return (
            f"<Explanation {format_bytes(self.allocated_plain)} plain, least budget "
            f"{format_bytes(self.least.budget)} at {format_share(self.least.extra_time)} more time>"
        )

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join(lines)
            for lines in (
                self._memory(),
                self._layers(),
                *map(self._compiled, self.compiled),
                self._budgets(),
            )
            if lines
        )

    def _memory(self) -> list[str]:
        parts = self.parts
        rows = [("bytes", "", "of all", "")]
        words = {
            "parameters": "variables of the model",
            "slots": "variables of the optimizer",
            "gradients": "at the peak of the step",
            "activations": "kept for the backward pass",
            "temporaries": "passed from op to op, scratch space",
        }
        for field in fields(parts):
            size = getattr(parts, field.name)
            share = format_share(size / max(parts.total, 1))
            rows.append((f"{size:,}", field.name, share, words[field.name]))
        guess = "; ".join(["", *assumed(self)])
        step, besides = "training step", "its variables"
        if self.sums:
            step = "microbatch"
            besides = f"variables, and the gradients that are added up, {exact_bytes(self.sums)}"
        if self.compiled:
            besides += ", as XLA assigns; the parts are simulated"
        return [
            f"a plain {step} takes {exact_bytes(self.allocated_plain)} in addition to"
            f" {besides}{guess}",
            *columns(rows),
        ]

    def _layers(self) -> list[str]:
        if not self.layers:
            return []
        scope = common_scope([f"{layer.name}/" for layer in self.layers])
        rows = [("bytes", f"activations of layer in {scope}" if scope else "activations of", "")]
        for layer in self.layers[:MOST_LAYERS]:
            name = shorten(layer.name[len(scope) :] or layer.name, NAME_WIDTH)
            rows.append((f"{layer.bytes:,}", name, below_here(layer.source)))
        lines = columns(rows)
        if len(self.layers) > MOST_LAYERS:
            rest = self.layers[MOST_LAYERS:]
            lines.append(
                f"… and {sum(layer.bytes for layer in rest):,} bytes in {len(rest)} others"
                " (explanation.layers)"
            )
        return lines

    def _compiled(self, step: Compiled) -> list[str]:
        rows = [("bytes", "alive at XLA's peak, made for")]
        for one in step.at_peak[:MOST_LAYERS]:
            name = one.op_names[0] if one.op_names else one.instruction
            others = f" and {len(one.op_names) - 1} more" if len(one.op_names) > 1 else ""
            rows.append((f"{one.bytes:,}", shorten(name, NAME_WIDTH) + others))
        held = f", {step.results:,} of them results" if step.results else ""
        return [
            f"XLA assigns {exact_bytes(step.assigned)} to {step.name}{held}; simulated"
            f" {step.simulated:,}; compiled in {step.seconds:.1f} s",
            *columns(rows),
        ]

    def _budgets(self) -> list[str]:
        simulated = ("simulated",) if self.compiled else ()
        rows: list[tuple[str, ...]] = [
            ("budget", "of plain", *simulated, "extra time", "at least", "ops run again")
        ]
        for point in self.curve:
            rows.append(
                (
                    f"{point.budget:,}",
                    f"{point.share:.3f}",
                    *(f"{point.simulated:,}" for _ in simulated),
                    format_share(point.extra_time, 1),
                    format_share(point.lower_bound, 1),
                    f"{point.clones:,}",
                )
            )
        least = f"least budget: {exact_bytes(self.least.budget)}"
        if self.xla and not self.compiled:
            return [
                *columns(rows),
                f"{least}, simulated; XLA assigns more, and budgets count that: explain(...,"
                " xla=True) compiles the step, and shows how many bytes",
            ]
        return [
            *columns(rows),
            f"{least}; use gradients(..., budget={self.least.budget}) or a larger budget",
        ]
