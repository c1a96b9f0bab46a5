"""Exact encodings, in bits, of tensors of which the backward pass reads only a part.

*Masks.* A boolean tensor takes a byte for each element, and needs one bit. The mask of a dropout
layer comes from random numbers that must not be drawn again, so it is kept from the forward to the
backward pass. In a Transformer, it has as many elements as all attention weights. Such a mask is
packed by ops next to it, and its readers read the unpacked copy. Planners may recompute this copy
like any other tensor.

*Signs, winners, indices* (:mod:`memsaving_gradients.transforms.packing.partial_reads`). The
gradient of a rectifier reads only whether its output is positive. The gradient of pooling reads
only which element of a window is the largest. If no backward op reads more of a tensor, these ops
read a copy unpacked from bits: a 32nd of the bytes of ``float32``, as Jain et al. 2018 do by hand
(Gist, ISCA 2018). In most cases, the copy has 0 and 1 instead of the true numbers.

Gradients are the same to the last bit, in an eighth to a 32nd of the bytes. The cost is a dozen
cheap ops for each tensor.

Packing edits the graph before planning, unlike other ways to store a tensor
(:mod:`memsaving_gradients.schedules.storage`). Those store what the forward pass makes. Bits that
are tensors of the graph may also be packed anew from a recomputed tensor, while its segment of the
backward pass waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.transforms.packing.partial_reads import Part, parts_read

__all__ = ["Packed", "pack", "packable"]

#: Tensors of fewer elements are not packed, as that would save too little.
FEWEST_ELEMENTS = 4096


@dataclass(frozen=True, eq=False)
class Packed:
    """The tensors of a step that were packed.

    Attributes
    ----------
    masks
        The masks in bits.
    parts
        The parts that are kept of other tensors.
    early
        The ops that pack tensors or unpack masks: forward ops, though they were created late.
    rewiring
        The edges that were re-pointed to unpacked tensors.
    """

    masks: tuple[tf.Tensor, ...] = ()
    parts: tuple[tf.Tensor, ...] = ()
    early: frozenset[tf.Operation] = frozenset()
    rewiring: Rewiring = field(default_factory=Rewiring)

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        """All tensors that are kept."""
        return (*self.masks, *self.parts)


def pack(step: CapturedStep, *, parts: bool = True) -> Packed:
    """Pack the masks that the backward ops of ``step`` read and that cannot be recomputed.

    ``parts``: whether to also reduce other tensors to the part that backward ops read.
    """
    masks, found = list(_masks(step)), _parts(step) if parts else []
    # Ops run in the order of their creation where they can, so the part that is unpacked first is
    # built first.
    found.sort(key=lambda part: min(graphs.creation_index(op) for op, _ in part.readers))
    if not masks and not found:
        return Packed()
    graph = step.source.ops[0].graph
    known = len(graph.get_operations())
    rewiring = Rewiring()
    packed, kept = [], []
    early: set[tf.Operation] = set()
    with graphs.outside_scopes(graph), graphs.unrecorded():
        for mask in masks:
            readers = [
                (op, k) for op in mask.consumers() for k, t in enumerate(op.inputs) if t is mask
            ]
            with tf.device(mask.device), tf.name_scope(mask.op.name + "_packed/"):
                packed.append(_pack(mask))
                unpacked = _unpack(packed[-1], mask)
            for op, k in readers:
                rewiring.point(op, k, unpacked)
        early.update(graph.get_operations()[known:])
        for part in found:
            kept.append(_keep(part, early, rewiring))
    return Packed(tuple(packed), tuple(kept), frozenset(early), rewiring)


def packable(step: CapturedStep) -> list[tf.Tensor]:
    """Return the tensors that `pack` would keep in fewer bytes."""
    return [*_masks(step), *(part.tensor for part in _parts(step))]


def _parts(step: CapturedStep) -> list[Part]:
    return [part for part in parts_read(step) if not part.packs or _fits(part.tensor)]


def _keep(part: Part, early: set[tf.Operation], rewiring: Rewiring) -> tf.Tensor:
    """Keep a part of a tensor, and point the part's readers to tensors computed from it."""
    graph = part.tensor.graph
    known = len(graph.get_operations())
    with tf.device(part.tensor.device), tf.name_scope(f"{part.tensor.op.name}_{part.name}/"):
        kept = whole = part.take(part.tensor)
        if part.packs:
            kept = _pack(whole)
        early.update(graph.get_operations()[known:])
        again = _unpack(kept, whole) if part.packs else kept
        for (op, k), tensor in zip(part.readers, part.give(again), strict=True):
            rewiring.point(op, k, tensor)
    return kept


def _masks(step: CapturedStep) -> Iterator[tf.Tensor]:
    ops, border = step.source, step.graph.first_backward
    read = dict.fromkeys(v for values in ops.inputs[border:] for v in values)
    for value in read:
        tensor = ops.tensor(value)
        early = int(ops.producer[value]) < border
        early = early and bool(ops.here[ops.producer[value]])
        if early and tensor.dtype == tf.bool and _fits(tensor) and _must_be_kept(tensor.op):
            yield tensor


def _fits(tensor: tf.Tensor) -> bool:
    """Return whether the number of elements is large enough and, for every batch, a multiple of
    eight."""
    if tensor.shape.rank is None:
        return False
    elements, unknown = _elements(tensor)
    large = elements >= FEWEST_ELEMENTS if unknown == 0 else unknown == 1 and elements > 0
    return large and elements % 8 == 0


def _elements(tensor: tf.Tensor) -> tuple[int, int]:
    """Return the product of the known dimensions, and the number of unknown ones."""
    known = [n for n in tensor.shape.as_list() if n is not None]
    return math.prod(known), tensor.shape.rank - len(known)


def _must_be_kept(op: tf.Operation) -> bool:
    """Return whether ``op`` depends on a random op that must run only once, through clonable ops
    with one computed input each."""
    while op.type not in op_types.SOURCES:
        if not op_types.is_clonable(op):
            return op_types.is_random(op)
        computed = [t.op for t in op.inputs if t.op.type != "Const"]
        if len(computed) != 1:
            return False
        (op,) = computed
    return False


def _pack(mask: tf.Tensor) -> tf.Tensor:
    """Return one bit for each element: three times, shift one half of the words (a view) and OR it
    with the other. Words have eight bytes if the elements fill them evenly, else one."""
    words = tf.reshape(tf.cast(mask, tf.uint8), [-1])
    if _elements(mask)[0] % 64 == 0:
        words = tf.bitcast(tf.reshape(words, [-1, 8]), tf.int64)
    for bits in (4, 2, 1):
        low, high = tf.unstack(tf.reshape(words, [2, -1]))
        words = tf.bitwise.bitwise_or(
            low, tf.bitwise.left_shift(high, tf.constant(bits, words.dtype))
        )
    return words


def _unpack(packed: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    lanes = np.left_shift(np.ones(8, np.uint8), np.arange(8, dtype=np.uint8))
    bits = lanes.repeat(packed.dtype.size).view(packed.dtype.as_numpy_dtype)
    found = tf.bitwise.bitwise_and(packed, tf.constant(bits[:, None]))
    if packed.dtype != tf.uint8:
        found = tf.bitcast(found, tf.uint8)
    shape = [-1 if n is None else n for n in mask.shape.as_list()]
    return tf.reshape(tf.cast(found, tf.bool), shape, name="unpacked")
