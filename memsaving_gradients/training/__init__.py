"""Techniques in addition to rematerialization: microbatches, variables in 16 bits, sparse weights.

Each changes the model, the optimizer or the step, and works together with plans. Results may differ
from plain training where a module says so.
"""
