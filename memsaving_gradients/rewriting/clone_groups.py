"""The clones that begin a run, and the clones that it waits for.

A run is the clones behind one gate. Most of them need not be held back, since they read a clone of
the run. A clone that may be merged with a clone of an earlier run shares the gate of that one.

A run is split where an op comes a second time: both clones would read the same, and the runtime
would merge them. It is also split where that keeps memory low. The schedule may begin the second of
two branches when the first is done; but the executor runs every op that is ready, so both would
begin, and hold their results, at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.rewriting.ordering import EARLY_SHARE, MOST_TRIGGERS, SLACK_SHARE
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["CloneRun"]


class CloneRun:
    """The clones of the current run, each an op and the number of its copy.

    Attributes
    ----------
    open
        Whether the run goes on.
    gate
        The number of the run's gate, which the last run keeps until another one begins.
    gates
        For each clone so far, the number of its gate, which may differ from the gate of its run.
    written
        Bytes that all clones have written so far.
    turn
        For each clone of the run, the value of ``written`` when it really runs, as in
        :mod:`memsaving_gradients.rewriting.ordering`.
    begun
        The value of ``written`` when the run began.
    ops
        The ops of the run.
    unread
        Clones of the run that no other clone reads.
    """

    def __init__(self, graph: TrainingGraph, merging: Merging, peak: int) -> None:
        self.graph, self.merging = graph, merging
        self.slack, self.large = peak * SLACK_SHARE, peak * EARLY_SHARE
        self.open = False
        self.gate: int | None = None
        self.gates: dict[Key, int] = {}
        self.written = self.begun = 0
        self.turn: dict[Key, int] = {}
        self.ops: set[int] = set()
        self.unread: dict[Key, None] = {}

    def begin(self, gate: int) -> None:
        """Begin a run behind a new gate."""
        self.open, self.gate = True, gate
        self.begun = self.written
        self.turn.clear()
        self.ops.clear()
        self.unread.clear()

    def close(self) -> None:
        """End the run at a backward op: the next clone begins another one."""
        self.open = False

    def tied_to(self, reads: Iterable[Key]) -> int | None:
        """Return the gate that a clone has to be behind, since it may be merged with a clone that
        it reads; ``None`` if it may be behind any."""
        tied = [self.gates[key] for key in reads if self.merging.merges(key[0])]
        # If it may be merged with either of two clones, both have to be there.
        return self.gate if self.gate in tied else next(iter(tied), None)

    def inside(self, reads: Collection[Key]) -> bool:
        """Return whether a clone waits because one of the clones that it reads is in the run."""
        return any(key in self.turn for key in reads)

    def must_part(self, clone: Key, reads: Collection[Key], *, in_order: bool) -> bool:
        """Return whether ``clone`` has to wait for the clones of the run; ``in_order``: also if it
        could run too early."""
        if clone[0] in self.ops:
            return True
        return in_order and self._is_early(reads) and self.graph.written[clone[0]] >= self.large

    def add(self, clone: Key, reads: Collection[Key], gate: int) -> None:
        """Note that ``clone`` is there, behind ``gate``."""
        self.gates[clone] = gate
        turn = self._ready(reads) if self._is_early(reads) else None
        self.written += self.graph.written[clone[0]]
        for key in reads:
            self.unread.pop(key, None)
        if gate == self.gate:
            self.turn[clone] = self.written if turn is None else turn
            self.ops.add(clone[0])
            self.unread[clone] = None

    def sinks(self) -> list[Key]:
        """Return the latest clones of the run that others can wait for without a change of how
        these are merged."""
        found = [
            key
            for key in self.unread
            if not self.merging.merges(key[0]) and self.merging.may_be_waited_for(*key)
        ]
        return found[-MOST_TRIGGERS:]

    def _ready(self, reads: Collection[Key]) -> int:
        return max((self.turn.get(key, self.begun) for key in reads), default=self.begun)

    def _is_early(self, reads: Collection[Key]) -> bool:
        return self.written - self._ready(reads) > self.slack
