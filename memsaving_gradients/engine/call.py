"""One call for gradients, as TensorFlow built it: its targets, its sources, its options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import tensorflow as tf

from graph_tools.ops.devices import Home
from graph_tools.tf_private import graphs
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.transforms.attention.pattern.substitution import Substituted

__all__ = ["Call", "Gradient", "components", "joined"]

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


@dataclass(frozen=True, eq=False)
class Call:
    """A call for gradients, or several calls that are planned as one.

    Attributes
    ----------
    graph
        The graph that the gradients were built in.
    first_backward
        The number of ops that the graph had before the gradients.
    operations
        Those ops, and the ops built for the gradients; other ops may be between and after them.
    ys, xs, grads
        The targets that the graph computes, the sources, and the gradients.
    mode
        ``"memory"``, ``"speed"``, ``"collection"`` or ``"named"``; ``"budget"``, ``"slowdown"`` or
        ``"planner"``; ``"saved"``.
    kept
        Tensors to keep: named, or marked.
    options
        All options of the call.
    encode
        The encodings of tensors that the user named, by reference.
    xla
        Whether the graph is compiled by XLA.
    attention
        The substitution of attention by blocks; ``None``: no search for attention was made.
    home
        The device of the replica that computes the gradients; memory is saved on it alone.
        ``None``: all devices count as one memory.
    reduced
        Whether replicas will add up their gradients, which all live until then.
    """

    graph: tf.Graph
    first_backward: int
    operations: Sequence[tf.Operation]
    ys: Sequence[tf.Tensor]
    xs: Sequence[Any]
    grads: Sequence[Gradient]
    mode: str
    kept: Sequence[tf.Tensor]
    options: Options
    encode: Mapping[Any, str]
    xla: bool
    attention: Substituted | None = None
    home: Home | None = None
    reduced: bool = False

    @cached_property
    def own(self) -> Sequence[tf.Operation]:
        """The ops that were built for the gradients, without those that other replicas built in the
        meantime."""
        built = self.operations[self.first_backward :]
        return built if self.home is None else [op for op in built if self.home.has(op)]

    @property
    def first_operation(self) -> tf.Operation:
        """The first op of the backward pass."""
        return self.own[0]

    @cached_property
    def flat(self) -> list[tf.Tensor]:
        """The tensors that the gradients consist of."""
        return components(self.grads, self.graph)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients live until all of them are made, because the user says so or because
        replicas will add them up."""
        return self.options.hold_gradients or self.reduced

    @cached_property
    def host(self) -> str:
        """The device that values may be offloaded to, or an empty string.

        Raises
        ------
        ArgumentError
            If the device cannot be used.
        """
        offload = self.options.offload
        if offload is None:
            return ""
        if self.xla:
            raise ArgumentError(
                "offload",
                offload.device,
                "XLA cannot express transfers between devices; use encode= instead, which also"
                " works under jit_compile=True, or leave jit_compile=True out",
            )
        if self.home is not None:
            return str(offload.name(self.home.device))
        before = self.operations[: self.first_backward]
        placed = Counter(op.device for op in before if op.inputs)
        return str(offload.name(max(placed, key=placed.__getitem__, default="")))

    @property
    def room_on_host(self) -> int | None:
        """The most bytes that may be offloaded; ``None``: no limit."""
        offload = self.options.offload
        return None if offload is None else offload.limit

    @property
    def early(self) -> float:
        """The lead of a transfer back over its use, as a multiple of the transfer's time."""
        offload = self.options.offload
        return 1.0 if offload is None else float(offload.early)

    def is_here(self, op: tf.Operation) -> bool:
        """Return whether ``op`` runs, or may run, on the device that memory is saved on."""
        return self.home is None or self.home.has(op)

    def goes_through(self, other: Call) -> bool:
        """Return whether this call differentiated ``other``: its ops read ops of ``other``.

        Calls on two devices do not count: replicas read one another's gradients to add them up.
        """
        built = set(other.own)
        return self.home == other.home and any(
            tensor.op in built for op in self.own for tensor in op.inputs
        )


def components(grads: Sequence[Gradient], graph: tf.Graph) -> list[tf.Tensor]:
    """Return the tensors of ``graph`` that gradients consist of."""
    parts = tf.nest.flatten(list(grads), expand_composites=True)
    return [part for part in parts if part is not None and part.graph is graph]


def joined(one: Call, other: Call) -> Call | None:
    """Return two calls as one, if their losses share a forward pass and are all computed before the
    first gradient. ``None``: they do not, or the calls' options differ."""
    alike = (one.options, one.mode, one.home, one.reduced, one.xla) == (
        other.options,
        other.mode,
        other.home,
        other.reduced,
        other.xla,
    )
    begin = min(map(graphs.creation_index, one.own), default=0)
    late = any(graphs.creation_index(y.op) >= begin for y in other.ys)
    blocks = other.attention is not None and other.attention.names
    if not alike or late or blocks or one.encode or other.encode:
        return None
    return replace(
        one,
        operations=[*one.operations, *other.own],
        ys=[*one.ys, *other.ys],
        xs=[*one.xs, *other.xs],
        grads=[*one.grads, *other.grads],
        kept=list({tensor.ref(): tensor for tensor in (*one.kept, *other.kept)}.values()),
    )
