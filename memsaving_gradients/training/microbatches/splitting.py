"""Find the arguments of a step that have a row for each example, and cut them into microbatches.

All tensors with axes are cut along the first one, except arguments that the user wants whole. There
are as few microbatches as their size allows, all as equal as possible. If their number divides the
batch, all have one shape. Otherwise the graph does not know their shapes, and sizes differ by one,
which is better for statistics of a microbatch than a small rest. XLA needs to know shapes: there,
all microbatches but the last have the size that was asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from memsaving_gradients.errors import ArgumentError

__all__ = ["Batch", "Stretch", "batch_of", "stretches"]


@dataclass(frozen=True, eq=False)
class Stretch:
    """Microbatches of one shape, one after the other.

    Attributes
    ----------
    count
        How many microbatches; a tensor where the batch size is unknown.
    rows
        How many examples each has; a tensor: a number that XLA will know; ``None``: sizes differ.
    start_of
        A function from the number of a microbatch of this stretch to its first example. For
        ``count``, the end of the last.
    """

    count: int | tf.Tensor
    rows: int | tf.Tensor | None
    start_of: Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of one call.

    Attributes
    ----------
    arguments
        The arguments and keyword arguments, with tensors in the place of arrays.
    leaves
        The leaves of the arguments, flat.
    split
        The positions of the leaves that are cut.
    """

    arguments: Any
    leaves: tuple[Any, ...]
    split: tuple[int, ...]

    @property
    def parts(self) -> list[tf.Tensor]:
        """The tensors that are cut."""
        return [self.leaves[k] for k in self.split]

    @property
    def rows(self) -> int | None:
        """The number of examples, if the graph knows it."""
        return next(
            (n for n in (part.shape.as_list()[0] for part in self.parts) if n is not None), None
        )

    @property
    def examples(self) -> tf.Tensor:
        """The number of examples, as a tensor."""
        return tf.shape(self.parts[0])[0]

    def cut(
        self, start: tf.Tensor, end: tf.Tensor, rows: int | tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Return the examples from ``start`` to ``end``; ``rows``: as for `Stretch`."""
        if rows is None:
            return [part[start:end] for part in self.parts]
        found = []
        for part in self.parts:
            begin = tf.concat([[start], tf.zeros([part.shape.rank - 1], tf.int32)], 0)
            # XLA takes constant sizes; -1 takes the whole axis.
            size = tf.stack([rows, *(-1 if n is None else n for n in part.shape.as_list()[1:])])
            piece = tf.slice(part, begin, size)
            piece.set_shape([rows if isinstance(rows, int) else None, *part.shape.as_list()[1:]])
            found.append(piece)
        return found

    def specs(self, rows: int | None) -> list[tf.TensorSpec]:
        """Return the specs of the tensors that `cut` returns."""
        return [tf.TensorSpec([rows, *part.shape.as_list()[1:]], part.dtype) for part in self.parts]

    def with_parts(self, parts: Sequence[tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a microbatch in the place of the batch."""
        leaves = list(self.leaves)
        for k, part in zip(self.split, parts, strict=True):
            leaves[k] = part
        args, kwargs = tf.nest.pack_sequence_as(self.arguments, leaves)
        return args, kwargs


def batch_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole: Collection[str],
) -> Batch:
    """Return the batch of a call of ``function``.

    Raises
    ------
    ArgumentError
        If there is nothing to cut, arguments have different numbers of examples, or ``whole`` names
        no argument.
    """
    names = _names(function, args, kwargs)
    unknown = [name for name in whole if name not in {name for name, _ in names}]
    if unknown:
        known = ", ".join(map(repr, dict.fromkeys(name for name, _ in names)))
        raise ArgumentError(
            "whole",
            unknown[0],
            f"no argument of this call has that name; its arguments are {known}",
        )
    leaves, owners = [], []
    for name, value in names:
        for leaf in tf.nest.flatten(value):
            leaves.append(tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)
            owners.append(name)
    split = [
        k for k, leaf in enumerate(leaves) if owners[k] not in whole and _has_rows(owners[k], leaf)
    ]
    if not split:
        raise ArgumentError(
            "microbatch",
            tuple(owners),
            "no argument has examples to cut: pass the batch as tensors or arrays whose first axis"
            " is the axis of examples",
        )
    agreed = _agree([owners[k] for k in split], [leaves[k] for k in split])
    for k, leaf in zip(split, agreed, strict=True):
        leaves[k] = leaf
    packed = tf.nest.pack_sequence_as((list(args), dict(kwargs)), leaves)
    return Batch((tuple(packed[0]), packed[1]), tuple(leaves), tuple(split))


def _names(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the arguments in the order in which ``tf.nest`` flattens them, each with the name of
    its parameter."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    plain = [
        p.name
        for p in parameters
        if p.kind is not p.VAR_POSITIONAL and p.kind is not p.KEYWORD_ONLY
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    positional = [(plain[k] if k < len(plain) else rest, value) for k, value in enumerate(args)]
    return [*positional, *((name, kwargs[name]) for name in sorted(kwargs))]


def _has_rows(name: str, leaf: Any) -> bool:
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise ArgumentError(
            name,
            leaf,
            f"is a {type(leaf).__name__}, which cannot be cut into microbatches; pass a dense"
            " tensor, or name it in whole=",
        )
    if not isinstance(leaf, tf.Tensor):
        return False
    if leaf.shape.rank is None:
        raise ArgumentError(
            name,
            leaf,
            "has an unknown number of axes; give it a shape (tf.ensure_shape), or name it in"
            " whole=",
        )
    return bool(leaf.shape.rank)


def _agree(owners: Sequence[str], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the same tensors with equal numbers of rows, which are checked at run time if they are
    unknown."""
    known: dict[int, str] = {}
    for name, part in zip(owners, parts, strict=True):
        if part.shape.as_list()[0] is not None:
            known.setdefault(part.shape.as_list()[0], name)
    if len(known) > 1:
        (rows, first), (others, second) = [*known.items()][:2]
        raise ArgumentError(
            second,
            f"{others} examples",
            f"{first!r} has {rows}; name arguments that must not be cut in whole=, such as"
            f" whole=[{second!r}]",
        )
    if known:
        return [tf.ensure_shape(part, [*known, *part.shape.as_list()[1:]]) for part in parts]
    rows = tf.shape(parts[0])[0]
    checks = [
        tf.debugging.assert_equal(
            tf.shape(part)[0],
            rows,
            f"microbatch: {owners[0]!r} and {name!r} have different numbers of examples; name"
            " arguments that must not be cut in whole=",
        )
        for name, part in zip(owners[1:], parts[1:], strict=True)
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [tf.identity(part) for part in parts]


def stretches(batch: Batch, size: int, *, static: bool) -> list[Stretch]:
    """Cut a batch into microbatches of at most ``size`` examples.

    ``static``: whether shapes must be known where they can be, as XLA needs.
    """
    rows = batch.rows
    if rows is not None:
        count = max(1, -(-rows // size))
        if rows % count == 0:
            each = rows // count
            return [Stretch(count, each, lambda k: k * each)]
    total = batch.examples if rows is None else tf.constant(rows)
    if static and rows is not None:
        full = rows // size
        return [
            Stretch(full, size, lambda k: k * size),
            Stretch(1, rows % size, lambda k: full * size + k * (rows % size)),
        ]
    if static:
        whole = total // size
        rest = total - whole * size
        return [
            Stretch(whole, tf.minimum(size, total), lambda k: k * size),
            Stretch(tf.minimum(rest, 1), rest, lambda k: whole * size + k * rest),
        ]
    count = tf.maximum(1, (total + (size - 1)) // size)
    # In 64 bits: the product of rows and microbatches may be large.
    wide = tf.cast(total, tf.int64)

    def start_of(k: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(k, tf.int64) * wide // tf.cast(count, tf.int64), tf.int32)

    return [Stretch(count, None, start_of)]
