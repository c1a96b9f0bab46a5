"""Rounding to 16 bits such that nothing is lost on average.

A number between two that the type has becomes the upper one with the probability of its distance
from the lower (Gupta et al. 2015, arXiv 1502.02551, section 3.2): its expectation is the number
itself, and many updates that are each smaller than a step of the type move a weight as far as their
sum. The step of a number follows from its own exponent; scaling by it is exact, so that the result
is always one of the two neighbors. A few elementwise ops on one variable at a time.
"""

from __future__ import annotations

import functools
import hashlib

import tensorflow as tf

__all__ = ["LOW", "number_of", "rounded"]

#: Fact: types to round to: bits after the point, and the exponent from which on steps are all the
#: same: below the least of normal numbers, or, as processors take what is less for zero, where a
#: step is the least normal number of ``float32``.
LOW: dict[tf.DType, tuple[int, int]] = {tf.bfloat16: (7, -119), tf.float16: (10, -14)}
#: Fact: the bits of the exponent of ``float32``.
_EXPONENT = 0x7F800000


def rounded(value: tf.Tensor, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """``value``, of type ``float32``, rounded at random.

    Parameters
    ----------
    value
        What is not finite stays what it is; what is too large for ``dtype`` becomes infinite.
    dtype
        ``tf.bfloat16`` or ``tf.float16``.
    seed
        Two integers; the same ones give the same numbers.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = tf.fill([10_000], 1.001)
    >>> low = tf.cast(rounded(x, tf.bfloat16, tf.constant([1, 2])), tf.float32)
    >>> sorted(set(low.numpy().tolist())), abs(float(tf.reduce_mean(low)) - 1.001) < 2e-4
    ([1.0, 1.0078125], True)
    """
    bits, least = LOW[dtype]
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(value, tf.int32), _EXPONENT), tf.float32)
    step = tf.maximum(power, 2.0**least) * 2.0**-bits
    chance = tf.random.stateless_uniform(tf.shape(value), seed)
    found = tf.floor(value / step + chance) * step
    return tf.cast(tf.where(tf.math.is_finite(value), found, value), dtype)


@functools.cache
def number_of(*parts: int) -> int:
    """A number of 64 bits that no other ``parts`` have, for a seed.

    Sums would be the same for neighbors: the second variable with one seed, the first with the
    next.
    """
    found = hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)
