"""Make TensorFlow follow a schedule.

Clones recompute forward ops, gates hold clones back until their triggers ran, and further edges
keep originals in the schedule's order. Two forms exist: control edges for TensorFlow's executor,
conditionals for XLA.
"""
