"""Fingerprints tell which training graph a plan is for, by op types, shapes, edges and sizes, never
by names.

There is a number for each op, so that the error for a plan of another graph names the first op that
differs. Linear, about 5 µs an op.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaving_gradients.capture.training_step import CapturedStep

__all__ = ["Fingerprint", "fingerprint"]


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a training step, the same in every process that builds the same step.

    Attributes
    ----------
    digest
        A digest of everything.
    first_backward
        Number of forward ops.
    batch
        The batch size that was assumed for an unknown dimension; 0 where there is none.
    types
        Type of each op.
    ops
        A checksum of each op: type, inputs, shapes.
    """

    digest: str
    first_backward: int
    batch: int
    types: tuple[str, ...] = field(repr=False)
    ops: tuple[int, ...] = field(repr=False)

    def difference(self, other: Fingerprint, names: Sequence[str]) -> str | None:
        """Return how the graph of ``other``, whose ops have ``names``, differs from this one;
        ``None`` if it does not.

        Examples
        --------
        >>> a = Fingerprint("0", 2, 0, ("Placeholder", "Tanh"), (1, 2))
        >>> b = Fingerprint("1", 2, 0, ("Placeholder", "Relu"), (1, 3))
        >>> a.difference(b, ["x", "layer/Relu"])
        "op 1 is a Tanh in the plan and a Relu ('layer/Relu') here"
        >>> a.difference(a, ["x", "layer/Tanh"])
        """
        if self.digest == other.digest:
            return None
        both = list(zip(self.ops, other.ops, strict=False))
        k = next((k for k, (mine, its) in enumerate(both) if mine != its), len(both))
        first = ""
        if k < len(both) and self.types[k] != other.types[k]:
            first = (
                f"op {k} is a {self.types[k]} in the plan and a {other.types[k]} ({names[k]!r})"
                " here"
            )
        elif k < len(both):
            first = (
                f"op {k}, the {other.types[k]} {names[k]!r}, has other inputs or another shape here"
            )
        if len(self.ops) != len(other.ops):
            return (
                f"the plan is for {len(self.ops):,} ops, {self.first_backward:,} of them forward;"
                f" this graph has {len(other.ops):,} and"
                f" {other.first_backward:,}{'; ' if first else ''}{first}"
            )
        if first:
            return first
        if self.batch != other.batch:
            return (
                f"the plan was made for batch_size={self.batch}, and this is"
                f" batch_size={other.batch}"
            )
        return "the bytes of some buffers differ"


def fingerprint(step: CapturedStep, batch: int = 0, *, sized: bool = True) -> Fingerprint:
    """Return the fingerprint of a captured step, planned for a batch of ``batch`` examples.

    ``sized``: whether steps with other shapes and bytes have other fingerprints.
    """
    graph, source = step.graph, step.source
    types = tuple(op.type for op in source.ops)
    marks = []
    for op, kind, reads, waits in zip(
        source.ops, types, source.inputs, source.controls, strict=True
    ):
        made = [(t.dtype.name, str(t.shape) if sized else "") for t in op.outputs]
        marks.append(zlib.crc32(repr((kind, reads, waits, made)).encode()))
    unknown = batch if sized and source.bytes_per_example.any() else 0
    whole = hashlib.sha256(repr((graph.first_backward, types, marks, unknown)).encode())
    if sized:
        whole.update(graph.size.astype("<i8").tobytes())
    whole.update(graph.storage.astype("<i8").tobytes())
    return Fingerprint(whole.hexdigest(), graph.first_backward, unknown, types, tuple(marks))
