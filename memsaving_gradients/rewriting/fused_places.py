"""The place in a schedule at which an op has run, with all ops that the runtime merges it with.

A merged op runs when all its parts can run. If an op waits by a control edge for a part of a later
op, it waits for the later op. That closes a cycle if the later op needs it in turn. oneDNN's layout
pass merges all the same (``mkl_layout_pass.cc``): a convolution and the addition of its bias, a
padding and its convolution, the gradients of a filter and of the bias. The remapper does not fuse
an op that others wait for (``remapper.cc``, ``pattern_utils.cc``), so that last bits differ from
plain training. Nor do constants of a tree of products or sums meet in the same order if ops wait
for its inner ops (:func:`graph_tools.grappler.constant_folding.folded_in_turn`).

So each execution has its place in the schedule, and the place at which it *has run*: the place of
the last execution that is merged with it, or with one that it needs. Control edges close no cycle
if they begin at executions that have run at their own place, and end at later ones. For along edges
of the graph of merged ops, the places at which these have run do not fall, and along control edges
they rise. (Two merged gradients have the place of the filter's gradient. It reads all that the
bias's gradient reads, and nothing makes the bias's gradient wait.)

Values are numbered as grappler sees them: a view of the same shape gives its input, and equal ops
give the result of the first of them. Linear in the edges, except for one bit for each execution and
each bias gradient whose filter gradient comes later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.grappler.constant_folding import folded_in_turn, moved_past
from graph_tools.ops import op_types
from graph_tools.ops.views import unchanged_input
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.schedules.schedule import Step

__all__ = ["Key", "Places", "is_alone"]

#: An op and the number of its copy.
Key = tuple[int, int]
#: A value as grappler sees it: the place of the first execution that makes it, and the number of
#: the output.
Value = tuple[int, int]

_NONE: frozenset[str] = frozenset()


def is_alone(step: CapturedStep, position: int) -> bool:
    """Return whether an op may be merged with its only reader.

    Backward ops that were not captured lead nowhere and are pruned. Forward ops that were not
    captured may be pruned, too.
    """
    return bool(step.graph.fuses[position]) and len(step.source.readers[position]) < 2


class Places:
    """The places at which the executions of a schedule have run.

    Attributes
    ----------
    ends
        Backward ops that the remapper may fuse with an op that they read, but with no reader. It
        would not fuse them if other ops waited for them.
    """

    def __init__(self, step: CapturedStep, steps: Sequence[Step]) -> None:
        self._step, self._steps = step, steps
        self._values = _Values(step.source, steps)
        self._kinds = [step.source.ops[entry.op].type for entry in steps]
        self._place: dict[Key, int] = {entry[:2]: now for now, entry in enumerate(steps)}
        self.ends: set[int] = set()
        self._in_turn = frozenset(folded_in_turn(step.source, step.takes).nonzero()[0].tolist())
        self._moved_past = frozenset(moved_past(step.source, step.takes).nonzero()[0].tolist())
        self._of_biases = {
            value
            for kind, reads in zip(self._kinds, self._values.reads, strict=True)
            if kind in op_types.MERGED_AT_RUN_TIME
            for value in reads
        }
        last = self._with_readers()
        merged = self._with_filters()
        self._until: list[int] = []
        for now, needs in enumerate(self._values.needs):
            first = self._values.first[now]
            before = (self._until[k] for k in needs)
            self._until.append(max(now, last[first], merged.get(now, now), *before))

    def has_run(self, key: Key, before: Key) -> bool:
        """Return whether an execution has run when another one comes in the schedule; an execution
        outside of the schedule always has."""
        return self.until(key) <= self._place.get(before, self.place(key))

    def place(self, key: Key) -> int:
        """Return the place of an execution; -1 if it is not in the schedule."""
        return self._place.get(key, -1)

    def until(self, key: Key) -> int:
        """Return the place at which an execution has run, with all that it is merged with."""
        place = self.place(key)
        return place if place < 0 else self._until[place]

    def has_bias_gradient(self, value: int) -> bool:
        """Return whether a backward op makes a bias gradient of a value, or of one that grappler
        sees as the same; a value outside of the schedule may have a bias gradient."""
        made = self._values.made.get((value, 0))
        return made is None or made[1] in self._of_biases

    def _with_readers(self) -> list[int]:
        """Return, for each execution, the place of the last execution that it is merged with as an
        input; and note the `ends`."""
        steps, reads, kinds = self._steps, self._values.reads, self._kinds
        last = [*range(len(steps))]
        inner = [False] * len(steps)
        readers = self._readers()
        # Readers come later.
        for now in range(len(steps) - 1, -1, -1):
            kind, fused = kinds[now], False
            for maker, _ in reads[now]:
                if self._folds(maker, now):
                    last[maker] = max(last[maker], last[now])
                if kind in op_types.FUSES_WITH.get(kinds[maker], _NONE):
                    fuses = self._is_alone_for(steps[maker].op, steps[now].op)
                    fused |= fuses
                    # An op with several readers in the graph may have only one left when the rest
                    # is folded.
                    if fuses or (
                        kind in op_types.MERGED_WITH_READER.get(kinds[maker], _NONE)
                        and len(readers[maker]) == 1
                    ):
                        last[maker], inner[maker] = max(last[maker], last[now]), True
            backward = steps[now].op >= self._step.graph.first_backward and not steps[now].copy
            if fused and backward and not inner[now]:
                self.ends.add(steps[now].op)
        return last

    def _folds(self, maker: int, reader: int) -> bool:
        """Return whether folding moves a constant of ``reader`` past ``maker``, so that no op may
        wait for ``maker``.

        A control edge would change the order in which constants meet. Or the remapper may fuse
        ``maker``: then ops wait for an idle reader of it, which keeps the constant in its place.
        """
        position = self._steps[maker].op
        changes = position in self._in_turn or (
            position in self._moved_past and self._may_end(maker)
        )
        return (
            changes
            and op_types.fold_together(self._kinds[maker], self._kinds[reader])
            and self._is_alone_for(position, self._steps[reader].op)
        )

    def _may_end(self, now: int) -> bool:
        """Return whether the remapper may fuse an execution with an op that it reads."""
        position, kind = self._steps[now].op, self._kinds[now]
        return any(
            kind in op_types.FUSES_WITH.get(self._kinds[maker], _NONE)
            and self._is_alone_for(self._steps[maker].op, position)
            for maker, _ in self._values.reads[now]
        )

    def _is_alone_for(self, position: int, reader: int) -> bool:
        """Return whether an op may be merged with this reader of it.

        As grappler numbers values, a reader of an equal op reads this op, too. Either the two are
        one op, with the readers of both, or the reader has no part in this one.
        """
        ops = self._step.source
        direct = ops.readers[position]
        own = not direct or direct[0] == reader or ops.ops[direct[0]].type in op_types.VIEWS
        return own and is_alone(self._step, position)

    def _readers(self) -> list[set[int]]:
        """Return, for each execution, its readers: equal ones as one, without views and without ops
        that read shapes."""
        found: list[set[int]] = [set() for _ in self._steps]
        for now, entry in enumerate(self._steps):
            op = self._step.source.ops[entry.op]
            if op.type not in op_types.VIEWS and not op_types.reads_shapes(op):
                for maker, _ in self._values.reads[now]:
                    found[maker].add(self._values.first[now])
        return found

    def _with_filters(self) -> dict[int, int]:
        """Return, for bias gradients, the last place of a filter gradient that reads the same value
        and comes later."""
        filters: dict[Value, list[int]] = {}
        later: dict[int, list[int]] = {}
        # A clone reads all but clones of its run through its gate: it is merged with no original.
        for now in range(len(self._steps) - 1, -1, -1):
            cloned = bool(self._steps[now].copy)
            if self._kinds[now] in op_types.MERGED_AT_RUN_TIME:
                found = [f for value in self._values.reads[now] for f in filters.get(value, ())]
                if found := [f for f in found if bool(self._steps[f].copy) == cloned]:
                    later[now] = found
            elif self._kinds[now] in op_types.MERGES_AT_RUN_TIME:
                for value in self._values.reads[now]:
                    filters.setdefault(value, []).append(now)
        bits = {now: 1 << k for k, now in enumerate(later)}
        needed = _needed(self._values.needs, bits) if bits else []
        # A filter gradient that needs the bias gradient is not merged with it: plain training would
        # not run.
        return {
            now: max((f for f in found if not needed[f] & bits[now]), default=now)
            for now, found in later.items()
        }


class _Values:
    """The values of a schedule as grappler sees them.

    Attributes
    ----------
    made
        For each value and the number of its copy: the place of the execution that makes it, and the
        value as grappler sees it.
    reads
        For each execution, the values that it reads.
    needs
        For each execution, the places of the executions that it needs.
    first
        For each execution, the place of the first one that is the same op.
    """

    def __init__(self, ops: OpGraph, steps: Sequence[Step]) -> None:
        self.reads: list[list[Value]] = []
        self.needs: list[list[int]] = []
        self.first: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        made: dict[Key, tuple[int, Value]] = {}
        self.made = made
        place: dict[int, int] = {}
        begins = ops.first_value.tolist()
        for now, entry in enumerate(steps):
            op = ops.ops[entry.op]
            copies = entry.reads or repeat(0)
            keys = zip(ops.inputs[entry.op], copies, strict=False)
            entries = [made[key] for key in keys if key in made]
            reads = [value for _, value in entries]
            waits = (place[other] for other in ops.controls[entry.op] if other in place)
            self.reads.append(reads)
            self.needs.append([*(maker for maker, _ in entries), *waits])
            same: Sequence[Value] = sorted(reads) if op_types.is_commutative(op) else reads
            # An op without inputs, or with a state, equals no other op.
            if reads and not op_types.is_stateful(op):
                first = known.setdefault((op.type, entry.copy, *same), now)
            else:
                first = now
            self.first.append(first)
            if not entry.copy:
                place[entry.op] = now
            views = op.type in op_types.VIEWS and reads and _may_vanish(op)
            unchanged = None if views else unchanged_input(op)
            for out in range(len(op.outputs)):
                value = first, out
                if views:
                    value = reads[out if op.type == "IdentityN" else 0]
                elif unchanged is not None and unchanged < len(reads):
                    value = reads[unchanged]
                made[begins[entry.op] + out, entry.copy] = now, value


def _may_vanish(op: tf.Operation) -> bool:
    """Return whether a view may have the shape and the dtype of its input: then grappler removes
    it, and may merge the op before it with the op after it."""
    return all(
        given.dtype == made.dtype and given.shape.is_compatible_with(made.shape)
        for given, made in zip(op.inputs, op.outputs, strict=False)
    )


def _needed(needs: Sequence[Sequence[int]], bits: Mapping[int, int]) -> list[int]:
    """Return, for each execution, the bits of the executions that it needs, and its own."""
    found: list[int] = []
    for now, before in enumerate(needs):
        mine = bits.get(now, 0)
        for k in before:
            mine |= found[k]
        found.append(mine)
    return found
