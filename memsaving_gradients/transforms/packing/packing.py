"""Bits in place of tensors: exact encodings of what the backward pass reads only a part of.

*Masks.* A boolean that has to be kept takes a byte for each element, and needs one bit. The mask of
a dropout layer comes from random numbers that must not be drawn again, so it is kept from the
forward to the backward pass: in a Transformer as many elements as all attention weights. Such masks
are packed where they are made, and whoever reads them reads the unpacked copy, which planners may
recompute like any other tensor.

*Signs, winners, indices* (:mod:`memsaving_gradients.transforms.packing.partial_reads`). The
gradient of a rectifier reads only whether its output is positive, that of pooling which element of
a window is the largest. Where nobody reads more of a tensor, backward ops read what is unpacked
from bits: a 32nd of the bytes of ``float32``, as Jain et al. 2018 do by hand (Gist, ISCA 2018).
Numbers are 0 and 1 then, in the place of the true ones, and the gradient is the same to the last
bit.

Gradients are the same, in an eighth to a 32nd of the bytes, with a dozen cheap ops for each tensor.
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

#: Tensors of fewer elements are not worth it.
FEWEST_ELEMENTS = 4096


@dataclass(frozen=True, eq=False)
class Packed:
    """What was packed.

    Attributes
    ----------
    masks
        The masks in bits.
    parts
        What is kept of other tensors.
    early
        The ops that pack the latter: forward ops, though they were created late.
    rewiring
        The edges that were re-pointed, to what is unpacked.
    """

    masks: tuple[tf.Tensor, ...] = ()
    parts: tuple[tf.Tensor, ...] = ()
    early: frozenset[tf.Operation] = frozenset()
    rewiring: Rewiring = field(default_factory=Rewiring)

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        """All that is kept."""
        return (*self.masks, *self.parts)


def pack(step: CapturedStep, *, parts: bool = True) -> Packed:
    """Pack the masks that the backward ops of ``step`` read and that cannot be recomputed, and what
    they read only a part of.

    ``parts``: whether the latter are packed.
    """
    masks, found = list(_masks(step)), _parts(step) if parts else []
    # Ops stand in the order of their creation where they may: what is unpacked first is built
    # first.
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
    """What `pack` would keep in fewer bytes."""
    return [*_masks(step), *(part.tensor for part in _parts(step))]


def _parts(step: CapturedStep) -> list[Part]:
    return [part for part in parts_read(step) if not part.packs or _fits(part.tensor)]


def _keep(part: Part, early: set[tf.Operation], rewiring: Rewiring) -> tf.Tensor:
    """Keep a part of a tensor, and let those that read it read what comes of that."""
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
    """Whether the number of elements is a multiple of eight, whatever the batch, and large
    enough."""
    if tensor.shape.rank is None:
        return False
    elements, unknown = _elements(tensor)
    large = elements >= FEWEST_ELEMENTS if unknown == 0 else unknown == 1 and elements > 0
    return large and elements % 8 == 0


def _elements(tensor: tf.Tensor) -> tuple[int, int]:
    """The product of the dimensions that are known, and how many are not."""
    known = [n for n in tensor.shape.as_list() if n is not None]
    return math.prod(known), tensor.shape.rank - len(known)


def _must_be_kept(op: tf.Operation) -> bool:
    """Whether ``op`` hangs on something that is drawn once: a stateful op, at most a few
    elementwise ops back."""
    while op.type not in op_types.SOURCES:
        if not op_types.is_clonable(op):
            return op_types.is_random(op)
        computed = [t.op for t in op.inputs if t.op.type != "Const"]
        if len(computed) != 1:
            return False
        (op,) = computed
    return False


def _pack(mask: tf.Tensor) -> tf.Tensor:
    """A bit for each element: halves, which are views, are laid over each other three times, eight
    bytes in one word where they come out even."""
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
