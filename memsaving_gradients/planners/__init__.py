"""Planners: one algorithm a file, all ``plan(TrainingGraph, Limits) → Proposal``, no TensorFlow.

- :mod:`~memsaving_gradients.planners.least_memory`: the least peak with every value recomputed at most once.
- :mod:`~memsaving_gradients.planners.cheap_ops`: keep what is expensive, recompute what is cheap.
- :mod:`~memsaving_gradients.planners.chen_budget`: segments of equal bytes, the founding paper's plan; takes budgets.
- :mod:`~memsaving_gradients.planners.mirror`: how often each value may be made again, given by hand or by recursion.
- :mod:`~memsaving_gradients.planners.named`: keep what the user names.
"""

from memsaving_gradients.planners.proposal import Interrupted, Limits, Proposal

__all__ = ["Interrupted", "Limits", "Proposal"]
