"""The memory and time that training would take, found before a step runs.

``explain`` shows where memory goes and the extra time of each budget; ``largest_batch`` and
``fit_to`` search for settings that fit a memory; ``gradient_error`` measures how far an encoding
changes gradients.
"""
