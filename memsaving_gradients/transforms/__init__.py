"""Transforms that exchange whole subgraphs for others with the same results in less memory.

They run before planning: loops are replayed in segments, attention is computed in blocks, and masks
are packed into bits.
"""
