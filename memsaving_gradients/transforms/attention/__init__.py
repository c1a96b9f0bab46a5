"""Attention that takes memory for queries and keys, not for their pairs.

``dot_product_attention`` and ``additive_attention`` are functions of tensors; `memsaving_gradients.keras` has layers that stand in for those of
Keras.
"""

from __future__ import annotations

from memsaving_gradients.transforms.attention.additive import (
    additive_attention as additive_attention,
)
from memsaving_gradients.transforms.attention.dot_product import (
    dot_product_attention as dot_product_attention,
)

__all__ = ["additive_attention", "dot_product_attention"]
