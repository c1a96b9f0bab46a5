"""Images: RevNet, matching as in DETR, diffusion, contrastive losses, triplets."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.users.base import Program, Weights, conv, descend, draw, enlarged, normalized


def _labels(batch: int) -> tf.Tensor:
    return tf.constant([k % 10 for k in range(batch)])


def revnet() -> Program:
    """Return reversible blocks, whose custom gradient computes their inputs from their outputs."""
    net = Weights(1)
    stem, head = net(3, 3, 3, 64), net(64, 10)
    blocks = [(net(3, 3, 32, 32), net(3, 3, 32, 32)) for _ in range(6)]

    def half(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return conv(tf.nn.relu(normalized(x)), weight)

    @tf.custom_gradient
    def reversible(a: tf.Tensor, b: tf.Tensor, f: tf.Tensor, g: tf.Tensor) -> Any:
        c = a + half(b, f)
        d = b + half(c, g)

        def backward(dc: tf.Tensor, dd: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.GradientTape() as tape:
                tape.watch([c, g])
                moved = half(c, g)
            more, dg = tape.gradient(moved, [c, g], dd)
            b = d - moved
            da = dc + more
            with tf.GradientTape() as tape:
                tape.watch([b, f])
                moved = half(b, f)
            more, df = tape.gradient(moved, [b, f], da)
            return da, dd + more, df, dg

        return (c, d), backward

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            a, b = tf.split(conv(x, stem), 2, 3)
            for f, g in blocks:
                a, b = reversible(a, b, tf.convert_to_tensor(f), tf.convert_to_tensor(g))
            logits = tf.reduce_mean(tf.concat([a, b], 3), [1, 2]) @ head
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(24, 32, 32, 3), _labels(24)))


def _match(costs: Any) -> Any:
    """Assign each object to a query of its own, cheapest pairs first."""
    chosen = np.zeros(costs.shape[:2], np.int32)
    for image, pairs in enumerate(costs):
        pairs = pairs.copy()
        for _ in range(pairs.shape[0]):
            row, column = np.unravel_index(pairs.argmin(), pairs.shape)
            chosen[image, row] = column
            pairs[row], pairs[:, column] = np.inf, np.inf
    return chosen


def detr() -> Program:
    """Return queries that attend to an image; each decoder layer's are matched to the objects."""
    net = Weights(1)
    trunk = [net(3, 3, *c) for c in ((3, 48), (48, 96), (96, 128))]
    queries = net(1, 64, 128)
    layers = [[net(128, 128) for _ in range(4)] + [net(128, 512), net(512, 128)] for _ in range(4)]
    box, kind = net(128, 4), net(128, 11)

    def decode(h: tf.Tensor, image: tf.Tensor, layer: list[tf.Variable]) -> tf.Tensor:
        q, k, v, o, wide, narrow = layer
        scores = tf.nn.softmax((h @ q) @ tf.linalg.matrix_transpose(image @ k) / 128.0**0.5)
        h = normalized(h + (scores @ (image @ v)) @ o)
        return normalized(h + tf.nn.gelu(h @ wide) @ narrow)

    def matched(h: tf.Tensor, boxes: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        found, logits = tf.sigmoid(h @ box), h @ kind
        costs = tf.reduce_sum(abs(boxes[:, :, None] - found[:, None]), -1)
        named = tf.gather(tf.nn.softmax(logits), labels, axis=2, batch_dims=1)
        costs -= tf.linalg.matrix_transpose(named)
        chosen = tf.numpy_function(_match, [tf.stop_gradient(costs)], tf.int32)
        chosen.set_shape(labels.shape)
        near = tf.gather(found, chosen, batch_dims=1)
        named = tf.gather(logits, chosen, batch_dims=1)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, named)
        return tf.reduce_mean(abs(near - boxes)) + tf.reduce_mean(losses)

    def step(x: tf.Tensor, boxes: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight in trunk:
                x = tf.nn.relu(normalized(conv(x, weight, 2), (1, 2)))
            image = tf.reshape(x, [x.shape[0], -1, 128])
            h = tf.tile(queries, [x.shape[0], 1, 1])
            losses = []
            for layer in layers:
                h = decode(h, image, layer)
                losses.append(matched(h, boxes, labels))
            loss = tf.add_n(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    labels = tf.constant([[k % 10 for k in range(8)]] * 8)
    return Program(step, (draw(8, 96, 96, 3), tf.sigmoid(draw(8, 8, 4, seed=1)), labels))


def diffusion() -> Program:
    """Return a small denoising U-Net, with Adam by hand and an average of its weights."""
    net = Weights(1)
    embed = net(32, 32)
    down = [(net(3, 3, a, b), net(3, 3, b, b)) for a, b in ((3, 32), (32, 64), (64, 64))]
    up = [(net(3, 3, a, b), net(3, 3, b, b)) for a, b in ((128, 64), (96, 32))]
    last = net(3, 3, 32, 3)
    slots = [[tf.Variable(tf.zeros_like(w)) for w in net.all] for _ in range(2)]
    averages = [tf.Variable(w) for w in net.all]

    def block(x: tf.Tensor, weights: tuple[tf.Variable, tf.Variable], t: tf.Tensor) -> tf.Tensor:
        x = tf.nn.silu(normalized(conv(x, weights[0])))
        x += tf.repeat(t, x.shape[-1] // 32, 1)[:, None, None]
        return x + tf.nn.dropout(tf.nn.silu(normalized(conv(x, weights[1]))), 0.1)

    def denoise(x: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        waves = t[:, None] * tf.exp(-tf.range(16.0) / 2.0)
        t = tf.concat([tf.sin(waves), tf.cos(waves)], 1) @ embed
        skips: list[tf.Tensor] = []
        for weights in down:
            x = block(x if not skips else tf.nn.avg_pool2d(x, 2, 2, "SAME"), weights, t)
            skips.append(x)
        skips.pop()
        for weights in up:
            x = block(tf.concat([enlarged(x), skips.pop()], 3), weights, t)
        return conv(x, last)

    def step(images: tf.Tensor) -> tf.Tensor:
        t = tf.random.uniform([images.shape[0]])
        noise = tf.random.normal(images.shape)
        part = t[:, None, None, None]
        with tf.GradientTape() as tape:
            found = denoise(tf.sqrt(1.0 - part) * images + tf.sqrt(part) * noise, t)
            loss = tf.reduce_mean((found - noise) ** 2)
        grads = tape.gradient(loss, net.all)
        for w, g, m, v, average in zip(net.all, grads, *slots, averages, strict=True):
            m.assign(0.9 * m + 0.1 * g)
            v.assign(0.99 * v + 0.01 * g**2)
            w.assign_sub(1e-4 * m / (tf.sqrt(v) + 1e-8))
            average.assign(0.999 * average + 0.001 * w)
        return loss

    return Program(step, (tf.tanh(draw(16, 32, 32, 3)),))


def _encoder(net: Weights) -> Any:
    weights = [net(3, 3, *c) for c in ((3, 32), (32, 64), (64, 128))]
    project, head = net(128, 128), net(128, 64)

    def encode(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = tf.nn.relu(normalized(conv(x, weight, 2), (0, 1, 2)))
        h = tf.nn.relu(tf.reduce_mean(x, [1, 2]) @ project)
        return tf.math.l2_normalize(h @ head, 1)

    return encode


def contrastive() -> Program:
    """Return SimCLR, which tells the two random views of each image from all others."""
    net = Weights(1)
    encode = _encoder(net)

    def view(x: tf.Tensor) -> tf.Tensor:
        x = tf.image.random_flip_left_right(tf.image.random_crop(x, [x.shape[0], 28, 28, 3]))
        return x * tf.random.uniform([x.shape[0], 1, 1, 3], 0.6, 1.4)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = encode(tf.concat([view(x), view(x)], 0))
            scores = z @ tf.transpose(z) / 0.1 - 1e9 * tf.eye(z.shape[0])
            partners = tf.roll(tf.range(z.shape[0]), x.shape[0], 0)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(partners, scores)
            loss = tf.reduce_mean(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(128, 32, 32, 3),))


def triplets() -> Program:
    """Return a loss over all triplets of a batch: a tensor of batch³ elements."""
    net = Weights(1)
    encode = _encoder(net)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        same = labels[:, None] == labels[None]
        others = same & ~tf.eye(x.shape[0], dtype=tf.bool)
        valid = tf.cast(others[:, :, None] & ~same[:, None, :], tf.float32)
        with tf.GradientTape() as tape:
            z = encode(x)
            squares = tf.reduce_sum(z**2, 1)
            distances = squares[:, None] - 2.0 * z @ tf.transpose(z) + squares[None]
            distances = tf.sqrt(tf.maximum(distances, 1e-6))
            losses = tf.nn.relu(distances[:, :, None] - distances[:, None, :] + 0.2) * valid
            positive = tf.reduce_sum(tf.cast(losses > 1e-16, tf.float32))
            loss = tf.reduce_sum(losses) / (positive + 1e-16)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(144, 32, 32, 3), _labels(144)))
