"""A training step as planners see it: forward ops, backward ops, residuals; no TensorFlow.

Ops are in one topological order, the forward ones first. Planners work with *storages*: all values
in one buffer are one storage, and a plan keeps or saves the bytes of whole storages. Everything
here is plain numbers, so planners can be tested on handmade graphs as well as on captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from memsaving_gradients.schedules.arrays import BoolArray, FloatArray, IntArray
from memsaving_gradients.schedules.storage import Stored

__all__ = ["TrainingGraph"]


Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class TrainingGraph:
    """The ops of one training step.

    Attributes
    ----------
    first_backward
        Ops before this position are forward ops, those from it on are backward ops.
    reads
        For each op, the values whose buffers it reads, in input order (shape-only inputs left out).
    writes
        For each op, the values that it makes.
    producer
        For each value, its op.
    storage
        For each value, the value whose buffer it uses.
    size
        For each value, the bytes of its own buffer (0 for views and sources).
    source
        For each value, whether it is available at any time without costing memory in the step.
    clonable
        For each op, whether it may run again.
    joins
        For each op, whether it only concatenates its inputs.
    forwards
        For each op, whether it may write into an input buffer that no other op needs.
    fuses
        For each op, whether the runtime may fuse it with the only reader of its result.
    seconds
        For each op, its estimated time.
    expensive
        For each op, whether its type is one of heavy computation.
    ends
        The forward ops that make the differentiated values (losses).
    targets
        Values that outlive the step: gradients that are held until all are made.
    sums
        For each op that adds many or large addends, and may add them one by one as they become
        available, the addends in that order.
    all_sums
        Whether all of ``sums`` must do so: an op that stays whole may get another order when the
        graph runs.
    waits
        For each op that waits for others without reading them, these others.
    workspace
        For each op, bytes in addition to its outputs while it runs (``None``: none).
    storable
        For each op whose value may be stored, the ways to store it.
    """

    first_backward: int
    reads: Sequence[tuple[int, ...]]
    writes: Sequence[tuple[int, ...]]
    producer: IntArray
    storage: IntArray
    size: IntArray
    source: BoolArray
    clonable: BoolArray
    joins: BoolArray
    forwards: BoolArray
    fuses: BoolArray
    seconds: FloatArray
    expensive: BoolArray
    ends: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    sums: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    all_sums: bool = False
    waits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    workspace: IntArray | None = None
    storable: Mapping[int, tuple[Stored, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        reads: Sequence[tuple[int, ...]],
        first_backward: int,
        *,
        size: int | Sequence[int] = 1,
        seconds: float | Sequence[float] = 1.0,
        clonable: bool | Sequence[bool] = True,
    ) -> TrainingGraph:
        """Return a graph in which each op makes one value, in a buffer of its own.

        Parameters
        ----------
        reads
            For each op, the ops whose values it reads.
        first_backward
            The first backward op.
        size, seconds, clonable
            The bytes of an op's value, its time, and whether it may run again. One for all ops, or
            one for each.

        Examples
        --------
        >>> chain = TrainingGraph.of([(), (0,), (1,), (2, 1), (3, 0)], 3, size=8)
        >>> list(chain.residuals), chain.length
        ([2, 1, 0], 5)
        """
        many = len(reads)
        no, each = np.zeros(many, np.bool_), np.arange(many)
        return cls(
            first_backward=first_backward,
            reads=reads,
            writes=[(k,) for k in range(many)],
            producer=each,
            storage=each,
            size=np.broadcast_to(np.asarray(size, np.int64), many).copy(),
            source=no,
            clonable=np.broadcast_to(np.asarray(clonable, np.bool_), many).copy(),
            joins=no,
            forwards=no,
            fuses=no,
            seconds=np.broadcast_to(np.asarray(seconds, np.float64), many).copy(),
            expensive=no,
        )

    @property
    def length(self) -> int:
        """The number of ops."""
        return len(self.reads)

    def derived(self, make: Callable[..., Derived], *arguments: Hashable) -> Derived:
        """Return ``make(self, *arguments)``, made only once for this graph, and shared by its
        plans."""
        key = (make, *arguments)
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        return self._derived[key]

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def residuals(self) -> KeysView[int]:
        """The forward storages that backward ops read, without sources, in the order of their first
        reads."""
        found: dict[int, None] = {}
        storage, source = self.storage.tolist(), self.source.tolist()
        forward = (self.producer < self.first_backward).tolist()
        for op in range(self.first_backward, self.length):
            for value in self.reads[op]:
                root = storage[value]
                if forward[root] and not source[root]:
                    found[root] = None
        return found.keys()

    @cached_property
    def residual_bytes(self) -> int:
        """The bytes of all residuals."""
        return int(self.size[list(self.residuals)].sum())

    @cached_property
    def written(self) -> list[int]:
        """For each op, the bytes of the buffers that it writes."""
        sizes = self.size.tolist()
        return [sum(sizes[value] for value in values) for values in self.writes]

    @cached_property
    def losable(self) -> BoolArray:
        """For each value, whether a plan may drop and recompute it: it is a forward value, not a
        source, its ops are clonable, and keeping it is not better in any case."""
        return self._losable(self.clonable)

    def losable_with(self, stored: Collection[int]) -> list[bool]:
        """Return `losable` if the values of the ops ``stored`` are stored, and not recomputed."""
        again = self.clonable.copy()
        again[list(stored)] = True
        return self._losable(again).tolist()

    def _losable(self, again: BoolArray) -> BoolArray:
        early = self.producer < self.first_backward
        both = again[self.producer] & again[self.producer[self.storage]]
        return self._without_dominated(early & both & ~self.source[self.storage])

    def _without_dominated(self, losable: BoolArray) -> BoolArray:
        """Return ``losable`` without values that are better kept in any plan.

        The only reader of a value that cannot be recomputed, such as random numbers, makes others
        of at most its bytes, such as the mask of a dropout layer. Recomputing the mask would keep
        the random numbers from the forward pass on, in no fewer bytes than the mask.
        """
        own = self.storage == np.arange(len(self.storage))
        once = own & ~losable & ~self.source & (self.producer < self.first_backward)
        once[list(self.targets)] = False
        better = np.zeros(len(own), np.bool_)
        stack = np.flatnonzero(once & (self.size > 0)).tolist()
        reader = self._only_reader.tolist() if stack else []
        while stack:
            root = stack.pop()
            op = reader[root]
            made = [v for v in self.writes[op] if own[v] and self.size[v]]
            smaller = made and self.size[made].sum() <= self.size[root]
            if 0 <= op < self.first_backward and smaller and losable[made].all():
                better[made] = True
                stack += made
        return losable & ~better[self.storage]

    @cached_property
    def _only_reader(self) -> IntArray:
        """For each storage, the op that alone reads it; -1 if there is none, or several do."""
        counts = [len(values) for values in self.reads]
        ops = np.repeat(np.arange(self.length), counts)
        read = np.fromiter((v for values in self.reads for v in values), np.int64, len(ops))
        pairs = np.unique(np.stack([self.storage[read], ops]), axis=1)
        reader = np.full(len(self.storage), -1)
        reader[pairs[0]] = pairs[1]
        reader[np.bincount(pairs[0], minlength=len(reader)) != 1] = -1
        return reader

    @cached_property
    def losable_reads(self) -> list[tuple[int, ...]]:
        """For each op, the losable values that it reads."""
        return self.reads_among(self.losable.tolist())

    def reads_among(self, chosen: Sequence[bool]) -> list[tuple[int, ...]]:
        """Return, for each op, the values it reads that are ``chosen``, a list with an entry for
        each value."""
        return [tuple(v for v in read if chosen[v]) for read in self.reads]

    @cached_property
    def merged(self) -> dict[int, int]:
        """The values that the runtime may merge away, each with its reader: an op that fuses makes
        the value, and its only reader is a forward op, but no concatenation."""
        count = np.zeros(len(self.storage), np.int64)
        reader = np.zeros(len(self.storage), np.int64)
        for op, values in enumerate(self.reads):
            for value in values:
                count[value] += 1
                reader[value] = op
        return {
            value: int(reader[value])
            for op in np.flatnonzero(self.fuses[: self.first_backward]).tolist()
            for value in self.writes[op]
            if count[value] == 1
            and reader[value] < self.first_backward
            and not self.joins[reader[value]]
        }

    def end_of_kernel(self, storage: int) -> int:
        """Return the storage to keep instead of one that the runtime merges away: the output of the
        last op in the fused kernel.

        A value kept between fused ops has a second reader. The originals then run unfused, and
        their last bits differ from plain training.
        """
        value = storage
        while value in self.merged and len(made := self.writes[self.merged[value]]) == 1:
            value = made[0]
        return int(self.storage[value])

    @cached_property
    def live(self) -> list[bool]:
        """For each op, whether it depends on a value computed in the step; waiting for any other op
        has no effect."""
        storage, source, producer = (
            self.storage.tolist(),
            self.source.tolist(),
            self.producer.tolist(),
        )
        live: list[bool] = []
        for op in range(self.length):
            if op < self.first_backward:
                live.append(any(not source[storage[v]] for v in self.writes[op]))
            else:
                live.append(
                    any(not source[storage[v]] and live[producer[v]] for v in self.reads[op])
                )
        return live

    @cached_property
    def total_seconds(self) -> float:
        """The estimated time of the step."""
        return float(self.seconds.sum())
