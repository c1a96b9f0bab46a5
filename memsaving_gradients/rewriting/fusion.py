"""Which ops the runtime makes one of: what must be neither parted nor joined by a rewrite, and what
may be waited for.

Grappler's remapper and oneDNN fuse a product, the addition behind it and an activation where
nothing else reads the values between; constant folding moves a constant factor past the op before
it; equal ops become one. The results of the merged have other last bits, so that an original and
its clone must be merged alike, and nothing is put between two ops that may be. Control edges lead
from ops that have run at their own place in the schedule, whatever is merged
(:mod:`memsaving_gradients.rewriting.fused_places`). A product that reads a constant in the place of
a factor does not wait for that factor (:func:`graph_tools.grappler.constant_folding.losing`). Names
decide which of two it loses, so that gates wait for it only if both are held back. Rules of
TensorFlow 2.16 to 2.21; what is not known here costs last bits at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graph_tools.grappler.constant_folding import losing
from graph_tools.ops import op_types
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.fused_places import Places, is_alone
from memsaving_gradients.rewriting.gates import gated
from memsaving_gradients.schedules.schedule import Step

__all__ = ["Merging"]


class Merging:
    """What the runtime merges in a captured step.

    Parameters
    ----------
    step
        The captured training step.
    steps
        The schedule that it is to follow; in the order of the graph, if there is none.

    Attributes
    ----------
    twin_of
        For each backward op that equals an earlier one, that one. Ops that read different copies
        are equal no longer.
    """

    def __init__(self, step: CapturedStep, steps: Sequence[Step] = ()) -> None:
        self._step = step
        self.twin_of = _twins(step)
        self._losing = losing(step.source)
        self._held = set[int]()
        self._places = Places(step, steps or [Step(i) for i in range(step.graph.length)])
        self._ends = {step.source.ops[i] for i in self._places.ends}
        self._idle: dict[tf.Operation, tf.Operation] = {}
        self._family = {
            op: self.twin_of.get(op, op) for op in (*self.twin_of, *self.twin_of.values())
        }
        self._first: dict[int, dict[tuple[int, ...], int]] = {}

    def may_be_waited_for(self, position: int, copy: int = 0) -> bool:
        """Whether a control edge from an execution leaves what it is merged with as it is, closes
        no cycle, and waits for what the execution reads.

        It does none of these if the execution, or what it needs, is a part of what runs later. Nor
        may anything wait for an op that may be dead, or for one that loses a factor to a constant,
        unless it is held by whichever it keeps.
        """
        ops = self._step.source
        if ops.ops[position].type in op_types.MERGED_AT_RUN_TIME or position in ops.conditional:
            return False
        if position in self._losing and (copy or position not in self._held):
            return False
        return self._places.has_run((position, copy), (position, copy))

    def loses(self, position: int) -> bool:
        """Whether an op reads a constant in place of a factor when constants have moved."""
        return position in self._losing

    def note_held(self, position: int) -> None:
        """Note that each factor of an original that `loses` one of them is held back."""
        self._held.add(position)

    def has_run(self, position: int, before: int) -> bool:
        """Whether an original has run, with all that it is merged with, when the original at
        ``before`` has its turn."""
        return self._places.has_run((position, 0), (before, 0))

    def place(self, position: int) -> int:
        """The place of an original in the schedule."""
        return self._places.place((position, 0))

    def until(self, position: int) -> int:
        """The place in the schedule at which an original has run, with all that it is merged
        with."""
        return self._places.until((position, 0))

    def trigger(self, op: tf.Operation) -> tf.Operation:
        """What to wait for instead of ``op``: an idle reader, if a control edge would keep ``op``
        from being fused with what it reads."""
        if op not in self._ends:
            return op
        if op not in self._idle:
            self._idle[op] = gated(op.outputs[0], [], op.name).op
        return self._idle[op]

    def merges(self, position: int) -> bool:
        """Whether an op may be merged with the only one that reads it; see
        :func:`memsaving_gradients.rewriting.fused_places.is_alone`."""
        return is_alone(self._step, position)

    def shares(self, position: int, value: int) -> bool:
        """Whether a backward op may be merged with another one because both read ``value``, and not
        if one of them reads it through a gate."""
        kind = self._step.source.ops[position].type
        return kind in op_types.MERGES_AT_RUN_TIME and self._places.has_bias_gradient(value)

    def pass_backward(self, entry: Step) -> list[int]:
        """Note which copies a backward op reads; call for all of them, in order.

        Returns the ops that equaled each other as built and do so no longer: they were one op with
        the readers of all.
        """
        family = self._family.get(entry.op)
        if family is None:
            return []
        copies = entry.reads if any(entry.reads) else ()
        firsts = self._first.setdefault(family, {})
        first = firsts.setdefault(copies, entry.op)
        if first != entry.op:
            self.twin_of[entry.op] = first
            return []
        self.twin_of.pop(entry.op, None)
        return list(firsts.values()) if len(firsts) == 2 else [entry.op] if len(firsts) > 2 else []


def _twins(step: CapturedStep) -> dict[int, int]:
    """Equal backward ops: grappler makes one op of them if they stay equal."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    found = {}
    for op in range(step.graph.first_backward, step.graph.length):
        twin = first.setdefault((step.source.ops[op].type, step.source.inputs[op]), op)
        if twin != op:
            found[op] = twin
    return found
