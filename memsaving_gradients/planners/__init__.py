"""Planners, one algorithm per file: ``plan(TrainingGraph, Limits) → Proposal``, no TensorFlow.

- :mod:`~memsaving_gradients.planners.auto`: the fastest plan within a budget, on any graph; behind
  ``budget=``.
- :mod:`~memsaving_gradients.planners.chains.chain`: the same by a dynamic program, for networks
  that are chains of stages.
- :mod:`~memsaving_gradients.planners.exact`: the fastest plan, proven, by constraint programming;
  needs OR-Tools.
- :mod:`~memsaving_gradients.planners.chains.recursive`: checkpoints within checkpoints, down to a
  memory that grows with log₂ of the depth.
- :mod:`~memsaving_gradients.planners.least_memory`: the least peak with every value recomputed at
  most once.
- :mod:`~memsaving_gradients.planners.cheap_ops`: keep outputs of expensive ops, recompute the rest.
- :mod:`~memsaving_gradients.planners.chen`: segments of equal bytes, the founding paper's plan;
  takes budgets.
- :mod:`~memsaving_gradients.planners.chains.mirror_counts`: how often each value may be recomputed,
  given by hand or by recursion (for other planners to follow).
- :mod:`~memsaving_gradients.planners.named`: keep the storages that the user names.
- :mod:`~memsaving_gradients.planners.keep`: keep every value that is not stored.
- :mod:`~memsaving_gradients.planners.with_storage`: extends any planner so that it may also
  encode or offload residuals.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = [
    "PLANNERS",
    "Interrupted",
    "Limits",
    "Planner",
    "Proposal",
    "find_planner",
    "planner_name",
]

Planner = Callable[[TrainingGraph, Limits], Proposal]
"""A function from a training graph and limits to the best proposal that it finds, even one above
the budget."""

PLANNERS = {
    "auto": "auto",
    "chain": "chains.chain",
    "chen": "chen",
    "exact": "exact",
    "keep": "keep",
    "memory": "least_memory",
    "recursive": "chains.recursive",
    "speed": "cheap_ops",
}
"""The names that ``planner=`` accepts, each with the module of its planner."""


def planner_name(planner: Any) -> str:
    """Return the name of a planner that is given as a name or as a function.

    Examples
    --------
    >>> planner_name("memory"), planner_name(print)
    ('memory', 'print')
    """
    if isinstance(planner, str):
        return planner
    return getattr(planner, "__name__", type(planner).__name__)


def find_planner(planner: Any) -> Planner:
    """Return the function of a named planner, importing its module only now; return a function
    unchanged.

    Examples
    --------
    >>> find_planner("memory").__module__
    'memsaving_gradients.planners.least_memory'
    """
    if callable(planner):
        return planner
    return _module(planner).plan


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{PLANNERS[name]}")
