"""Planners for networks that are chains of stages.

`frontiers` and `stages` find the chain in a graph; `rotor` and `recursive` plan it by dynamic
programming.
"""
