"""What TensorFlow's allocator makes of a sequence of buffers: bytes in chunks, not bytes asked for.

The "best fit with coalescing" (BFC) allocator serves GPUs, and CPUs where ``TF_CPU_ALLOCATOR_USE_BFC`` is set. It takes the
smallest free chunk that is large enough and splits it only if the chunk is at least twice the request (or 128 MiB
more), so that a buffer may hold almost twice its bytes. Memory comes in regions, each twice the one before, and free
neighbors of one region are merged. Its statistics count chunks: a measured peak is larger than the bytes asked for, by up
to a fifth. This is a model of that bookkeeping (TensorFlow 2.16 to 2.21, ``bfc_allocator.cc``), in O(log n) a buffer.

It knows one order of events; threads change it from step to step, and with it the holes that buffers fall into.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["allocated_peak"]

#: Sizes are rounded up to this.
_GRAIN = 256
#: A chunk larger than the request by this much is split in any case.
_MOST_WASTE = 128 << 20
#: The first region.
_FIRST_REGION = 1 << 20


def allocated_peak(
    born: npt.NDArray[np.int64],
    dies: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    *,
    steps: int = 2,
    before: Sequence[int] = (),
) -> int:
    """Most bytes in chunks while buffers come and go, in the last of ``steps`` equal training steps.

    Parameters
    ----------
    born, dies
        For each buffer, the first and the last op during which it exists; it is freed after the op's outputs
        were allocated.
    size
        For each buffer, the bytes asked for.
    steps
        How often the sequence runs; regions from earlier runs stay.
    before
        Bytes of buffers that are there before and stay (variables, fed inputs). They are not counted, but decide where the holes
        are that others fall into.

    Examples
    --------
    A region of 8 MiB is not split for a buffer of 5 MiB:

    >>> import numpy as np
    >>> allocated_peak(np.array([0]), np.array([1]), np.array([5 << 20])) >> 20
    8
    """
    order = np.lexsort((np.arange(len(born)), born))
    frees: dict[int, list[int]] = {}
    for k in order.tolist():
        frees.setdefault(int(dies[k]), []).append(k)
    arena = _Arena()
    for k, request in enumerate(before):
        arena.allocate(-1 - k, request)
    base = arena.used
    for _ in range(steps):
        arena.peak = arena.used
        now = -1
        for k in order.tolist():
            while now < born[k] - 1:
                now += 1
                arena.free(frees.get(now, ()))
            arena.allocate(k, int(size[k]))
        for later in sorted(t for t in frees if t > now):
            arena.free(frees[later])
    return arena.peak - base


class _Arena:
    """Chunks by address; free ones also in an ordered list of (size, address)."""

    def __init__(self) -> None:
        self.size_at: dict[int, int] = {}
        self.before: dict[int, int] = {}  # address of the left neighbor in the same region
        self.holes: list[tuple[int, int]] = []
        self.is_free: set[int] = set()
        self.address_of: dict[int, int] = {}
        self.next_region, self.end, self.used, self.peak = _FIRST_REGION, 0, 0, 0

    def allocate(self, key: int, request: int) -> None:
        need = max(_GRAIN, -(-request // _GRAIN) * _GRAIN)
        place = bisect_left(self.holes, (need, -1))
        if place == len(self.holes):
            self._grow(need)
            place = bisect_left(self.holes, (need, -1))
        size, address = self.holes.pop(place)
        self.is_free.discard(address)
        if size >= 2 * need or size - need >= _MOST_WASTE:
            rest = address + need
            self.size_at[address], self.size_at[rest] = need, size - need
            self.before[rest] = address
            after = address + size
            if after in self.before:
                self.before[after] = rest
            self._add_hole(rest)
            size = need
        self.address_of[key] = address
        self.used += size
        self.peak = max(self.peak, self.used)

    def free(self, keys: Sequence[int]) -> None:
        for key in keys:
            address = self.address_of.pop(key, None)
            if address is None:
                continue
            self.used -= self.size_at[address]
            after = address + self.size_at[address]
            if after in self.is_free and after in self.before:
                self._join(address, after)
            left = self.before.get(address)
            if left is not None and left in self.is_free:
                self._remove_hole(left)
                self._join(left, address)
                address = left
            self._add_hole(address)

    def _join(self, left: int, right: int) -> None:
        if right in self.is_free:
            self._remove_hole(right)
        after = right + self.size_at[right]
        self.size_at[left] += self.size_at.pop(right)
        del self.before[right]
        if after in self.before:
            self.before[after] = left

    def _add_hole(self, address: int) -> None:
        self.is_free.add(address)
        insort(self.holes, (self.size_at[address], address))

    def _remove_hole(self, address: int) -> None:
        self.is_free.discard(address)
        del self.holes[bisect_left(self.holes, (self.size_at[address], address))]

    def _grow(self, need: int) -> None:
        grown = False
        while self.next_region < need:
            self.next_region *= 2
            grown = True
        # One byte between regions keeps their chunks from being neighbors.
        address = self.end + 1
        self.size_at[address] = self.next_region
        self.end = address + self.next_region
        self._add_hole(address)
        if not grown:
            self.next_region *= 2
