"""Long sums, added up as their addends come, in the order of TensorFlow's kernel.

`AddN` needs all of its addends at once: the gradient of a weight that is used in every step of a recurrence holds one for each.
Its kernel adds some first (those that groups of eight leave over, at least two), then one group of eight after the other, each from
left to right. A chain of additions in that order gives the same bits, and each addend dies as soon as it is added. (Grappler's
arithmetic rewriting, where it is on, sorts what `AddN` reads by name, and so changes the last bits of plain training.)

The chain is built along with the schedule. So an addend can wait until the one before it has been added: the executor, free
to choose, makes all of them first if nothing else is due, and adds them up last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from graph_tools import _tf
from memsaving_gradients.training_graph import TrainingGraph

__all__ = ["Sums"]

#: Addends of one group in TensorFlow's kernel.
GROUP = 8


class Sums:
    """The sums of a graph that become chains, each as far as its addends have been made.

    Parameters
    ----------
    graph, ops
        The training graph, and the op at each of its positions.
    chained
        Positions of the sums.
    """

    def __init__(
        self, graph: TrainingGraph, ops: Sequence[tf.Operation], chained: Collection[int]
    ) -> None:
        self._chains = {position: _Chain(ops[position]) for position in chained}
        # Each addend is read by its sum alone.
        self._sum_of = {
            int(graph.producer[value]): position
            for position in chained
            for value in graph.reads[position]
        }
        self._made: set[tf.Operation] = set()
        self._bytes = {
            position: sum(int(graph.size[value]) for value in graph.reads[position])
            for position in chained
        }

    def bytes_of(self, position: int) -> int:
        """Bytes of all addends of the sum that the op at ``position`` makes one of; 0 if there is none."""
        return self._bytes.get(self._sum_of.get(position, -1), 0)

    def last_of(self, position: int) -> tf.Operation | None:
        """The last addition so far in the sum that the op at ``position`` makes an addend of."""
        return self._chains[self._sum_of[position]].last

    def add(self, position: int, made: tf.Operation) -> tf.Operation | None:
        """Add what ``made``, the op that stands at ``position``, has made, and what waited for it; the last addition, if any."""
        self._made.add(made)
        number = self._sum_of.get(position)
        return None if number is None else self._chains[number].go_on(self._made)

    def total(self, position: int) -> tf.Tensor:
        """The end of the chain for the sum at ``position``, all of whose addends have been made."""
        return self._chains[position].finished()


class _Chain:
    """One sum: ``total`` of the first addends and of whole groups, ``part`` of the group at hand, ``taken`` addends in both."""

    def __init__(self, op: tf.Operation) -> None:
        self.op, self.taken = op, 0
        head = len(op.inputs) % GROUP
        self.head = head if head >= 2 else head + GROUP
        self.total: tf.Tensor | None = None
        self.part: tf.Tensor | None = None
        self.last: tf.Operation | None = None

    def go_on(self, made: Collection[tf.Operation]) -> tf.Operation | None:
        """Take the next addends, as long as those are ``made``."""
        before = self.last
        while self.taken < len(self.op.inputs) and self.op.inputs[self.taken].op in made:
            self._take(self.op.inputs[self.taken])
        return None if self.last is before else self.last

    def finished(self) -> tf.Tensor:
        while self.taken < len(self.op.inputs):
            self._take(self.op.inputs[self.taken])
        assert self.total is not None and self.part is None
        return self.total

    def _take(self, addend: tf.Tensor) -> None:
        self.taken += 1
        if self.taken <= self.head:
            self.total = self._added(self.total, addend)
            return
        self.part = self._added(self.part, addend)
        if (self.taken - self.head) % GROUP == 0:
            self.total, self.part = self._added(self.total, self.part), None

    def _added(self, total: tf.Tensor | None, addend: tf.Tensor) -> tf.Tensor:
        if total is None:
            return addend
        added = tf.raw_ops.AddV2(x=total, y=addend, name="accumulate")
        # Grappler would merge the chain into one AddN again.
        _tf.protect(added.op)
        self.last = added.op
        return added
