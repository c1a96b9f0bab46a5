"""The gradient of a loop, which TensorFlow built as another loop. Some of its variables are the
loop's accumulators, others are gradients that it carries back from step to step."""

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
        TensorFlow's gradient loop. Its variable 0 counts steps, 1 is the most steps, and 2 is the
        number of steps that the loop took.
    loop
        The loop that was differentiated.
    of_every_step
        Whether it also takes gradients, even if zero, of accumulators that earlier gradients added.
        These are lists with an element for each step, so they need a loop that keeps all steps.
    """

    op: tf.Operation
    loop: Loop
    of_every_step: bool = False

    @cached_property
    def taken(self) -> dict[int, int]:
        """For each variable (number) of the gradient that is an accumulator, the number of this
        accumulator among the loop's variables."""
        outputs = {t.ref(): i for i, t in enumerate(self.loop.op.outputs)}
        found = {}
        for i, tensor in enumerate(self._sources):
            number = outputs.get(tensor.ref())
            if number is not None and number in self.loop.accumulated:
                found[i] = number
        return found

    @cached_property
    def carried(self) -> tuple[int, ...]:
        """The gradient's variables (numbers) that change from step to step: they are gradients."""
        graph = loops.body_of(self.op)
        return tuple(
            i
            for i, (arg, out) in enumerate(zip(graph.inputs, graph.outputs, strict=True))
            if i > 2 and i not in self.taken and behind_identities(out) is not arg
        )

    @cached_property
    def read(self) -> frozenset[int]:
        """The loop's accumulators (numbers) whose elements a carried gradient is computed from. The
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
        """The gradient's inputs, or the tensors of the loop's graph that they capture."""
        return [_outer(tensor, self.loop.op.graph) for tensor in self.op.inputs]


def _outer(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """Return the tensor of ``graph`` that ``tensor`` captures, or ``tensor`` if there is none."""
    while tensor.graph is not graph:
        captured = {inner.ref(): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if tensor.ref() not in captured:
            return tensor
        tensor = captured[tensor.ref()]
    return tensor
