"""Outputs in the buffers of inputs: TensorFlow's kernels may write a result into the buffer of an
input that no other op holds (``forward_input_or_allocate_output`` in ``op_kernel.h``)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["taken_over"]


def taken_over(made: Iterable[int], free: Iterable[int]) -> int:
    """Return the bytes of outputs that an op writes into buffers of inputs instead of new ones.

    Parameters
    ----------
    made
        Bytes of each output of an op that may do so (`op_types.FORWARDING`).
    free
        Bytes of each input that no op holds afterwards. Each takes one output, of the same size.

    Examples
    --------
    >>> taken_over(made=[8, 8, 4], free=[8, 16])
    8
    """
    left, taken = list(free), 0
    for size in made:
        if size and size in left:
            left.remove(size)
            taken += size
    return taken
