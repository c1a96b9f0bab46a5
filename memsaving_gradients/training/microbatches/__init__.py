"""One optimizer step from several smaller passes.

Activations grow with the batch; gradients do not. Where every example is treated by itself, the
gradient of a mean loss is the mean of the gradients of its parts, so that a batch may go through
the network in pieces, one after the other, and one buffer adds up what they give (Sohoni et al.
2019, section 3.3; Huang et al. 2018 call the pieces microbatches). It costs no computation, only
the efficiency of larger kernels, and works beside everything else: each piece's own backward pass
is planned like any other.
"""

from memsaving_gradients.training.microbatches.microbatch import microbatch as microbatch

__all__ = ["microbatch"]
