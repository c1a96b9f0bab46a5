"""Attention in blocks of queries and keys, which never holds its largest tensors as a whole.

`dot_product_attention` computes scores block by block with an online softmax. `additive_attention`
keeps its scores and computes the sums behind them in blocks. The layers in
`memsaving_gradients.keras` replace Keras' own. `pattern` exchanges attention in a traced graph.
"""

from __future__ import annotations

from memsaving_gradients.transforms.attention.additive import (
    additive_attention as additive_attention,
)
from memsaving_gradients.transforms.attention.dot_product import (
    dot_product_attention as dot_product_attention,
)

__all__ = ["additive_attention", "dot_product_attention"]
