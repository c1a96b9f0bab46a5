"""Sums, added up as their addends come, in the order of TensorFlow's kernel.

`AddN` needs all of its addends at once: the gradient of a weight that is used in every step of a
recurrence holds one for each, and that of what a normalization reads is the sum of three tensors of
its size. The kernel adds some first (those that groups of eight leave over, at least two), then one
group of eight after the other, each from left to right. A chain of additions in that order gives
the same bits, and each addend dies as soon as it is added. The kernel begins with the first addend
whose buffer it can take over; if that is neither the first nor the second, the order is another
one, so that such a sum is left alone.

Grappler, where its arithmetic rewriting is on, sorts what `AddN` reads by name. Short sums follow
it. Long ones do not: sorted, the tenth addend comes before the second, and nearly all of them would
have to wait. So their last bits differ from those of plain training, where it is on. And nobody can
follow its memory optimizer: where the graph takes more than 0.8 of a device's memory by its own
estimate (on a CPU, of 256 MiB), it makes a variable of each sum that has an addend alive when most
is, zeroes it, and adds in the order in which addends happen to come. Plain training has most alive
before such sums begin; a plan that recomputes has it among them. So in a graph that may be as
large, every sum of three or more becomes a chain.

The chain is built along with the schedule. So an addend can wait until the one before it has been
added: the executor, free to choose, makes all of them first if nothing else is due, and adds them
up last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.grappler.constant_folding import input_name
from graph_tools.memory.bfc_allocator import SMALL
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs
from memsaving_gradients.schedules.liveness import SUMMED_AT_ONCE, summed_first
from memsaving_gradients.schedules.order import LONG_SUM
from memsaving_gradients.schedules.training_graph import IntArray, TrainingGraph

__all__ = ["Sums", "chainable", "may_become_variables"]

#: Other readers of an addend are looked for among so many ops that the sum needs.
MOST_LOOKED_AT = 1000
#: Fact: of a device's memory, the share from which on grappler's memory optimizer makes variables
#: of sums (``SchedulingPass``, TensorFlow 2.21).
CROWDED = 0.8
#: Fact: what TensorFlow takes a CPU's memory for, bytes, however much there is.
CPU_MEMORY = 256 << 20


def may_become_variables(
    ops: OpGraph, first_backward: int, batch: int, results: Collection[int]
) -> bool:
    """Whether grappler's memory optimizer may make variables of sums: by what backward ops read of
    forward ones, and results.

    Bytes are counted as grappler does, for each value its own; what is read of variables is among
    them. On other devices than a CPU it always may: nobody tells here what memory they have.
    """
    if tf.config.list_logical_devices("GPU"):
        return True
    counted = {value for values in ops.inputs[first_backward:] for value in values}
    counted = {value for value in counted if ops.producer[value] < first_backward}
    counted.update(results)
    found = sum(tensor_bytes(ops.tensor(value)).at(batch) for value in counted)
    return found > CROWDED * CPU_MEMORY


def chainable(
    ops: OpGraph,
    first_backward: int,
    sizes: IntArray,
    results: Collection[int],
    *,
    short: bool,
    small: bool = False,
) -> dict[int, tuple[int, ...]]:
    """Backward sums that a chain of additions may stand for, and the order of their addends.

    ``sizes``: bytes of each value's own buffer. ``results``: values that outlive the step.
    ``short``: whether sums of few, but large addends are among them, and with ``small`` those of
    small ones.
    """
    readers: list[list[int]] = [[] for _ in ops.producer]
    for op, values in enumerate(ops.inputs):
        for value in values:
            readers[value].append(op)
    forward = (ops.producer < first_backward) & ~ops.source
    large = SMALL * float(sizes[forward].sum())
    by_name = _sorts_addends()

    def is_free(value: int, position: int) -> bool:
        """Whether nobody else needs the buffer of an addend any more when the sum runs."""
        others = set(readers[value]) - {position}
        own = ops.storage[value] == value and value not in results
        return own and _needs(ops, position, others, int(ops.producer[value]))

    found = {}
    for position, op in enumerate(ops.ops[first_backward:], first_backward):
        addends = ops.inputs[position]
        if (
            op.type != "AddN"
            or not ops.here[position]
            or position in ops.conditional
            or len(addends) < 3
            or not op.inputs[0].dtype.is_floating
        ):
            continue
        if len(set(addends)) < len(addends) or any(
            ops.producer[value] < first_backward for value in addends
        ):
            continue
        if len(addends) >= LONG_SUM:
            if all(len(readers[value]) == 1 for value in addends):
                found[position] = addends
        elif short and (small or sizes[addends[0]] >= large):
            if by_name:
                addends = tuple(sorted(addends, key=lambda value: input_name(ops.tensor(value))))
            if any(is_free(value, position) for value in addends[:2]):
                found[position] = addends
    return found


def _sorts_addends() -> bool:
    """Whether grappler will sort what `AddN` reads by name, as far as is known here: a session may
    have options of its own."""
    options = tf.config.optimizer.get_experimental_options()
    return not options.get("disable_meta_optimizer") and options.get(
        "arithmetic_optimization", True
    )


def _needs(ops: OpGraph, position: int, others: set[int], first: int) -> bool:
    """Whether an op needs all ``others``, which stand behind op ``first``."""
    left, seen, stack = set(others), {position}, [position]
    while left and stack and len(seen) < MOST_LOOKED_AT:
        op = stack.pop()
        for before in (*(int(ops.producer[v]) for v in ops.inputs[op]), *ops.controls[op]):
            if before > first and before not in seen:
                seen.add(before)
                left.discard(before)
                stack.append(before)
    return not left


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
        self.chained = frozenset(chained)
        self._chains: dict[int, _Chain] = {}
        self._sums_of: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}
        self._made: set[tf.Operation] = set()
        for position in sorted(chained):
            addends = graph.sums[position]
            places = [graph.reads[position].index(value) for value in addends]
            self._chains[position] = _Chain(ops[position], places)
            self._bytes[position] = int(graph.size[graph.storage[list(addends)]].sum())
            for op in {int(graph.producer[value]) for value in addends}:
                self._sums_of.setdefault(op, []).append(position)

    def of(self, position: int) -> Sequence[int]:
        """The sums that the op at ``position`` makes an addend of."""
        return self._sums_of.get(position, ())

    def last_of(self, position: int, least: float) -> list[tf.Operation]:
        """The last additions so far in those sums that the op at ``position`` makes an addend of
        and that add ``least`` bytes or more."""
        sums = [s for s in self.of(position) if self._bytes[s] >= least]
        return [last for s in sums if (last := self._chains[s].last) is not None]

    def add(self, position: int, made: tf.Operation) -> tf.Operation | None:
        """Add what ``made``, the op that stands at ``position``, has made, and what waited for it;
        the last addition, if any."""
        self._made.add(made)
        added = [self._chains[s].go_on(self._made) for s in self.of(position)]
        return next((last for last in reversed(added) if last is not None), None)

    def total(self, position: int) -> tf.Tensor:
        """The end of the chain for the sum at ``position``, all of whose addends have been made."""
        return self._chains[position].finished()


class _Chain:
    """One sum: ``total`` of the first addends and of whole groups, ``part`` of the group at hand,
    ``taken`` addends in both.

    ``places``: where the op reads the addends, in the order in which they are added.
    """

    def __init__(self, op: tf.Operation, places: Sequence[int]) -> None:
        self.op, self.places, self.taken = op, places, 0
        self.head = summed_first(len(places))
        self.total: tf.Tensor | None = None
        self.part: tf.Tensor | None = None
        self.last: tf.Operation | None = None

    def go_on(self, made: Collection[tf.Operation]) -> tf.Operation | None:
        """Take the next addends, as long as those are ``made``."""
        before = self.last
        while self.taken < len(self.places) and self._next.op in made:
            self._take()
        return None if self.last is before else self.last

    def finished(self) -> tf.Tensor:
        while self.taken < len(self.places):
            self._take()
        assert self.total is not None and self.part is None
        return self.total

    @property
    def _next(self) -> tf.Tensor:
        # Looked up when it is needed: another tensor may stand for the addend by now.
        return self.op.inputs[self.places[self.taken]]

    def _take(self) -> None:
        addend = self._next
        self.taken += 1
        if self.taken <= self.head:
            self.total = self._added(self.total, addend)
            return
        self.part = self._added(self.part, addend)
        if (self.taken - self.head) % SUMMED_AT_ONCE == 0:
            self.total, self.part = self._added(self.total, self.part), None

    def _added(self, total: tf.Tensor | None, addend: tf.Tensor) -> tf.Tensor:
        if total is None:
            return addend
        with tf.device(self.op.device or addend.device):
            added = tf.raw_ops.AddV2(x=total, y=addend, name="accumulate")
        # Grappler would merge the chain into one AddN again.
        graphs.protect(added.op)
        self.last = added.op
        return added
