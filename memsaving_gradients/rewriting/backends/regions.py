"""The regions of a backward pass, which become a row of conditionals.

XLA knows no control edges, merges clones with their originals, and runs every op that is ready.
Copies of checkpoints, and of weights in another layout, would be there from the first moment. So
the ops between two places of the backward schedule become a region: clones, and the backward ops
that read them. A region becomes a conditional (:mod:`graph_tools.editing.enclosing`) whose
predicate reads a result of the region before it. So regions with floating point results run one
after the other, and the scratch memory of each is free when it has run.

Ops that touch variables, or lists that cross a border, cannot be in a conditional. They split a
region; clones among them read an input behind an opaque identity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import tensorflow as tf

from graph_tools.costs.parameters import MOST
from graph_tools.editing import opaque
from graph_tools.editing.enclosing import can_enclose, enclose
from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.capture import OpGraph
from memsaving_gradients.rewriting.gates import widest_input

__all__ = ["Regions"]


class Regions:
    """The backward pass of one schedule, which becomes conditionals.

    Parameters
    ----------
    source
        The captured step.
    rewiring
        The record of edits.

    Attributes
    ----------
    replaced
        For each replaced tensor, by reference, the tensor that replaces it.
    """

    def __init__(self, source: OpGraph, rewiring: Rewiring) -> None:
        self.source, self.rewiring = source, rewiring
        self.replaced: dict[object, tf.Tensor] = {}
        self.windows: list[list[tf.Operation]] = [[]]
        self._constants: dict[object, bool] = {}

    def part(self) -> None:
        """Begin a region."""
        if self.windows[-1]:
            self.windows.append([])

    def add(self, ops: Sequence[tf.Operation]) -> None:
        """Add ops to the current region, in the order in which they run."""
        self.windows[-1] += ops

    def enclose(
        self,
        trigger: tf.Tensor | None,
        wanted: Collection[tf.Tensor],
        clones: Collection[tf.Operation],
    ) -> None:
        """Turn the regions into conditionals.

        Parameters
        ----------
        trigger
            A tensor that the first region waits for.
        wanted
            Tensors whose readers do not exist yet: gradients.
        clones
            Ops that must not be merged with others.
        """
        regions = list(self._regions())
        place = {op: number for number, (ops, _) in enumerate(regions) for op in ops}
        asked = {t.ref() for t in wanted}
        never: tf.Tensor | None = None
        for number, (ops, inside) in enumerate(regions):
            if not inside:
                for op in ops:
                    self._repoint(op, never if op in clones else None)
                continue
            results = [
                t
                for op in ops
                for t in op.outputs
                if not self._is_constant(t)
                and (t.ref() in asked or any(place.get(r, number) != number for r in t.consumers()))
            ]
            if not results:
                continue
            if trigger is not None:
                never = opaque.never(trigger)
            if never is None:
                continue
            made = enclose(
                ops,
                results,
                never,
                stands=self.replaced,
                is_constant=self._is_constant,
                name=f"region_{number}",
            )
            self.replaced.update(zip((t.ref() for t in results), made, strict=True))
            numbers = [t for t in made if t.dtype.is_floating or t.dtype.is_complex]
            trigger = min(numbers, key=_elements, default=trigger)

    def _repoint(self, op: tf.Operation, never: tf.Tensor | None) -> None:
        """Let an op outside of regions read the tensors that replace its inputs."""
        for k, tensor in enumerate(op.inputs):
            if (other := self.replaced.get(tensor.ref())) is not None:
                self.rewiring.point(op, k, other)
        if never is not None:
            widest = widest_input(op.inputs, [self._is_constant(t) for t in op.inputs])
            if widest is not None and opaque.can_pass(op.inputs[widest]):
                self.rewiring.point(op, widest, opaque.behind(op.inputs[widest], never))

    def _regions(self) -> Iterator[tuple[list[tf.Operation], bool]]:
        """Yield the ops of each region, in order, and whether they can be enclosed."""
        for window in self.windows:
            movable = _movable(window)
            ops: list[tf.Operation] = []
            for op in window:
                if op in movable:
                    ops.append(op)
                    continue
                if ops:
                    yield ops, True
                yield [op], False
                ops = []
            if ops:
                yield ops, True

    def _is_constant(self, tensor: tf.Tensor) -> bool:
        key = tensor.ref()
        if key not in self._constants:
            position = self.source.position.get(tensor.op.name)
            constant = tensor.op.type == "Const"
            if position is not None:
                value = self.source.first_value[position] + tensor.value_index
                constant = bool(self.source.constant[value])
            # Each region computes for itself the constants whose values a compiler may need.
            self._constants[key] = constant and _elements(tensor) <= MOST
        return self._constants[key]


def _elements(tensor: tf.Tensor) -> float:
    number = tensor.shape.num_elements()
    return math.inf if number is None else number


def _movable(window: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Return the ops that may be in a conditional: pure ops whose lists begin and end in it."""
    found = {op for op in window if can_enclose(op)}
    while True:
        # Each op outside begins a new part. A list must be made and read within one part.
        part = dict(zip(window, accumulate(op not in found for op in window), strict=True))
        out = {
            op
            for op in found
            for tensor, others in (
                *((t, [t.op]) for t in op.inputs),
                *((t, t.consumers()) for t in op.outputs),
            )
            if tensor.dtype == tf.variant
            and any(other not in found or part[other] != part[op] for other in others)
        }
        if not out:
            return found
        found -= out
