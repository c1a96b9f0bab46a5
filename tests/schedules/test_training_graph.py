"""Tests of :mod:`memsaving_gradients.schedules.training_graph`."""

from __future__ import annotations

import pytest

from memsaving_gradients.planners import Limits, auto
from memsaving_gradients.schedules import TrainingGraph, ordered, simulate


def _dropout_layers(many: int) -> TrainingGraph:
    """Return layers that each multiply their result with a mask, made of random numbers."""
    reads, size, seconds, clonable = [()], [32], [1.0], [False]

    def op(*read: int, nbytes: int = 32, takes: float = 1.0, again: bool = True) -> int:
        reads.append(read)
        size.append(nbytes)
        seconds.append(takes)
        clonable.append(again)
        return len(reads) - 1

    x, kept = 0, []
    for _ in range(many):
        numbers = op(again=False)
        mask, hidden = op(numbers, nbytes=8), op(x, takes=10.0)
        x = op(hidden, mask)
        kept.append((mask, hidden))
    dx, border = op(x, again=False), len(reads) - 1
    for mask, hidden in reversed(kept):
        dx = op(op(dx, mask, again=False), hidden, takes=10.0, again=False)
    return TrainingGraph.of(reads, border, size=size, seconds=seconds, clonable=clonable)


def test_a_mask_of_random_numbers_is_kept_instead_of_the_numbers():
    # The numbers, the mask, a product.
    graph = TrainingGraph.of(
        [(), (0,), (1,), (2, 1)], 3, size=[4, 1, 4, 4], clonable=[False, True, True, False]
    )
    assert graph.losable.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("reads", "sizes"),
    [
        # The mask is larger than the numbers.
        ([(), (0,), (1,), (2, 1)], [1, 4, 4, 4]),
        # The backward pass reads the numbers.
        ([(), (0,), (1,), (2, 1, 0)], [4, 1, 4, 4]),
        # Another forward op reads the numbers.
        ([(), (0,), (1, 0), (2, 1)], [4, 1, 4, 4]),
    ],
)
def test_a_mask_may_be_recomputed_where_that_can_save_memory(reads, sizes):
    graph = TrainingGraph.of(reads, 3, size=sizes, clonable=[False, True, True, False])
    assert graph.losable[1]


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_plans_of_networks_with_dropout_are_near_the_bound(share):
    graph = _dropout_layers(24)
    plain = simulate(graph, ordered(graph)).peak
    found = auto.plan(graph, Limits(budget=int(share * plain), quick=True))
    assert found.peak <= share * plain
    full = auto.plan(graph, Limits(budget=int(share * plain)))
    assert found.extra_seconds <= max(full.lower_bound * 1.15, full.lower_bound + 12.0)
