"""A model of TensorFlow's BFC allocator: it counts bytes in chunks, not bytes requested.

The "best fit with coalescing" (BFC) allocator serves GPUs, and CPUs where
``TF_CPU_ALLOCATOR_USE_BFC`` is set. It takes the smallest free chunk that is large enough. It
splits the chunk only if it is at least twice the request, or 128 MiB larger. So a buffer may hold
almost twice its bytes. Memory comes in regions (:mod:`graph_tools.memory.regions`). Free neighbors
in one region are merged. The allocator's statistics count chunks: a measured peak is larger than
the requested bytes, by up to a fifth. The model follows that bookkeeping (TensorFlow 2.16 to 2.21,
``bfc_allocator.cc``), in O(log n) a buffer.

In `allocated_peak`, each step has the same events in the same order and fills the same holes. In
`peaks_in_turn`, the order of ops changes from step to step, as threads change it: a small buffer in
the hole that a large one left sends the large one elsewhere. (Simulating the events of six real
steps in turn gives the measured peak; simulating one of them six times, up to a tenth less.) The
orders of the simulated executor are enough. Over 27 plans of seven networks, budgets count 1.04
times the worst of 30 measured steps on average, and 0.95 to 1.10 times; 25 plans take no more
than is counted. More disorder, with small buffers freed late at random, counts 0.92 to 1.25 times:
networks of few large ops never take the holes that it opens. Buffers from before the first step,
even freed ones, decide which holes there are: the same step of InceptionV3 took 33 MB in one
process and 37 MB in another. So several arenas are simulated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graph_tools.memory.liveness import requested_peak

__all__ = [
    "GRAIN",
    "GROWING",
    "WHOLE",
    "Buffers",
    "Peaks",
    "allocated_peak",
    "most_chunk",
    "peaks_in_turn",
]

#: For each buffer, the first and the last op during which it exists, and the requested bytes.
Buffers = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

#: Fact: the allocator rounds sizes up to this, bytes (``kMinAllocationSize``).
GRAIN = 256
#: Fact: a chunk larger than the request by this many bytes is split in any case
#: (``max_internal_fragmentation_bytes``).
_MOST_WASTE = 128 << 20
#: Fact: bytes of the first region where memory grows. Each further region is twice as large.
GROWING = 1 << 20
#: Fact: more bytes than any device has, so that one region holds all buffers.
WHOLE = 1 << 60


class Peaks(NamedTuple):
    """The most bytes in chunks while steps run in several orders.

    Attributes
    ----------
    average
        The peak of requested bytes in the worst order, times the average ratio of chunks to
        requested bytes at the steps' peaks.
    worst
        The peak of the worst step.
    """

    average: int
    worst: int


def most_chunk(size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the most bytes that the chunks of buffers may have.

    Examples
    --------
    >>> import numpy as np
    >>> most_chunk(np.array([1, 1 << 20, 1 << 30])).tolist()
    [512, 2097152, 1207959552]
    """
    need = _least_chunk(size)
    return need + np.minimum(need, _MOST_WASTE)


def _least_chunk(size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes that the allocator looks for."""
    return np.maximum(-(-size // GRAIN), 1) * GRAIN


def allocated_peak(
    born: npt.NDArray[np.int64],
    dies: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    first_region: int = GROWING,
) -> int:
    """Return the most bytes in chunks during the second of two equal training steps.

    The regions of the first step stay.

    Parameters
    ----------
    born, dies
        For each buffer, the first and the last op during which it exists. It is freed after the
        outputs of its last op are allocated.
    size
        For each buffer, the requested bytes.
    first_region
        Bytes of the first region.

    Examples
    --------
    A region of 8 MiB is not split for a buffer of 5 MiB:

    >>> import numpy as np
    >>> buffer = np.array([0]), np.array([1]), np.array([5 << 20])
    >>> allocated_peak(*buffer) >> 20, allocated_peak(*buffer, first_region=WHOLE) >> 20
    (8, 5)
    """
    arena, events = _Arena((), first_region), _events(born, dies, size)
    arena.play(events)
    return arena.play(events)


def peaks_in_turn(
    orders: Sequence[Buffers],
    *,
    before: Sequence[int] = (),
    steps: int = 10,
    arenas: int = 1,
    replaces: Sequence[npt.NDArray[np.int64]] = (),
    first_region: int = GROWING,
) -> Peaks:
    """Return the most bytes in chunks during steps that run in several orders, one after the other.

    Parameters
    ----------
    orders
        The buffers for each order that the ops may run in. The steps take the orders in turn.
    before
        Bytes of the buffers that exist before the steps and stay (variables, fed inputs). They are
        not counted, but they decide where the holes for other buffers are.
    steps
        The number of steps. All but the first two count, if there are more than two.
    arenas
        The number of arenas to simulate. Each one allocates the buffers of ``before`` differently.
    replaces
        For each order and each buffer, the place in ``before`` of the buffer that it replaces at
        the end of its life; -1: none. For example, an updated value replaces a variable's old one.
        If ``replaces`` is empty, no buffer replaces another.
    first_region
        Bytes of the first region.

    Examples
    --------
    Large buffers alone use the same places in every step:

    >>> import numpy as np
    >>> buffers = np.array([0, 1, 2]), np.array([1, 2, 3]), np.array([1 << 20] * 3)
    >>> peaks_in_turn([buffers]) == (2 << 20, 2 << 20)
    True
    """
    peaks = [requested_peak(*order) for order in orders]
    events = [_events(*order) for order in orders]
    replaced = [_replaced(into) for into in replaces] or [{}] * len(orders)
    first = 2 if steps > 2 else 0
    asked, chunks = [], []
    for arena_number, arena in enumerate(_arenas(before, arenas, first_region)):
        for number in range(steps):
            # In each arena, the steps that count begin with another order.
            which = (number + arena_number * (steps - first)) % len(orders)
            used = arena.play(events[which], replaced[which])
            if number >= first:
                asked.append(max(peaks[which], 1))
                chunks.append(used)
    return Peaks(int(max(peaks) * sum(chunks) / sum(asked)), max(chunks))


def _arenas(before: Sequence[int], many: int, first_region: int) -> Iterator[_Arena]:
    """Yield arenas that hold the buffers from before the step.

    The first arena allocates them in the given order. The second allocates an initial value of the
    same size before each and frees it after. The others do that in shuffled orders.
    """
    need = _least_chunk(np.array(before, np.int64)).tolist()
    for number in range(many if before else 1):
        order = np.arange(len(before))
        if number > 1:
            np.random.default_rng(number).shuffle(order)
        events: list[tuple[int, int]] = []
        for k in order.tolist():
            variable, initial = (-1 - k, need[k]), len(before)
            if number:
                events += [(initial, need[k]), variable, (initial, -1)]
            else:
                events.append(variable)
        yield _Arena(events, first_region)


class _Arena:
    """The chunks by address; the free ones also in a sorted list of (size, address)."""

    def __init__(self, before: Iterable[tuple[int, int]], first_region: int) -> None:
        """Simulate the events ``before`` the first step (see `play`). Buffers that stay have
        negative keys: -1 minus the place."""
        self.size_at: dict[int, int] = {}
        self.before: dict[int, int] = {}  # address of the left neighbor in the same region
        self.holes: list[tuple[int, int]] = []
        self.is_free: set[int] = set()
        self.address_of: dict[int, int] = {}
        self.next_region, self.end, self.used = first_region, 0, 0
        self.play(before)

    def play(self, events: Iterable[tuple[int, int]], replaced: Mapping[int, int] = {}) -> int:
        """Allocate buffers (key and `_least_chunk`) and free them (key and -1). Return the most
        bytes in chunks meanwhile, minus the bytes before.

        ``replaced``: for a key, the key of the buffer that is freed in its stead.
        """
        # One loop without calls: it runs a million times for one large graph.
        size_at, before, holes = self.size_at, self.before, self.holes
        is_free, address_of = self.is_free, self.address_of
        base = peak = used = self.used
        for key, need in events:
            if need >= 0:
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
) -> list[tuple[int, int]]:
    """Return the allocations (buffer number and bytes) and releases (number and -1), in order.

    Buffers that die with an op are freed before the buffers of the next op are allocated. Buffers
    that die together are freed in the order of their birth.
    """
    order = np.argsort(born, kind="stable")
    many = len(order)
    key = np.concatenate([order, order])
    when = np.concatenate([born[order], dies[order] + 1])
    what = np.repeat([1, 0], many)
    need = np.concatenate([_least_chunk(size[order]), np.full(many, -1)])
    sequence = np.lexsort((what, when))
    return list(zip(key[sequence].tolist(), need[sequence].tolist(), strict=True))


def _replaced(into: npt.NDArray[np.int64]) -> dict[int, int]:
    """Return, for the number of a buffer that replaces a buffer of before the step, the key of
    that.

    ``into``: the place of the replaced buffer, or -1.
    """
    return {k: -1 - i for k, i in enumerate(into.tolist()) if i >= 0}
