"""Stochastic rounding to 16 bits, which loses nothing on average.

A number is rounded up with a probability equal to its distance from the lower neighbor, in steps of
the type (Gupta et al. 2015, arXiv 1502.02551, section 3.2). The expectation is the number itself:
many updates, each smaller than a step, move a weight as far as their sum. The step follows from the
number's exponent. Scaling by it is exact, so that the result is always one of the two neighbors.
The cost is a few elementwise ops on one variable at a time.
"""

from __future__ import annotations

import functools
import hashlib

import tensorflow as tf

__all__ = ["LOW", "number_of", "rounded"]

#: Fact: for each 16-bit type, the bits after the point, and the exponent below which all steps are
#: equal: the least normal number's; for ``bfloat16``, the one at which a step is the least normal
#: ``float32``, as processors take smaller numbers for zero.
LOW: dict[tf.DType, tuple[int, int]] = {tf.bfloat16: (7, -119), tf.float16: (10, -14)}
#: Fact: the bits of the exponent of ``float32``.
_EXPONENT = 0x7F800000


def rounded(value: tf.Tensor, dtype: tf.DType, seed: tf.Tensor) -> tf.Tensor:
    """Return ``value``, of type ``float32``, rounded at random to ``dtype``.

    Parameters
    ----------
    value
        Numbers that are not finite stay the same; numbers too large for ``dtype`` become infinite.
    dtype
        ``tf.bfloat16`` or ``tf.float16``.
    seed
        Two integers; equal seeds give equal results.

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
    """Return a 64-bit hash of ``parts``, for a seed.

    Sums of ``parts`` would be equal for neighbors: the second variable with one seed, the first
    with the next.
    """
    found = hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)
