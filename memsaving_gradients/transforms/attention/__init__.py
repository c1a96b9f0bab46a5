"""Attention that takes memory for queries and keys, not for their pairs.

Attention is computed block by block with an online softmax, whatever its scores are made of:
`dot_product_attention`, `additive_attention`, and the layers in `memsaving_gradients.keras` that
replace those of Keras. `pattern` finds attention in a traced graph and exchanges it.
"""

from __future__ import annotations

from memsaving_gradients.transforms.attention.additive import (
    additive_attention as additive_attention,
)
from memsaving_gradients.transforms.attention.dot_product import (
    dot_product_attention as dot_product_attention,
)

__all__ = ["additive_attention", "dot_product_attention"]
