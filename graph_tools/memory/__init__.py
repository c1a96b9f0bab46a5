"""Bytes over a training step: bytes alive, simulations of executor and allocator, and measurements.

The simulations need no run. Each one is checked against an allocator's own record of a step.
"""
