"""Budgets in the bytes that XLA assigns to a compiled step.

A simulation of TensorFlow's executor knows nothing of XLA's fusion, layouts and order. So gradients
with a budget stay plain until their function is traced to its end; then XLA compiles the whole
step, plainly and with plans, until one keeps the budget.

- :mod:`~memsaving_gradients.engine.assigned.trials`: a step that follows plans, and what XLA
  assigns to it.
- :mod:`~memsaving_gradients.engine.assigned.shares`: which simulated share is tried next.
- :mod:`~memsaving_gradients.engine.assigned.budgets`: from plan to plan, until one fits.
"""
