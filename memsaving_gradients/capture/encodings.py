"""Encodings: residuals in fewer bytes than TensorFlow keeps them in.

All of them lose digits, so none is used unless the user names it. `Encoding.encode` makes the parts
that are kept, and the backward pass reads the result of `Encoding.decode`. The forward pass, and
with it the loss, does not change. Gradients change by about as much as the numbers that they are
computed from: 2⁻⁸ of each for ``bfloat16`` (8 bits of mantissa), 2⁻¹¹ for ``float16`` (11 bits;
larger numbers than 65504 become that). For ``int8``, it is 1/254 of the largest of `BLOCK`
neighbors (1/127 next to zero, because signs stay). ``int8`` has blocks with a scale each, as in
Dettmers et al. 2022 (arXiv 2110.02861), but is linear within a block.

Cost: a pass over the tensor for a cast, about six for ``int8``, each way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

__all__ = ["BLOCK", "ENCODINGS", "Encoding"]

#: Numbers that share a scale.
BLOCK = 256
#: Fact: the largest number of ``int8`` whose negative is one, too.
_LARGEST = 127


@dataclass(frozen=True)
class Encoding:
    """A way to encode a tensor.

    Attributes
    ----------
    name
        The name of the encoding.
    bits
        Bits for each number, scales included.
    passes
        The time that it takes, as a multiple of a cast's time.
    error
        The largest error of a number, as a share of itself or of the largest one in its block.
    encode
        A function from a tensor to the parts that are kept.
    decode
        A function from the parts to a tensor like a given one, of which it reads only shape and
        dtype.
    """

    name: str
    bits: float
    passes: float
    error: float
    encode: Callable[[tf.Tensor], tuple[tf.Tensor, ...]]
    decode: Callable[[Sequence[tf.Tensor], tf.Tensor], tf.Tensor]

    def bytes(self, size: int, itemsize: int) -> int:
        """Return the bytes of the kept parts, for ``size`` bytes in items of ``itemsize``.

        Examples
        --------
        >>> ENCODINGS["bfloat16"].bytes(4096, 4), ENCODINGS["int8"].bytes(4096, 4)
        (2048, 1040)
        """
        return int(size // itemsize * self.bits / 8)

    def fits(self, dtype: tf.DType) -> bool:
        """Return whether numbers of this dtype become smaller.

        Examples
        --------
        >>> ENCODINGS["bfloat16"].fits(tf.float32), ENCODINGS["bfloat16"].fits(tf.int32)
        (True, False)
        """
        return bool(dtype.is_floating and dtype.size * 8 > self.bits)


def _cast(dtype: tf.DType, error: float) -> Encoding:
    def encode(tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # All but the very largest floats have a bfloat16. For float16, a further pass limits them
        # to its range.
        return (
            tf.cast(tensor, dtype) if dtype == tf.bfloat16 else tf.saturate_cast(tensor, dtype),
        )

    def decode(parts: Sequence[tf.Tensor], like: tf.Tensor) -> tf.Tensor:
        return tf.cast(parts[0], like.dtype)

    return Encoding(dtype.name, dtype.size * 8, 1.0, error, encode, decode)


def _to_blocks(tensor: tf.Tensor) -> tuple[tf.Tensor, ...]:
    flat = tf.reshape(tensor, [-1])
    if tensor.shape.num_elements() is None or tensor.shape.num_elements() % BLOCK:
        flat = tf.pad(flat, [[0, -tf.size(flat) % BLOCK]])
    blocks = tf.cast(tf.reshape(flat, [-1, BLOCK]), tf.float32)
    # Two reductions, but no tensor of absolute values.
    most = tf.reduce_max(blocks, axis=1, keepdims=True)
    scale = tf.maximum(most, -tf.reduce_min(blocks, axis=1, keepdims=True)) / _LARGEST
    numbers = tf.cast(tf.round(tf.math.divide_no_nan(blocks, scale)), tf.int8)
    # Signs stay: by the sign, the gradient of a rectifier passes or stops the whole gradient.
    signs = tf.cast(tf.sign(blocks), tf.int8)
    return tf.where(tf.equal(numbers, 0), signs, numbers), scale


def _from_blocks(parts: Sequence[tf.Tensor], like: tf.Tensor) -> tf.Tensor:
    numbers, scale = parts
    flat = tf.reshape(tf.cast(numbers, tf.float32) * scale, [-1])
    shape = tf.shape(like)
    if like.shape.num_elements() is None or like.shape.num_elements() % BLOCK:
        flat = flat[: tf.reduce_prod(shape)]
    return tf.ensure_shape(tf.cast(tf.reshape(flat, shape), like.dtype), like.shape)


#: Fact: each encoding's bits, operations per number, and largest error.
ENCODINGS: Mapping[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        _cast(tf.bfloat16, 2.0**-8),
        _cast(tf.float16, 2.0**-11),
        Encoding("int8", 8 + 32 / BLOCK, 6.0, 1 / _LARGEST, _to_blocks, _from_blocks),
    )
}
