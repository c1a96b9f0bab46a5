"""What TensorFlow's allocator makes of a sequence of buffers: bytes in chunks, not bytes asked for.

The "best fit with coalescing" (BFC) allocator serves GPUs, and CPUs where
``TF_CPU_ALLOCATOR_USE_BFC`` is set. It takes the smallest free chunk that is large enough and
splits it only if the chunk is at least twice the request (or 128 MiB more), so that a buffer may
hold almost twice its bytes. Memory comes in regions, each twice the one before, and free neighbors
of one region are merged. Its statistics count chunks: a measured peak is larger than the bytes
asked for, by up to a fifth. This is a model of that bookkeeping (TensorFlow 2.16 to 2.21,
``bfc_allocator.cc``), in O(log n) a buffer.

One order of events, step after step, fills the same holes again and again: `allocated_peak`.
Threads change the order of small things from step to step, and what lies in a hole that a large
buffer has left sends that elsewhere: `irregular_peaks`. (The allocation events of six real steps,
simulated one after the other through this model, give the measured peak; those of one step, six
times, up to a tenth less.) And what is in the arena since before the first step, and was there for
a while, decides which holes there are: of the same step of InceptionV3, within 33 or 37 MB, in one
process or another. So steps are simulated in several arenas.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graph_tools.memory.liveness import timeline

__all__ = ["GRAIN", "SMALL", "Buffers", "Peaks", "allocated_peak", "irregular_peaks"]

#: For each buffer, the first and the last op during which it exists, and the bytes asked for.
Buffers = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

#: Fact: the allocator rounds sizes up to this, bytes (``kMinAllocationSize``).
GRAIN = 256
#: Fact: a chunk larger than the request by this many bytes is split in any case
#: (``max_internal_fragmentation_bytes``).
_MOST_WASTE = 128 << 20
#: Fact: bytes of the first region.
_FIRST_REGION = 1 << 20
#: Buffers below this share of all that is alive at the peak come and go irregularly, up to so many
#: ops late. (Addends that are larger are worth an order.) Chosen by judgement.
SMALL, _LATE = 1 / 256, 8


class Peaks(NamedTuple):
    """Most bytes in chunks while steps come in several orders.

    Attributes
    ----------
    average
        In the worst order, if chunks are larger than what is asked for by as much as they are on
        average.
    worst
        In the worst step.
    """

    average: int
    worst: int


def allocated_peak(
    born: npt.NDArray[np.int64], dies: npt.NDArray[np.int64], size: npt.NDArray[np.int64]
) -> int:
    """Most bytes in chunks while buffers come and go, in the second of two equal training steps:
    regions of the first one stay.

    Parameters
    ----------
    born, dies
        For each buffer, the first and the last op during which it exists; it is freed after the
        op's outputs were allocated.
    size
        For each buffer, the bytes asked for.

    Examples
    --------
    A region of 8 MiB is not split for a buffer of 5 MiB:

    >>> import numpy as np
    >>> allocated_peak(np.array([0]), np.array([1]), np.array([5 << 20])) >> 20
    8
    """
    arena, rank = _Arena(), np.arange(len(born))
    arena.step(born, dies, size, rank)
    return arena.step(born, dies, size, rank)


def irregular_peaks(
    orders: Sequence[Buffers],
    *,
    before: Sequence[int] = (),
    steps: int = 10,
    arenas: int = 1,
    replaces: Sequence[npt.NDArray[np.int64]] = (),
) -> Peaks:
    """Most bytes in chunks in several orders, if small buffers come and go irregularly.

    Parameters
    ----------
    orders
        Buffers, for each of the orders that the ops may run in; step by step in turn.
    before
        Bytes of buffers that are there before and stay (variables, fed inputs). They are not
        counted, but decide where the holes are that others fall into.
    steps
        How many steps. All but the first two count, if there are more.
    arenas
        In how many arenas they are simulated, which differ in how what is there before came there.
    replaces
        For each of the orders, for each buffer, the place in ``before`` of the buffer that it takes
        the place of when its time is over (the updated value of a variable); -1: of none. Nothing:
        none does.

    Notes
    -----
    Buffers of less than `SMALL` of the peak are freed up to `_LATE` ops late, and those of one op
    are allocated in any order. The same numbers every time.

    Examples
    --------
    Large buffers alone fit together again and again:

    >>> import numpy as np
    >>> buffers = np.array([0, 1, 2]), np.array([1, 2, 3]), np.array([1 << 20] * 3)
    >>> irregular_peaks([buffers]) == (2 << 20, 2 << 20)
    True
    """
    random = np.random.default_rng(0)
    peaks = [
        int(timeline(*order, int(order[1].max(initial=0)) + 1).max(initial=0)) for order in orders
    ]
    first = 2 if steps > 2 else 0
    asked, chunks = [], []
    for arena_number, arena in enumerate(_arenas(before, arenas)):
        for number in range(steps):
            # The steps that count begin with another order in each.
            which = (number + arena_number * (steps - first)) % len(orders)
            born, dies, size = orders[which]
            late = random.integers(0, _LATE + 1, len(dies)) * (size < peaks[which] * SMALL)
            into = replaces[which] if replaces else None
            used = arena.step(born, dies + late, size, random.random(len(born)), into)
            if number >= first:
                asked.append(max(peaks[which], 1))
                chunks.append(used)
    return Peaks(int(max(peaks) * sum(chunks) / sum(asked)), max(chunks))


def _arenas(before: Sequence[int], many: int) -> Iterator[_Arena]:
    """Arenas with what is there before the step: as it came; each made from something as large; and
    the same in other orders.

    Initial values are tensors of their own, while variables are made of them.
    """
    for number in range(many if before else 1):
        order = np.arange(len(before))
        if number > 1:
            np.random.default_rng(number).shuffle(order)
        events: list[tuple[int, int]] = []
        for k in order.tolist():
            variable, initial = (-1 - k, before[k]), len(before)
            if number:
                events += [(initial, before[k]), variable, (initial, -1)]
            else:
                events.append(variable)
        yield _Arena(events)


class _Arena:
    """Chunks by address; free ones also in an ordered list of (size, address)."""

    def __init__(self, before: Iterable[tuple[int, int]] = ()) -> None:
        """``before``: what was allocated, and freed, before the first step; see `_play`. Keys that
        stay are negative: -1 less the place."""
        self.size_at: dict[int, int] = {}
        self.before: dict[int, int] = {}  # address of the left neighbor in the same region
        self.holes: list[tuple[int, int]] = []
        self.is_free: set[int] = set()
        self.address_of: dict[int, int] = {}
        self.next_region, self.end, self.used = _FIRST_REGION, 0, 0
        self._play(before, {})

    def step(
        self,
        born: npt.NDArray[np.int64],
        dies: npt.NDArray[np.int64],
        size: npt.NDArray[np.int64],
        rank: npt.NDArray[Any],
        into: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """The most bytes in chunks of one step, more than before it; buffers that are born together
        come by ``rank``.

        ``into``: for each buffer, the one from before that is freed instead, and that it is in the
        place of from then on; or -1.
        """
        replaced = (
            {} if into is None else {k: -1 - i for k, i in enumerate(into.tolist()) if i >= 0}
        )
        return self._play(_events(born, dies, size, rank), replaced)

    def _play(self, events: Iterable[tuple[int, int]], replaced: Mapping[int, int]) -> int:
        """Allocate buffers (key and bytes) and free them (key and -1); the most bytes in chunks
        meanwhile, more than before.

        ``replaced``: for keys, the keys of the buffers that are freed instead.
        """
        # One loop without calls: it runs a million times for one large graph.
        size_at, before, holes = self.size_at, self.before, self.holes
        is_free, address_of = self.is_free, self.address_of
        base = peak = used = self.used
        for key, request in events:
            if request >= 0:
                need = max(GRAIN, -(-request // GRAIN) * GRAIN)
                place = bisect_left(holes, (need, -1))
                if place == len(holes):
                    self._grow(need)
                    place = bisect_left(holes, (need, -1))
                size, address = holes.pop(place)
                is_free.discard(address)
                if size >= 2 * need or size - need >= _MOST_WASTE:
                    rest = address + need
                    size_at[address], size_at[rest] = need, size - need
                    before[rest] = address
                    after = address + size
                    if after in before:
                        before[after] = rest
                    is_free.add(rest)
                    insort(holes, (size - need, rest))
                    size = need
                address_of[key] = address
                used += size
                if used > peak:
                    peak = used
                continue
            old = replaced.get(key)
            if old is not None:
                address_of[key], address_of[old] = address_of[old], address_of[key]
            address = address_of.pop(key, -1)
            if address < 0:
                continue
            size = size_at[address]
            used -= size
            after = address + size
            if after in is_free and after in before:
                more = size_at.pop(after)
                is_free.discard(after)
                del holes[bisect_left(holes, (more, after))]
                del before[after]
                size += more
                size_at[address] = size
                if (behind := address + size) in before:
                    before[behind] = address
            left = before.get(address)
            if left is not None and left in is_free:
                more = size_at[left]
                del holes[bisect_left(holes, (more, left))]
                del size_at[address], before[address]
                if (behind := address + size) in before:
                    before[behind] = left
                address, size = left, more + size
                size_at[address] = size
            is_free.add(address)
            insort(holes, (size, address))
        self.used = used
        return peak - base

    def _grow(self, need: int) -> None:
        grown = False
        while self.next_region < need:
            self.next_region *= 2
            grown = True
        # One byte between regions keeps their chunks from being neighbors.
        address = self.end + 1
        self.size_at[address] = self.next_region
        self.end = address + self.next_region
        self.is_free.add(address)
        insort(self.holes, (self.next_region, address))
        if not grown:
            self.next_region *= 2


def _events(
    born: npt.NDArray[np.int64],
    dies: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    rank: npt.NDArray[Any],
) -> Iterable[tuple[int, int]]:
    """When each buffer is allocated (its number and its bytes) and freed (its number and -1), in
    order.

    Those that die with an op are freed before those of the next one are allocated; those that die
    together, in the order of their birth.
    """
    order = np.lexsort((rank, born))
    many = len(order)
    key = np.concatenate([order, order])
    when = np.concatenate([born[order], dies[order] + 1])
    what = np.repeat([1, 0], many)
    request = np.concatenate([size[order], np.full(many, -1)])
    sequence = np.lexsort((what, when))
    return zip(key[sequence].tolist(), request[sequence].tolist(), strict=True)
