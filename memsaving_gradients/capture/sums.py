"""Sums, added up as their addends come, in the order of TensorFlow's kernel.

`AddN` needs all of its addends at once. The gradient of a weight that every step of a recurrence
uses has an addend for each step; the gradient of a normalization's input is the sum of three
tensors of its size. The kernel first adds the addends left over by groups of eight (at least two),
then one group of eight after the other, each from left to right. A chain of additions in that order
gives the same bits, and each addend dies as soon as it is added. The kernel begins with the first
addend whose buffer it can take over. If that is neither the first nor the second, the order
changes; such a sum stays as it is.

Grappler's arithmetic rewriting, where it is on, sorts the inputs of `AddN` by name. Short sums
follow that order. Long sums do not: sorted, the tenth addend comes before the second, and nearly
all addends would have to wait. There, their last bits differ from plain training's. No chain can
follow grappler's memory optimizer. It acts if it estimates that the graph takes more than 0.8 of a
device's memory (on a CPU, of 256 MiB). It makes a zeroed variable of each sum with an addend alive
at the peak, and adds in the order in which addends happen to come. Plain training has its peak
before such sums begin; a plan that recomputes has it among them. So in a graph that may be that
large, every sum of three or more becomes a chain.

The chain is built along with the schedule, so that an addend can wait until the one before it has
been added. The executor, free to choose, computes all addends first if nothing else is due, and
adds them up last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.grappler.constant_folding import input_name
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.ops.views import rewrites_arithmetic
from graph_tools.tf_private import graphs
from memsaving_gradients.schedules.arrays import IntArray
from memsaving_gradients.schedules.liveness import SUMMED_AT_ONCE, summed_first
from memsaving_gradients.schedules.order import LONG_SUM
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Chain", "Sums", "chainable", "may_become_variables"]

#: The share of the bytes of forward values from which on an addend counts as large. Chosen by
#: judgement.
LARGE = 1 / 256
#: The most ops needed by a sum among which other readers of an addend are looked for.
MOST_LOOKED_AT = 1000
#: Fact: the share of a device's memory above which grappler's memory optimizer makes variables of
#: sums (``SchedulingPass``, TensorFlow 2.21).
CROWDED = 0.8
#: Fact: the bytes that TensorFlow assumes for a CPU's memory, however much there is.
CPU_MEMORY = 256 << 20


def may_become_variables(
    ops: OpGraph, first_backward: int, batch: int, results: Collection[int]
) -> bool:
    """Return whether grappler's memory optimizer may make variables of sums, by the bytes of
    results and of the forward values that backward ops read.

    As in grappler, each value counts its own bytes, also a value read from a variable. With a GPU,
    the result is always true: its memory is not known here.
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
    """Return the backward sums that chains of additions may replace, with the order of addends.

    ``sizes``: bytes of each value's own buffer. ``results``: values that outlive the step.
    ``short``: whether to include sums of few but large addends, and with ``small``, of few small
    ones.
    """
    readers: list[list[int]] = [[] for _ in ops.producer]
    for op, values in enumerate(ops.inputs):
        for value in values:
            readers[value].append(op)
    forward = (ops.producer < first_backward) & ~ops.source
    large = LARGE * float(sizes[forward].sum())
    by_name = rewrites_arithmetic()

    def is_free(value: int, position: int) -> bool:
        """Return whether no other op needs the buffer of an addend any more when the sum runs."""
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


def _needs(ops: OpGraph, position: int, others: set[int], first: int) -> bool:
    """Return whether the op at ``position`` needs all ``others``, which come after op ``first``."""
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
    """The sums of a graph that become chains; each chain grows as its addends are computed.

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
        self._chains: dict[int, Chain] = {}
        self._sums_of: dict[int, list[int]] = {}
        self._bytes: dict[int, int] = {}
        self._made: set[tf.Operation] = set()
        for position in sorted(chained):
            addends = graph.sums[position]
            places = [graph.reads[position].index(value) for value in addends]
            self._chains[position] = Chain(ops[position], places)
            self._bytes[position] = int(graph.size[graph.storage[list(addends)]].sum())
            for op in {int(graph.producer[value]) for value in addends}:
                self._sums_of.setdefault(op, []).append(position)

    def of(self, position: int) -> Sequence[int]:
        """Return the sums that have an addend from the op at ``position``."""
        return self._sums_of.get(position, ())

    def last_of(self, position: int, least: float) -> list[tf.Operation]:
        """Return the last additions so far in the sums that have an addend from the op at
        ``position``, and ``least`` bytes of addends or more."""
        sums = [s for s in self.of(position) if self._bytes[s] >= least]
        return [last for s in sums if (last := self._chains[s].last) is not None]

    def add(self, position: int, made: tf.Operation) -> tf.Operation | None:
        """Add the outputs of ``made``, the op at ``position``, and addends that waited for them;
        return the last addition, if any."""
        self._made.add(made)
        added = [self._chains[s].go_on(self._made) for s in self.of(position)]
        return next((last for last in reversed(added) if last is not None), None)

    def total(self, position: int) -> tf.Tensor:
        """Return the end of the chain for the sum at ``position``, whose addends all exist."""
        return self._chains[position].finished()


class Chain:
    """A sum as a chain: ``total`` of the first addends and of whole groups, ``part`` of the current
    group, ``taken`` addends in both.

    ``places``: the inputs of the op that are addends, in the order in which they are added.
    """

    def __init__(self, op: tf.Operation, places: Sequence[int]) -> None:
        self.op, self.places, self.taken = op, places, 0
        self.head = summed_first(len(places))
        self.total: tf.Tensor | None = None
        self.part: tf.Tensor | None = None
        self.last: tf.Operation | None = None

    def go_on(self, made: Collection[tf.Operation]) -> tf.Operation | None:
        """Add the next addends, as long as they are ``made``; return the last addition, if any."""
        before = self.last
        while self.taken < len(self.places) and self._next.op in made:
            self._take()
        return None if self.last is before else self.last

    def finished(self) -> tf.Tensor:
        """Add all addends that are left, and return the sum."""
        while self.taken < len(self.places):
            self._take()
        assert self.total is not None and self.part is None
        return self.total

    @property
    def _next(self) -> tf.Tensor:
        # Looked up when it is needed: another tensor may have replaced the addend by now.
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
