"""Bytes over a training step: what is alive, what the executor and the allocator make of it, and
what a run measures.

The simulations need no run. Each one is checked against an allocator's own record of a step.
"""
