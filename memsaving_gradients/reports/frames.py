"""Plans and explanations as pandas data frames: a row for each decision, budget, layer or part."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.reports.explanation_values import ExplanationValues
from memsaving_gradients.reports.extras import needed
from memsaving_gradients.reports.plan_values import PlanValues

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["OF", "of_explanation", "of_plan"]

#: The tables of an explanation that can be data frames.
OF = ("curve", "layers", "parts")

_PLAN = ("tensor", "layer", "bytes", "fate", "reason", "op_type", "source")
_CURVE = ("budget", "share", "extra_time", "lower_bound", "clones")
_LAYERS = ("name", "bytes", "source")


def of_plan(plan: PlanValues) -> pd.DataFrame:
    """Return a frame with a row for each decision."""
    return _frame("Plan.to_dataframe", plan.decisions, _PLAN)


def of_explanation(explanation: ExplanationValues, of: str = "curve") -> pd.DataFrame:
    """Return a frame with a row for each budget, layer or part."""
    purpose = "Explanation.to_dataframe"
    if of == "curve":
        more = ("simulated",) if explanation.compiled else ()
        return _frame(purpose, explanation.curve, (*_CURVE, *more))
    if of == "layers":
        return _frame(purpose, explanation.layers, _LAYERS)
    if of != "parts":
        raise ArgumentError("of", of, f"give one of {', '.join(map(repr, OF))}")
    parts = explanation.parts
    whole = max(parts.total, 1)
    sizes = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return needed("pandas", purpose).DataFrame(
        {
            "part": list(sizes),
            "bytes": list(sizes.values()),
            "share": [size / whole for size in sizes.values()],
        }
    )


def _frame(purpose: str, rows: Any, columns: tuple[str, ...]) -> pd.DataFrame:
    # Each column is given its type, which is right in frames without rows, too.
    types = {"bytes": "int64", "budget": "int64", "clones": "int64", "simulated": "int64"}
    types |= dict.fromkeys(("share", "extra_time", "lower_bound"), "float64")
    pandas = needed("pandas", purpose)
    return pandas.DataFrame(
        {
            name: pandas.Series([getattr(row, name) for row in rows], dtype=types.get(name, "str"))
            for name in columns
        }
    )
