"""The ops that the runtime merges, which a rewrite must neither split nor join, and the ops that
others may wait for.

Grappler's remapper and oneDNN fuse a product, the addition behind it and an activation if no other
op reads the values between. Constant folding moves a constant factor past the op before it. Equal
ops become one. Merged ops give other last bits, so an original and its clone must be merged alike,
and nothing is put between two ops that may be merged. Control edges begin only at ops that have run
at their own place in the schedule, in spite of merging
(:mod:`memsaving_gradients.rewriting.fused_places`). A product that reads a constant in place of a
factor does not wait for this factor (:func:`graph_tools.grappler.constant_folding.losing`). Names
decide which of two it loses, so gates wait for it only if both are held back. The rules are from
TensorFlow 2.16 to 2.21; a rule that is missing here costs last bits at most.
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
    """The merges that the runtime makes in a captured step.

    Parameters
    ----------
    step
        The captured training step.
    steps
        The schedule that the step follows; the order of the graph if there is none.

    Attributes
    ----------
    twin_of
        For each backward op that equals an earlier one, the earlier op. Ops that read different
        copies are no longer equal.
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
        """Return whether a control edge from an execution leaves its merges as they are, closes no
        cycle, and waits for the inputs of the execution.

        It does none of these if the execution, or one that it needs, is merged into a later op. Ops
        must not wait, either, for an op that may be dead, or for one that loses a factor to a
        constant, unless both factors are held back.
        """
        ops = self._step.source
        if ops.ops[position].type in op_types.MERGED_AT_RUN_TIME or position in ops.conditional:
            return False
        if position in self._losing and (copy or position not in self._held):
            return False
        return self._places.has_run((position, copy), (position, copy))

    def loses(self, position: int) -> bool:
        """Return whether an op reads a constant in place of a factor when constants have moved."""
        return position in self._losing

    def meets_constant(self, position: int) -> bool:
        """Return whether folding combines a factor of an op with a constant of the op's reader, in
        an op of its own that reads nothing else."""
        return bool(self._step.takes[position]) and not self._step.source.reads_constant(position)

    def note_held(self, position: int) -> None:
        """Note that each factor of an original that `loses` one of them is held back."""
        self._held.add(position)

    def has_run(self, position: int, before: int) -> bool:
        """Return whether an original has run, with all ops that it is merged with, when the
        original at ``before`` comes in the schedule."""
        return self._places.has_run((position, 0), (before, 0))

    def place(self, position: int) -> int:
        """Return the place of an original in the schedule."""
        return self._places.place((position, 0))

    def until(self, position: int) -> int:
        """Return the place in the schedule at which an original has run, with all ops that it is
        merged with."""
        return self._places.until((position, 0))

    def trigger(self, op: tf.Operation) -> tf.Operation:
        """Return the op to wait for instead of ``op``: an idle reader, if a control edge would keep
        ``op`` from being fused with an op that it reads."""
        if op not in self._ends:
            return op
        if op not in self._idle:
            self._idle[op] = gated(op.outputs[0], [], op.name).op
        return self._idle[op]

    def merges(self, position: int) -> bool:
        """Return whether an op may be merged with its only reader; see
        :func:`memsaving_gradients.rewriting.fused_places.is_alone`."""
        return is_alone(self._step, position)

    def shares(self, position: int, value: int) -> bool:
        """Return whether a backward op may be merged with another one because both read ``value``;
        they are not merged if one of them reads it through a gate."""
        kind = self._step.source.ops[position].type
        return kind in op_types.MERGES_AT_RUN_TIME and self._places.has_bias_gradient(value)

    def pass_backward(self, entry: Step) -> list[int]:
        """Note the copies that a backward op reads; call for all backward ops, in order.

        Returns the ops that were equal as built and no longer are: they were one op with the
        readers of all.
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
    """Return the earlier twins of backward ops: grappler merges these if they stay equal."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    found = {}
    for op in range(step.graph.first_backward, step.graph.length):
        twin = first.setdefault((step.source.ops[op].type, step.source.inputs[op]), op)
        if twin != op:
            found[op] = twin
    return found
