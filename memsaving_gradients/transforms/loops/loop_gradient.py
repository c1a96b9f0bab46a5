"""A loop's gradient, which TensorFlow built as a loop of its own: what of it comes out of
accumulators, and what it carries back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from graph_tools.ops.trip_counts import behind_identities
from graph_tools.ops.while_loops import Loop
from graph_tools.tf_private import loops
from memsaving_gradients.transforms.loops.body_copies import behind

__all__ = ["Gradient"]


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient of a loop.

    Attributes
    ----------
    op
        TensorFlow's loop. Its variable 0 counts steps, 1 is the most of them, 2 how many there
        were.
    loop
        The loop that it is the gradient of.
    of_every_step
        Whether it was also asked for gradients of accumulators that earlier gradients had added,
        be they zeros: lists with an element for each step, which only a loop that keeps all of its
        steps has.
    """

    op: tf.Operation
    loop: Loop
    of_every_step: bool = False

    @cached_property
    def taken(self) -> dict[int, int]:
        """For each of its variables (numbers) that is an accumulator, which of the loop's variables
        that is."""
        outputs = {t.ref(): i for i, t in enumerate(self.loop.op.outputs)}
        found = {}
        for i, tensor in enumerate(self._sources):
            number = outputs.get(tensor.ref())
            if number is not None and number in self.loop.accumulated:
                found[i] = number
        return found

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """Its variables that change from step to step: gradients."""
        graph = loops.body_of(self.op)
        return tuple(
            i
            for i, (arg, out) in enumerate(zip(graph.inputs, graph.outputs, strict=True))
            if i > 2 and i not in self.taken and behind_identities(out) is not arg
        )

    @cached_property
    def read(self) -> frozenset[int]:
        """Of the loop's variables, the accumulators whose elements something is computed from: the
        gradient takes elements from others, too, for gradients that nobody asked for."""
        graph = loops.body_of(self.op)
        computing = behind(graph.outputs[i] for i in self.carried)
        return frozenset(
            number
            for i, number in self.taken.items()
            if not computing.isdisjoint(graph.inputs[i].consumers())
        )

    @cached_property
    def _sources(self) -> list[tf.Tensor]:
        """Its inputs, where it stands in an inner graph as those of the loop's graph."""
        return [_outer(tensor, self.loop.op.graph) for tensor in self.op.inputs]


def _outer(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """What ``tensor`` captures of ``graph``, or itself."""
    while tensor.graph is not graph:
        captured = {inner.ref(): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if tensor.ref() not in captured:
            return tensor
        tensor = captured[tensor.ref()]
    return tensor
