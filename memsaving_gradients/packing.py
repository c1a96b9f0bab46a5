"""Masks in bits: a boolean that has to be kept takes a byte for each element, and needs one bit.

The mask of a dropout layer comes from random numbers that must not be drawn again, so it is kept from the forward to the
backward pass: in a Transformer as many elements as all attention weights. Such masks are packed where they are made, and
whoever reads them reads the unpacked copy, which planners may recompute like any other tensor. Exact, an eighth of the
bytes, a dozen cheap ops for each mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools import _tf, optypes
from graph_tools.edit import Rewiring

__all__ = ["Masks", "pack_masks"]

#: Masks with fewer elements are not worth it.
FEWEST_ELEMENTS = 4096
_BITS = [[1], [2], [4], [8], [16], [32], [64], [128]]


@dataclass(frozen=True, eq=False)
class Masks:
    """What was packed.

    Attributes
    ----------
    packed
        The masks in bits.
    rewiring
        The edges that were re-pointed, from masks to their unpacked copies.
    """

    packed: tuple[tf.Tensor, ...] = ()
    rewiring: Rewiring = field(default_factory=Rewiring)


def pack_masks(operations: Sequence[tf.Operation], first_backward: int) -> Masks:
    """Pack the masks that ``operations`` from number ``first_backward`` on read and that cannot be made again."""
    masks = list(_masks(operations, first_backward))
    if not masks:
        return Masks()
    packed = []
    rewiring = Rewiring()
    with _tf.outside_scopes(masks[0].graph), _tf.unrecorded():
        for mask in masks:
            readers = [
                (op, k) for op in mask.consumers() for k, t in enumerate(op.inputs) if t is mask
            ]
            with tf.device(mask.device), tf.name_scope(mask.op.name + "_packed/"):
                packed.append(_pack(mask))
                unpacked = _unpack(packed[-1], mask)
            for op, k in readers:
                rewiring.point(op, k, unpacked)
    return Masks(tuple(packed), rewiring)


def _masks(operations: Sequence[tf.Operation], first_backward: int) -> Iterator[tf.Tensor]:
    seen: set[object] = set()
    border = _tf.creation_index(operations[first_backward])
    for op in operations[first_backward:]:
        for tensor in op.inputs:
            if tensor.dtype != tf.bool or tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            early = _tf.creation_index(tensor.op) < border
            if early and _fits(tensor) and _must_be_kept(tensor.op):
                yield tensor


def _fits(mask: tf.Tensor) -> bool:
    """Whether the number of elements is a multiple of eight, whatever the batch, and large enough."""
    if mask.shape.rank is None:
        return False
    known = [n for n in mask.shape.as_list() if n is not None]
    elements = math.prod(known)
    unknown = mask.shape.rank - len(known)
    large = elements >= FEWEST_ELEMENTS if unknown == 0 else unknown == 1 and elements > 0
    return large and elements % 8 == 0


def _must_be_kept(op: tf.Operation) -> bool:
    """Whether ``op`` hangs on something that is drawn once: a stateful op, at most a few elementwise ops back."""
    while op.type not in optypes.SOURCES:
        if not optypes.is_clonable(op):
            return optypes.is_random(op)
        computed = [t.op for t in op.inputs if t.op.type != "Const"]
        if len(computed) != 1:
            return False
        (op,) = computed
    return False


def _pack(mask: tf.Tensor) -> tf.Tensor:
    """One byte for each eight elements, which lie an eighth of the mask apart: rows are views, columns are not."""
    rows = tf.cast(tf.reshape(mask, [8, -1]), tf.uint8) * tf.constant(_BITS, tf.uint8)
    return functools.reduce(tf.bitwise.bitwise_or, tf.unstack(rows))


def _unpack(packed: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    bits = tf.bitwise.bitwise_and(packed, tf.constant(_BITS, tf.uint8))
    shape = [-1 if n is None else n for n in mask.shape.as_list()]
    return tf.reshape(tf.cast(bits, tf.bool), shape, name="unpacked")
