"""Planners for networks that are chains of stages.

`frontiers` and `stages` find the chain in a graph; `chain` plans it by the dynamic program of
`rotor`, and `recursive` by nested checkpoints.
"""
