"""Make XLA follow a schedule: each run of clones begins a region, which becomes a conditional.

XLA orders by data alone. So clones have no gates of their own, and no original is held back. A
region is a run with the backward ops up to the next one, and waits as a whole. The pass builds
clones where it builds them for the executor; this module notes which ops are in which region. At
the end, :mod:`memsaving_gradients.rewriting.backends.regions` turns the regions into conditionals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from memsaving_gradients.rewriting.backends.back_end import BackEnd, PassState
from memsaving_gradients.rewriting.backends.regions import Regions
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.schedules.schedule import Step

__all__ = ["ForXla"]


class ForXla(BackEnd):
    """The regions of one pass; a gate has the number of its region.

    ``noted``: for each region its ops, in order: an original, or the range of built ops in the
    list of the graph's ops; ``begun``: the length of this list before the current entry.
    """

    in_order = False

    def __init__(self, state: PassState) -> None:
        self.state, self.graph, self.ops = state, state.step.graph, state.step.source
        self.built = self.ops.ops[0].graph
        self.noted: list[list[slice | tf.Operation]] = [[]]
        self.begun = 0

    def before(self, entry: Step) -> None:
        self.begun = self.built.version

    def gate_behind_backward(self, first: Key) -> int:
        return self._next_region()

    def gate_behind_clones(self, first: Key) -> int:
        return self._next_region()

    def hold_clone(
        self, entry: Step, inputs: Sequence[tf.Tensor], reads: Collection[Key], gate: int
    ) -> Sequence[tf.Tensor]:
        return inputs

    def hold_load(self, entry: Step, parts: Sequence[tf.Tensor], gate: int) -> Sequence[tf.Tensor]:
        return parts

    def after(self, entry: Step, op: tf.Operation) -> None:
        position, region = entry.op, self.noted[-1]
        if position < self.graph.first_backward and not entry.copy:
            return
        region.append(slice(self.begun, self.built.version))
        if entry.copy:
            return
        if position not in self.state.sums.chained:
            region.append(op)
        begun = self.built.version
        self.state.sums.add(position, op)
        region.append(slice(begun, self.built.version))

    def finish(self, wanted: Collection[tf.Tensor]) -> Mapping[object, tf.Tensor]:
        """Turn the backward pass into conditionals."""
        # TensorFlow copies this list, so it is asked for once.
        built = self.built.get_operations()
        regions = Regions(self.ops, self.state.rewiring)
        for noted in self.noted:
            regions.part()
            for piece in noted:
                regions.add(built[piece] if isinstance(piece, slice) else [piece])
        ends = [out for end in self.graph.ends for out in self.ops.ops[end].outputs]
        regions.enclose(
            next((t for t in ends if t.dtype.is_floating or t.dtype.is_complex), None),
            wanted,
            set(self.state.clones.values()),
        )
        return regions.replaced

    def _next_region(self) -> int:
        self.noted.append([])
        return len(self.noted) - 1
