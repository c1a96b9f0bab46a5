"""Budgets in the bytes that XLA assigns to a compiled step.

A simulation of TensorFlow's executor does not model XLA's fusion, layouts and order. So gradients
with a budget stay plain until their function is traced to its end. Then XLA compiles the whole
step, first plain and then with plans, until a plan keeps the budget.

- :mod:`~memsaving_gradients.engine.assigned.trials`: a step that follows plans, and the bytes that
  XLA assigns to it.
- :mod:`~memsaving_gradients.engine.assigned.shares`: the simulated share to try next.
- :mod:`~memsaving_gradients.engine.assigned.budgets`: trials of plans, until one fits.
"""
