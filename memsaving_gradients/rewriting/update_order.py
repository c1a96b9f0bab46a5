"""Run the ops of an optimizer on large gradients one after the other.

An update is a few lines of elementwise ops, each of which makes a tensor as large as the gradient.
The executor runs all lines side by side. So a gradient, its distance from the mean and its square
are alive at once (Adam). If one line runs after the other, the second one begins in the gradient's
own buffer: two thirds of the bytes, where the largest weights decide how much memory a step needs.

If gradients are clipped together, no update begins before all gradients are there. Then the
executor begins all updates at once, each with its own temporaries. So each update waits until the
update before has ended. The same holds in a branch that changes variables from the values of other
variables: averages, accumulated gradients.

A list scheduler finds the order: of the ready ops, it takes the one after which fewest bytes are
alive, and of equals the first that was created. The order is optimal for lines of elementwise ops
that end in variables, as in optimizers, and not in general. An op that makes a large tensor waits
for the ends of the ops before it, so that the buffer that it takes over is free. The wait is a
control edge on a variable read for it alone. Otherwise it is an identity in front of another
input that the op is not merged with (:mod:`memsaving_gradients.rewriting.gates`). Linear in the ops
of an update, except for the choice among ready ops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.precedence import Precedence
from graph_tools.ops import op_types
from graph_tools.ops.devices import Home
from graph_tools.ops.in_place import taken_over
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.rewriting.gates import gated
from memsaving_gradients.rewriting.optimizer_ops import CHANGES, Updates, bytes_of
from memsaving_gradients.rewriting.ordering import HUGE_SHARE

__all__ = ["in_branch", "in_turn", "one_by_one"]

_KEPT = op_types.SOURCES | op_types.READS


def in_turn(
    updates: Updates, least: int, rewiring: Rewiring, home: Home | None = None
) -> dict[tf.Operation, int]:
    """Let the ops that use a gradient of at least ``least`` bytes run one after the other; call
    after `Updates.split`.

    Returns, for each op that makes such a gradient, the most bytes that it and the values made of
    it alone then take. ``home``: the device on which to do so, if there are several.
    """
    found = {}
    for grad, ops in updates.alone().items():
        if bytes_of(grad) >= least and _is_here(home, [grad, *ops]):
            turns = _turns(updates, [grad], ops, updates.dead)
            if _take_turns(updates, turns, least, rewiring, [grad]):
                found[grad] = max([bytes_of(grad), *(turn.alive for turn in turns)])
    return found


def one_by_one(
    updates: Updates, least: int, rewiring: Rewiring, home: Home | None = None
) -> list[tf.Operation]:
    """Let gradients that are there together, such as gradients clipped by their norm, be used one
    after the other, each by one op after the other; call after `Updates.split`.

    Returns the ops that make these gradients, in this order. Small gradients that together take
    less than ``least`` bytes are left out. ``home``: as in `in_turn`.
    """
    lines, common = updates.together()
    return _chain(updates, lines, updates.steps.needed(common), least, rewiring, home)


def in_branch(branch: tf.Graph) -> None:
    """Let the updates of a newly traced branch run one after the other, since all its inputs are
    there when it begins. Optimizers skip steps, or average weights every few steps, in branches."""
    operations = branch.get_operations()
    if not any(op.type in CHANGES for op in operations):
        return
    grads = {tensor.op for tensor in branch.inputs if tensor.dtype.is_floating}
    later = [op for op in operations if op not in grads]
    updates = Updates(later, grads, autodiff.ends_of(branch), first_backward=0)
    rewiring = Rewiring()
    with branch.as_default():
        updates.split(rewiring)
        lines = {**updates.alone(), **updates.without_gradients()}
        # In order of creation: an update changes values that the next one reads.
        lines = dict(
            sorted(lines.items(), key=lambda line: max(map(graphs.creation_index, line[1])))
        )
        _chain(updates, lines, (), _least(lines), rewiring)
        one_by_one(updates, _least(grads), rewiring)
    original_view.remember(branch, rewiring)


def _least(makers: Iterable[tf.Operation]) -> int:
    """Return the bytes from which a result is large: a share of all that these ops make."""
    return int(HUGE_SHARE * sum(map(bytes_of, makers)))


def _chain(
    updates: Updates,
    lines: Mapping[tf.Operation, Sequence[tf.Operation]],
    past: Collection[tf.Operation],
    least: int,
    rewiring: Rewiring,
    home: Home | None = None,
) -> list[tf.Operation]:
    """Let lines run one after the other, as in `one_by_one`, when the ops ``past`` have run."""
    least //= max(len(lines), 1)
    over = updates.dead.union(past)
    found: list[tf.Operation] = []
    ends: list[tf.Operation] = []
    for grad, ops in lines.items():
        if bytes_of(grad) >= least and _is_here(home, [grad, *ops]):
            line = set(ops)
            before = (other for op in ops for other in updates.steps.before(op))
            begins = [op for op in dict.fromkeys(before) if op not in line and op not in past]
            _take_turns(updates, _turns(updates, begins, ops, over), least, rewiring, ends)
            ends = [op for op in ops if line.isdisjoint(updates.steps.after(op))]
            found.append(grad)
    return found


def _is_here(home: Home | None, ops: Sequence[tf.Operation]) -> bool:
    return home is None or all(map(home.has, ops))


@dataclass(frozen=True, eq=False)
class _Turn:
    """An op in its place: bytes of its outputs, and of all buffers that are alive when it runs."""

    op: tf.Operation
    made: int
    alive: int


class _Line:
    """The ops that use one gradient.

    Parameters
    ----------
    begins
        The ops that make the gradient, or the values that the line begins with.
    steps
        The ops that each op needs, ``begins`` included.
    over
        Ops that do not run, or that have run when the line begins.
    """

    def __init__(
        self,
        begins: Collection[tf.Operation],
        steps: Precedence[tf.Operation],
        over: Collection[tf.Operation],
    ) -> None:
        self.begins, self.steps = begins, steps
        #: For each op, the tensors whose buffers it reads, by reference; for each of these, the ops
        #: that have yet to read it (`None`: ops outside of the line).
        self._reads = {op: {self._buffer(t).ref() for t in op.inputs} for op in steps}
        self._left: dict[object, set[tf.Operation | None]] = {}
        for op in steps:
            for tensor in op.outputs:
                self._left.setdefault(self._buffer(tensor).ref(), set()).update(
                    other if other in steps else None
                    for other in tensor.consumers()
                    if not (self._views(other) or other in over)
                )

    def turns(self) -> Iterator[_Turn]:
        """Yield all other ops, in the order in which they should run."""
        first = {*self.begins}
        waits = {op: len({*self.steps.before(op)} - first) for op in self.steps if op not in first}
        ready = [op for op, many in waits.items() if not many]
        alive = sum(map(bytes_of, first))
        while ready:
            op = min(ready, key=lambda op: (self._grows(op), graphs.creation_index(op)))
            ready.remove(op)
            made, freed = self._made(op), self._freed(op)
            over = taken_over(made, freed) if op.type in op_types.FORWARDING else 0
            yield _Turn(op, sum(made), alive + sum(made) - over)
            alive += sum(made) - sum(freed)
            for buffer in self._reads[op]:
                self._left.get(buffer, set()).discard(op)
            for other in self.steps.after(op):
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)

    def _grows(self, op: tf.Operation) -> int:
        """Return how many more bytes are alive after an op than before it."""
        return sum(self._made(op)) - sum(self._freed(op))

    def _made(self, op: tf.Operation) -> list[int]:
        if self._views(op) or op.type in _KEPT:
            return []
        return [_bytes(tensor) for tensor in op.outputs]

    def _freed(self, op: tf.Operation) -> list[int]:
        """Return the bytes of the buffers that no op reads any more when ``op`` has run."""
        return [
            _bytes(buffer.deref())
            for buffer in self._reads[op]
            if self._left.get(buffer) == {op} and buffer.deref().op.type not in _KEPT
        ]

    def _views(self, op: tf.Operation) -> bool:
        return op in self.steps and op not in self.begins and op.type in op_types.VIEWS

    def _buffer(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor in whose buffer ``tensor`` is."""
        while self._views(tensor.op):
            tensor = tensor.op.inputs[0]
        return tensor


def _turns(
    updates: Updates,
    begins: Collection[tf.Operation],
    ops: Sequence[tf.Operation],
    over: Collection[tf.Operation],
) -> list[_Turn]:
    """Return the ops of a line, in the order in which they should run."""
    return [*_Line(begins, updates.steps.within({*begins, *ops}), over).turns()]


def _take_turns(
    updates: Updates,
    turns: Sequence[_Turn],
    least: int,
    rewiring: Rewiring,
    after: Sequence[tf.Operation],
) -> bool:
    """Let ops that make at least ``least`` bytes wait for all ops before them, and the first ones
    for the ops ``after`` which the line comes; return whether all of them do."""
    before = dict.fromkeys(after)
    for turn in turns:
        if turn.made >= least:
            ends = [op for op in before if before.keys().isdisjoint(updates.steps.after(op))]
            late = [op for op in ends if not updates.steps.leads(op, turn.op)]
            if late and not _wait(updates, turn.op, late, rewiring):
                return False
            before.clear()
        # A read of a variable takes nothing, and may wait in turn.
        if turn.op.type not in _KEPT:
            before[turn.op] = None
    return True


def _wait(
    updates: Updates, op: tf.Operation, late: Sequence[tf.Operation], rewiring: Rewiring
) -> bool:
    """Let an op wait for others, unless that changes how it is merged; return whether it waits."""
    triggers = updates.waitable(late, updates.steps)
    follow = any(updates.steps.leads(op, trigger) for trigger in triggers)
    if not triggers or follow or op_types.adds_as_buffers_come(op):
        return False
    for tensor in op.inputs:
        read = tensor.op
        if (
            read.type in op_types.READS
            and read in updates.steps
            and {other for other in tensor.consumers() if other in updates.steps} == {op}
            and not any(updates.steps.leads(read, trigger) for trigger in triggers)
        ):
            updates.let_wait(read, triggers)
            return True
    if all(tensor.op.type in op_types.SOURCES for tensor in op.inputs):
        # It is merged with nothing: grappler folds it, or it makes large constants such as zeros.
        updates.let_wait(op, triggers)
        return True
    for k, tensor in enumerate(op.inputs):
        alone = len({*tensor.consumers()} - updates.dead) == 1
        if tensor.op.type not in _KEPT and not _may_merge(tensor.op.type, op.type, alone):
            rewiring.point(op, k, gated(tensor, triggers, op.name, op.device))
            updates.note(op, triggers)
            return True
    return False


def _may_merge(maker: str, reader: str, alone: bool) -> bool:
    """Return whether grappler may merge two ops of these types, or move a constant from one past
    the other, which it does if the latter is the only reader."""
    return (
        reader in op_types.FUSED_WITH_SIBLING
        or reader in op_types.FUSES_WITH.get(maker, ())
        or (alone and op_types.fold_together(maker, reader))
    )


def _bytes(tensor: tf.Tensor) -> int:
    return tensor_bytes(tensor).at(1)
