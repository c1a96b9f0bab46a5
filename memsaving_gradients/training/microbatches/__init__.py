"""One optimizer step from several smaller passes.

Activations grow with the batch; gradients do not. If each example is treated by itself, the
gradient of a mean loss is the mean of the gradients of its parts. A batch can then go through the
network in pieces, one after the other, and one buffer adds up their gradients (Sohoni et al. 2019,
section 3.3; Huang et al. 2018 call the pieces microbatches). This costs no computation, only the
efficiency of larger kernels. The backward pass of each piece is planned like any other.
"""

from memsaving_gradients.training.microbatches.microbatch import microbatch as microbatch

__all__ = ["microbatch"]
