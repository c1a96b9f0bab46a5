"""Which ops the runtime makes one of: what must be neither parted nor joined by a rewrite.

Grappler's remapper and oneDNN fuse a product, the addition behind it and an activation where nothing else reads the
values between; constant folding moves a constant factor past the op before it; equal ops become one. The results of the merged
have other last bits, so that an original and its clone must be merged alike, and nothing is put between two ops that may be.
Rules of TensorFlow 2.16 to 2.21; what is not known here costs last bits at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_tools import optypes
from memsaving_gradients.roles import CapturedStep
from memsaving_gradients.schedule import Step

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
        For each backward op that equals an earlier one, that one. Ops that read different copies are equal no longer.
    entangled
        Ops that nothing may wait for. Backward ops that need an op that is merged with one that runs later: whatever waits
        for them may be what the later one needs. And ops of branches of control flow v1, which may be dead.
    """

    def __init__(self, step: CapturedStep, steps: Sequence[Step] = ()) -> None:
        self._step = step
        self.twin_of = _twins(step)
        self.entangled = _entangled(step, steps) | step.source.conditional
        self._family = {
            op: self.twin_of.get(op, op) for op in (*self.twin_of, *self.twin_of.values())
        }
        self._first: dict[int, dict[tuple[int, ...], int]] = {}

    def merges(self, position: int) -> bool:
        """Whether an op may be merged with the only one that reads it.

        Backward ops that were not captured lead nowhere and are pruned; so may be forward ops that were not.
        """
        return (
            bool(self._step.graph.fuses[position]) and len(self._step.source.readers[position]) < 2
        )

    def pass_backward(self, entry: Step) -> list[int]:
        """Note which copies a backward op reads; call for all of them, in order.

        Returns the ops that equaled each other as built and do so no longer: they were one op with the readers of all.
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


def _entangled(step: CapturedStep, steps: Sequence[Step]) -> frozenset[int]:
    """Backward ops that need a bias gradient whose filter gradient comes after them: these two may be one kernel."""
    ops, first = step.source, step.graph.first_backward
    place = {entry.op: now for now, entry in enumerate(steps) if not entry.copy}
    # For each op that needs one, the last place at which one is merged.
    until: dict[int, int] = {}
    for i in range(first, step.graph.length):
        needs = (*(int(ops.producer[v]) for v in ops.inputs[i]), *ops.controls[i])
        last = max((until[other] for other in needs if other in until), default=-1)
        if ops.ops[i].type in optypes.MERGED_AT_RUN_TIME:
            for value in ops.inputs[i]:
                for reader in ops.readers[int(ops.producer[value])]:
                    kind = ops.ops[reader].type
                    if (
                        kind in optypes.MERGES_AT_RUN_TIME
                        and kind not in optypes.MERGED_AT_RUN_TIME
                        and value in ops.inputs[reader]
                    ):
                        last = max(last, place.get(reader, reader))
        if last >= 0:
            until[i] = last
    return frozenset(i for i, last in until.items() if last > place.get(i, i))


def _twins(step: CapturedStep) -> dict[int, int]:
    """Equal backward ops: grappler makes one op of them if they stay equal."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    found = {}
    for op in range(step.graph.first_backward, step.graph.length):
        twin = first.setdefault((step.source.ops[op].type, step.source.inputs[op]), op)
        if twin != op:
            found[op] = twin
    return found
