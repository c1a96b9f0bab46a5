"""The driver: it tries plan after plan, until one keeps its budget in the executor's order.

The executor's order is known only when the step is rewritten. If the rewritten step breaks the
budget, the driver takes the rewrite back and plans for fewer bytes, and at last for least memory.
Calls with a budget wait for the end of their function's trace, and keep it with the whole step
(:mod:`~memsaving_gradients.engine.step_budget`).

- :mod:`~memsaving_gradients.engine.driver.attempt`: a plan that the graph follows.
- :mod:`~memsaving_gradients.engine.driver.attempts`: one plan after the other, for one step.
- :mod:`~memsaving_gradients.engine.driver.candidates`: the variants of a step to plan for, with
  different loop replays and with masks packed or not; the first that fits.
- :mod:`~memsaving_gradients.engine.driver.driver`: one gradient computation, alone, with its
  replicas, and with the rest of its step.
"""
