"""Exchanges of whole subgraphs for others with the same results in less memory.

They are made before a plan: loops that are replayed in segments, attention in blocks, bits in the
place of masks.
"""
