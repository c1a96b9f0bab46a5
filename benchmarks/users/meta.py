"""Steps with several gradients: MAML, SAM, and accumulation by hand."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.users.base import Program, Weights, conv, descend, draw


def maml() -> Program:
    """Return a step of MAML: the gradient of three descent steps on each of four tasks."""
    net = Weights(1)
    for shape in ((1, 64), (64, 64), (64, 64), (64, 1)):
        net(*shape)

    def loss_of(weights: list[tf.Tensor], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        for weight in weights[:-1]:
            x = tf.nn.elu(x @ weight)
        return tf.reduce_mean((x @ weights[-1] - y) ** 2)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = []
            for task in range(4):
                weights = [tf.convert_to_tensor(w) for w in net.all]
                for _ in range(3):
                    with tf.GradientTape() as inner:
                        inner.watch(weights)
                        loss = loss_of(weights, x[task, :1024], y[task, :1024])
                    slopes = inner.gradient(loss, weights)
                    weights = [w - 0.01 * s for w, s in zip(weights, slopes, strict=True)]
                losses.append(loss_of(weights, x[task, 1024:], y[task, 1024:]))
            total = tf.add_n(losses)
        descend(net.all, tape.gradient(total, net.all))
        return total

    x = draw(4, 2048, 1)
    return Program(step, (x, tf.sin(3.0 * x)))


def _convolutional(seed: int) -> Weights:
    net = Weights(seed)
    for shape in ((3, 3, 3, 32), *[(3, 3, 32, 32)] * 5, (32, 10)):
        net(*shape)
    return net


def _loss(net: Weights, x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    for weight in net.all[:-1]:
        x = tf.nn.silu(conv(x, weight))
    logits = tf.reduce_mean(x, [1, 2]) @ net.all[-1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _labels(batch: int) -> tf.Tensor:
    return tf.constant([k % 10 for k in range(batch)])


def sam() -> Program:
    """Return sharpness-aware minimization: variables move up, and back before the update."""
    net = _convolutional(1)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = _loss(net, x, labels)
        grads = tape.gradient(loss, net.all)
        scale = 0.05 / (tf.linalg.global_norm(grads) + 1e-12)
        moves = [scale * grad for grad in grads]
        for variable, move in zip(net.all, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            sharp = _loss(net, x, labels)
        grads = tape.gradient(sharp, net.all)
        for variable, move in zip(net.all, moves, strict=True):
            variable.assign_sub(move)
        descend(net.all, grads)
        return loss

    return Program(step, (draw(16, 32, 32, 3), _labels(16)))


def accumulation() -> Program:
    """Return four microbatches, one after the other, whose gradients add up in variables."""
    net = _convolutional(1)
    sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in net.all]

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([])
        for part, wanted in zip(tf.split(x, 4), tf.split(labels, 4), strict=True):
            with tf.GradientTape() as tape:
                loss = _loss(net, part, wanted)
            for kept, grad in zip(sums, tape.gradient(loss, net.all), strict=True):
                kept.assign_add(grad / 4.0)
            total += loss
        descend(net.all, sums)
        for kept in sums:
            kept.assign(tf.zeros_like(kept))
        return total

    return Program(step, (draw(64, 32, 32, 3), _labels(64)))


def accumulation_loop() -> Program:
    """Return `accumulation` in a ``tf.while_loop``, whose body has the tape."""
    net = _convolutional(1)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        def add(k: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.GradientTape() as tape:
                loss = _loss(net, x[16 * k : 16 * k + 16], labels[16 * k : 16 * k + 16])
            grads = tape.gradient(loss, net.all)
            return k + 1, *(s + g / 4.0 for s, g in zip(sums, [*grads, loss], strict=True))

        start = (tf.constant(0), *map(tf.zeros_like, net.all), tf.zeros([]))
        shapes = tuple(tf.TensorShape(s.shape) for s in start)
        _, *sums, loss = tf.while_loop(lambda k, *_: k < 4, add, start, shapes)
        descend(net.all, sums)
        return loss

    return Program(step, (draw(64, 32, 32, 3), _labels(64)))
