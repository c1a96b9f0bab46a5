"""Keep what is expensive to compute, recompute what is cheap.

The outputs of convolutions, matrix products, pooling and recurrent kernels stay; activations,
normalizations, dropout masks and casts are run again just before backward reads them: a few percent
of a step's time, about half of the memory of a convolutional network. Recomputing a residual stream
goes back to the last place where it is known, so a few cheap tensors are kept as well: the cuts of
:mod:`~memsaving_gradients.planners.least_memory`, with all expensive outputs given.

Where an expensive op feeds a cheap one of the same bytes and nothing else (a convolution, its bias,
its activation, the addition of a shortcut), the last one's output is kept instead: the same bytes,
fewer ops to run again, and kernels that fuse them stay fused.
"""

from __future__ import annotations

from dataclasses import replace

from memsaving_gradients.planners import least_memory
from memsaving_gradients.planners.chains.frontiers import expensive_storages
from memsaving_gradients.planners.proposal import Limits, Proposal
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["plan"]


def plan(graph: TrainingGraph, limits: Limits = Limits()) -> Proposal:
    """Keep outputs of expensive forward ops; recompute the rest."""
    expensive = dict.fromkeys(expensive_storages(graph), "expensive to recompute")
    return least_memory.plan(graph, replace(limits, keep={**expensive, **limits.keep}))
