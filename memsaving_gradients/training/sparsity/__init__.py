"""Training with sparse weights whose places move: dynamic sparse reparameterization (Mostafa & Wang
2019, arXiv 1902.05967).

From the first step on, only a part of a network's weights exists: values, in one variable for all
layers, and a bit for each place. At intervals the smallest weights are dropped; as many begin at
zero at random places, most of them in layers that kept most weights. Memory holds the values, their
optimizer slots and the bits. A layer's dense kernel exists only while it is used.
"""

from memsaving_gradients.training.sparsity.held import HeldBytes as HeldBytes
from memsaving_gradients.training.sparsity.held import sparse_bytes as sparse_bytes
from memsaving_gradients.training.sparsity.model import SparseModel as SparseModel
from memsaving_gradients.training.sparsity.model import sparsify as sparsify
from memsaving_gradients.training.sparsity.reparameterize import Reparameterize as Reparameterize

__all__ = ["HeldBytes", "Reparameterize", "SparseModel", "sparse_bytes", "sparsify"]
