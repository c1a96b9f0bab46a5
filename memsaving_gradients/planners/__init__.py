"""Planners: one algorithm a file, all ``plan(TrainingGraph, Limits) → Proposal``, no TensorFlow.

- :mod:`~memsaving_gradients.planners.auto`: the fastest plan within a budget, on any graph; behind
  ``budget=``.
- :mod:`~memsaving_gradients.planners.chains.chain`: the same by a dynamic program, for networks
  that are chains of stages.
- :mod:`~memsaving_gradients.planners.exact`: the fastest plan, proven, by constraint programming;
  needs OR-Tools.
- :mod:`~memsaving_gradients.planners.chains.recursive`: checkpoints within checkpoints, down to a
  memory of log₂ of the depth.
- :mod:`~memsaving_gradients.planners.least_memory`: the least peak with every value recomputed at
  most once.
- :mod:`~memsaving_gradients.planners.cheap_ops`: keep what is expensive, recompute what is cheap.
- :mod:`~memsaving_gradients.planners.chen`: segments of equal bytes, the founding paper's plan;
  takes budgets.
- :mod:`~memsaving_gradients.planners.chains.mirror_counts`: how often each value may be recomputed,
  given by hand or by recursion (for other planners to follow).
- :mod:`~memsaving_gradients.planners.named`: keep what the user names.
- :mod:`~memsaving_gradients.planners.keep`: keep everything, or as much as is not stored.
- :mod:`~memsaving_gradients.planners.with_storage`: makes of any planner one that may also store
  residuals smaller, or elsewhere.
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
"""From a training graph and limits to the best proposal that is known, also if it is above the
budget."""

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
"""What ``planner=`` may name, and the module that plans."""


def planner_name(planner: Any) -> str:
    """What to call a planner, which is a name or a function.

    Examples
    --------
    >>> planner_name("memory"), planner_name(print)
    ('memory', 'print')
    """
    if isinstance(planner, str):
        return planner
    return getattr(planner, "__name__", type(planner).__name__)


def find_planner(planner: Any) -> Planner:
    """The function behind a name, whose module is imported when it is asked for; a function is
    itself.

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
