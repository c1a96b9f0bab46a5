"""Attention found in a traced graph, and exchanged for attention in blocks.

`matching` recognizes scores, softmax and products by their algebra; `substitution` builds both
passes in blocks and exchanges them.
"""
