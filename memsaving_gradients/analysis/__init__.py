"""What training would take, found out before a step runs.

``explain`` shows where memory goes and what each budget costs; ``largest_batch`` and ``fit_to``
search for settings that fit a memory; ``gradient_error`` measures what an encoding does to
gradients.
"""
