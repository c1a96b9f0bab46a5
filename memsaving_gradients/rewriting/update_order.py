"""What an optimizer does with a large gradient, one op after the other.

An update is a few lines of elementwise ops, each of which makes a tensor as large as the gradient.
The executor runs all of them side by side: beside a gradient, its distance from the mean and its
square are there at once (Adam). One line after the other, the second one begins in the gradient's
own buffer: two thirds of the bytes, where the largest weights decide how much memory a step needs.

The order is that of a list scheduler: of the ops that are ready, the one after which fewest bytes
are alive, and of equals the first that was created. It is optimal for lines of elementwise ops that
end in variables, which is what optimizers are made of, and not in general. An op that
makes a large tensor waits for the ends of what comes before it, so that it finds the buffer free
that it is to take over: by a control edge on a variable that is read for it alone, or else by an
identity in front of another input that it is not merged with
(:mod:`memsaving_gradients.rewriting.gates`). Linear in the ops of an update, but for the choice
among those that are ready.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.precedence import Precedence
from graph_tools.ops import op_types
from graph_tools.ops.devices import Home
from graph_tools.ops.in_place import taken_over
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs
from memsaving_gradients.rewriting.gates import gated
from memsaving_gradients.rewriting.optimizer_ops import Updates

__all__ = ["in_turn"]

_KEPT = op_types.SOURCES | op_types.READS


def in_turn(
    updates: Updates, least: int, rewiring: Rewiring, home: Home | None = None
) -> dict[tf.Operation, int]:
    """Let what is done with each gradient of at least so many bytes run one op after the other;
    call after `Updates.split`.

    Returns, for each op that makes such a gradient, the most bytes that this and what is made of it
    alone then take. ``home``: the device on which to do so, where there are several.
    """
    found = {}
    for grad, ops in updates.alone().items():
        here = home is None or all(map(home.has, [grad, *ops]))
        if not here or sum(map(_bytes, grad.outputs)) < least:
            continue
        line = _Line(grad, updates.steps.within({grad, *ops}), updates.dead)
        turns = [*line.turns()]
        if _take_turns(updates, turns, least, rewiring):
            found[grad] = max(turn.alive for turn in turns)
    return found


@dataclass(frozen=True, eq=False)
class _Turn:
    """An op in its place: bytes of its outputs, and of all buffers that are alive when it runs."""

    op: tf.Operation
    made: int
    alive: int


class _Line:
    """What is done with one gradient alone.

    Parameters
    ----------
    grad
        The op that makes the gradient.
    steps
        What each op needs, ``grad`` included.
    dead
        Ops that do not run.
    """

    def __init__(
        self,
        grad: tf.Operation,
        steps: Precedence[tf.Operation],
        dead: Collection[tf.Operation],
    ) -> None:
        self.grad, self.steps = grad, steps
        #: For each op, the tensors whose buffers it reads, by reference; for each of these, who is
        #: still to read it, where `None` stands for ops that are not of the line.
        self._reads = {op: {self._buffer(t).ref() for t in op.inputs} for op in steps}
        self._left: dict[object, set[tf.Operation | None]] = {}
        for op in steps:
            for tensor in op.outputs:
                self._left.setdefault(self._buffer(tensor).ref(), set()).update(
                    other if other in steps else None
                    for other in tensor.consumers()
                    if not (self._views(other) or other in dead)
                )

    def turns(self) -> Iterator[_Turn]:
        """All ops, in the order in which they are to run."""
        waits = {op: len([*self.steps.before(op)]) for op in self.steps}
        ready, alive = [self.grad], 0
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
        """By how many bytes more are alive after an op than before it."""
        return sum(self._made(op)) - sum(self._freed(op))

    def _made(self, op: tf.Operation) -> list[int]:
        if self._views(op) or op.type in _KEPT:
            return []
        return [_bytes(tensor) for tensor in op.outputs]

    def _freed(self, op: tf.Operation) -> list[int]:
        """Bytes of the buffers that nobody reads any more when an op has run."""
        return [
            _bytes(buffer.deref())
            for buffer in self._reads[op]
            if self._left.get(buffer) == {op} and buffer.deref().op.type not in _KEPT
        ]

    def _views(self, op: tf.Operation) -> bool:
        return op in self.steps and op is not self.grad and op.type in op_types.VIEWS

    def _buffer(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor in whose buffer another one is."""
        while self._views(tensor.op):
            tensor = tensor.op.inputs[0]
        return tensor


def _take_turns(updates: Updates, turns: Sequence[_Turn], least: int, rewiring: Rewiring) -> bool:
    """Let ops that make at least so many bytes wait for all that comes before them; whether all of
    them do."""
    before: dict[tf.Operation, None] = {}
    for turn in turns:
        if turn.made >= least:
            ends = [op for op in before if before.keys().isdisjoint(updates.steps.after(op))]
            late = [op for op in ends if not updates.steps.leads(op, turn.op)]
            if late and not _wait(updates, turn.op, late, rewiring):
                return False
            before.clear()
        # To read a variable takes nothing, and may wait in turn.
        if turn.op.type not in _KEPT:
            before[turn.op] = None
    return True


def _wait(
    updates: Updates, op: tf.Operation, late: Sequence[tf.Operation], rewiring: Rewiring
) -> bool:
    """Let an op wait for others; whether that leaves what it is merged with as it is."""
    triggers = updates.waitable(late, updates.steps)
    if not triggers or op_types.adds_as_buffers_come(op):
        return False
    for tensor in op.inputs:
        read = tensor.op
        if (
            read.type in op_types.READS
            and read in updates.steps
            and {other for other in tensor.consumers() if other in updates.steps} == {op}
            and not any(updates.steps.leads(read, trigger) for trigger in triggers)
        ):
            graphs.add_control_inputs(read, triggers)
            updates.note(read, triggers)
            return True
    for k, tensor in enumerate(op.inputs):
        if tensor.op.type not in _KEPT and not _may_merge(tensor.op.type, op.type):
            rewiring.point(op, k, gated(tensor, triggers, op.name, op.device))
            updates.note(op, triggers)
            return True
    return False


def _may_merge(maker: str, reader: str) -> bool:
    """Whether grappler may make one of two ops of these types, or move a constant from one past the
    other."""
    return (
        reader in op_types.FUSED_WITH_SIBLING
        or reader in op_types.FUSES_WITH.get(maker, ())
        or op_types.fold_together(maker, reader)
    )


def _bytes(tensor: tf.Tensor) -> int:
    return tensor_bytes(tensor).at(1)
