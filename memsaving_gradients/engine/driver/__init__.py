"""From plan to plan, until one keeps its budget as it runs.

How the executor runs a step is known when the step is rewritten. Where that breaks the promise, the
rewrite is taken back, and a plan is made for less; at last the plan of least memory. The same once
more for the step as a whole, when the function is traced to its end
(:mod:`~memsaving_gradients.engine.whole_step`).

- :mod:`~memsaving_gradients.engine.driver.attempt`: a plan that the graph follows.
- :mod:`~memsaving_gradients.engine.driver.attempts`: one after the other, for a step as it stands.
- :mod:`~memsaving_gradients.engine.driver.candidates`: the steps that plans are made for, which
  differ in how loops are replayed and whether masks are packed; the first that fits.
- :mod:`~memsaving_gradients.engine.driver.following`: one gradient computation, alone, beside its
  replicas, and with the rest of its step.
"""
