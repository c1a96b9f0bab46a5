"""Losses that compare examples: a warning exactly where microbatches give other gradients than the
batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.training.microbatches.mixing import mixing_op

ROWS, SIZE, WIDTH = 32, 8, 6


def numbers(seed: int, *shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


WEIGHT = tf.Variable(numbers(0, WIDTH, WIDTH))


def unit(x: tf.Tensor) -> tf.Tensor:
    return tf.math.l2_normalize(x @ WEIGHT, -1)


def two_views(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compare each view of an example with all others (Chen et al. 2020)."""
    z, rows = tf.concat([unit(x), unit(y)], 0), tf.shape(x)[0]
    similar = tf.matmul(z, z, transpose_b=True) - 1e9 * tf.eye(2 * rows)
    labels = (tf.range(2 * rows) + rows) % (2 * rows)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(logits=similar, labels=labels)
    )


def images_and_texts(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    similar = tf.einsum("id,jd->ij", unit(x), unit(y))
    return -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(similar)))


def redundancy(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compare features with features, over all examples (Zbontar et al. 2021)."""
    found = tf.matmul(unit(x), unit(y), transpose_a=True) / tf.cast(tf.shape(x)[0], tf.float32)
    return tf.reduce_sum((found - tf.eye(WIDTH)) ** 2)


def distances(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = unit(x)
    return tf.reduce_mean(tf.reduce_sum((z[:, None] - z[None]) ** 2, -1))


def variance(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = unit(x)
    return tf.reduce_mean((z - tf.reduce_mean(z, 0)) ** 2)


def shares_of_the_batch(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.softmax(unit(x), axis=0) * y) / tf.cast(tf.shape(x)[0], tf.float32)


def same_labels(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Multiply a tensor of pairs, made of labels alone, by the examples."""
    z, labels = unit(x), tf.cast(y[:, 0] > 0, tf.float32)
    same = tf.cast(labels[:, None] == labels[None, :], tf.float32)
    return tf.reduce_mean(tf.matmul(same, z) ** 2)


def squares(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((unit(x) - y) ** 2)


def classes(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax(y), logits=unit(x))
    return tf.reduce_mean(losses) + 1e-2 * tf.reduce_sum(WEIGHT**2)


def inside_of_examples(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compute attention, a product of each example with itself."""
    parts = tf.reshape(unit(x), [-1, 3, 2])
    weights = tf.nn.softmax(tf.matmul(parts, parts, transpose_b=True))
    turned = tf.transpose(tf.matmul(weights, parts), [1, 0, 2])
    return tf.reduce_mean(tf.stack(tf.unstack(turned)) ** 2 + tf.expand_dims(y[:, :2], 0))


def time_major(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    steps = tf.transpose(tf.reshape(unit(x), [-1, 3, 2]), [1, 0, 2])
    return tf.reduce_mean(tf.scan(lambda h, s: tf.tanh(h + s), steps) ** 2)


def shifted(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compare each example with its neighbor, as a negative."""
    z = unit(x)
    return tf.reduce_mean(tf.nn.relu(tf.reduce_sum(z * tf.roll(z, 1, axis=0), -1) + 0.5))


def turned_round(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = unit(x)
    return tf.reduce_mean((z - z[::-1]) ** 2)


def reversed_examples(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((unit(x) - tf.reverse(unit(y), [0])) ** 2)


def in_order_of_a_label(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = unit(x)
    chosen = tf.gather(z, tf.argsort(y[:, 0]))
    return tf.reduce_mean((z - chosen) ** 2)


def successive(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = unit(x)
    return tf.reduce_sum((z[1:] - z[:-1]) ** 2)


def halves(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compare pairs of examples that are in the same batch."""
    first, second = tf.split(unit(x), 2, axis=0)
    return tf.reduce_mean((first - second) ** 2)


def cumulated(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.cumsum(unit(x), axis=0) ** 2)


def hardest(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    losses = tf.reduce_sum((unit(x) - y) ** 2, -1)
    return tf.reduce_mean(tf.math.top_k(losses, 3).values)


def prototypes(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Compare each example with the mean of those with its label (Snell et al. 2017)."""
    z, labels = unit(x), tf.cast(y[:, 0] > 0, tf.int32)
    means = tf.math.unsorted_segment_sum(z, labels, 2)
    return tf.reduce_mean((z - tf.gather(means, labels)) ** 2)


def root(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean((unit(x) - y) ** 2))


def diversity(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the entropy of the mean prediction."""
    mean = tf.reduce_mean(tf.nn.softmax(unit(x)), 0)
    return tf.reduce_sum(mean * tf.math.log(mean))


def load(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the product of two means (Shazeer et al. 2017)."""
    gates = tf.nn.softmax(unit(x) * 3)
    chosen = tf.one_hot(tf.argmax(gates, -1), WIDTH)
    return tf.reduce_sum(tf.reduce_mean(gates, 0) * tf.reduce_mean(chosen, 0))


def overlap(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the Dice loss of a batch (Milletari et al. 2016)."""
    p, wanted = tf.sigmoid(unit(x)), tf.cast(y > 0, tf.float32)
    return -tf.reduce_sum(p * wanted) / (tf.reduce_sum(p) + tf.reduce_sum(wanted))


MIXING = (
    root,
    diversity,
    load,
    overlap,
    shifted,
    turned_round,
    reversed_examples,
    in_order_of_a_label,
    successive,
    halves,
    cumulated,
    hardest,
    prototypes,
    two_views,
    images_and_texts,
    redundancy,
    distances,
    variance,
    shares_of_the_batch,
    same_labels,
)


def in_another_order(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Reverse both sides, so that each example meets its own label."""
    return tf.reduce_mean((tf.reverse(unit(x), [0]) - tf.reverse(y, [0])) ** 2)


def masked(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    there = y[:, 0] > -9
    z, wanted = tf.boolean_mask(unit(x), there), tf.boolean_mask(y, there)
    return tf.reduce_mean((z - wanted) ** 2)


def along_features(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = tf.roll(tf.reverse(unit(x), [1]), 1, axis=1)
    first, second = tf.split(tf.cumsum(z, axis=1), 2, axis=1)
    best = tf.math.top_k(z, 3).values
    return tf.reduce_mean((first - second[:, :3] + best) ** 2 + z[:, 1:4] * y[:, :3])


def scaled(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return a mean that is scaled, shifted, and replaced for huge labels."""
    loss = tf.reduce_mean((unit(x) - y) ** 2) * 0.5 / 3.0
    norm = tf.sqrt(tf.reduce_sum(WEIGHT**2))
    return tf.where(tf.reduce_sum(y) > 1e9, tf.zeros([]), loss + 1e-2 * norm)


SEPARATE = (
    scaled,
    squares,
    classes,
    inside_of_examples,
    time_major,
    in_another_order,
    masked,
    along_features,
)


def _slope(loss: Callable[..., tf.Tensor]) -> Any:
    @tf.function(autograph=False)
    def slope(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = loss(x, y)
        return tape.gradient(value, WEIGHT)

    return slope(numbers(1, ROWS, WIDTH), numbers(2, ROWS, WIDTH)).numpy()


@pytest.mark.parametrize("loss", [*MIXING, *SEPARATE])
def test_who_is_warned_gets_other_gradients(loss: Callable[..., tf.Tensor]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = _slope(ms.microbatch(loss, SIZE))
    warned = [w for w in said if issubclass(w.category, ms.errors.BatchStatisticsWarning)]
    expected = _slope(loss)
    differs = np.abs(found - expected).max() > 1e-4 * np.abs(expected).max()
    assert bool(warned) == differs == (loss in MIXING)
    if warned:
        assert "compares examples" in str(warned[0].message)
        assert "test_microbatch_mixing.py" in str(warned[0].message)


def test_gradients_that_are_returned_mix_nothing() -> None:
    """The gradients are sums of products over the examples, and add up."""

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = squares(x, y)
        return {"loss": value, "grads": tape.gradient(value, [WEIGHT])}

    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.errors.BatchStatisticsWarning)
        tf.function(ms.microbatch(step, SIZE))(numbers(1, ROWS, WIDTH), numbers(2, ROWS, WIDTH))


@pytest.mark.parametrize("rows", [None, 8])
def test_views_keep_track_of_the_examples(graph: tf.Graph, rows: int | None) -> None:
    x = tf.compat.v1.placeholder(tf.float32, [rows, 4, 6])
    views: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
        "flattened": lambda t: tf.reshape(t, [-1, 24]),
        "turned": lambda t: tf.transpose(tf.transpose(t, [1, 2, 0]), [2, 0, 1])[:, 0],
        "squeezed": lambda t: tf.squeeze(tf.expand_dims(t, 1), 1)[..., 0],
        "packed": lambda t: tf.unstack(tf.stack([t[:, 0], t[:, 1]], axis=0))[0],
        "cut": lambda t: tf.pad(tf.split(t, 2, axis=1)[0][:, 0], [[0, 0], [1, 1]]),
        "gathered": lambda t: tf.gather(t, [0, 2], axis=2)[:, :, 1],
        "normalized": lambda t: tf.nn.softmax(t)[:, -1],
    }
    for name, view in views.items():
        z = view(x)
        assert mixing_op([tf.reduce_sum(z**2)], [x]) is None, name
        pairs = tf.matmul(z, z, transpose_b=True)
        assert mixing_op([tf.reduce_sum(pairs)], [x]) is pairs.op, name
        summed = tf.matmul(z, z, transpose_a=True)
        assert mixing_op([tf.reduce_sum(summed)], [x]) is None, name
        squared = tf.square(summed)
        assert mixing_op([tf.reduce_sum(squared)], [x]) is squared.op, name
