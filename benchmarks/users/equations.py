"""Networks and differential equations: physics as a loss, and an adaptive solver."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.users.base import Program, Weights, descend, draw


def pinn() -> Program:
    """Return a network for Burgers' equation; its loss has second derivatives of the network."""
    net = Weights(1)
    for shape in ((2, 64), *[(64, 64)] * 5, (64, 1)):
        net(*shape)

    def u(x: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        h = tf.concat([x, t], 1)
        for weight in net.all[:-1]:
            h = tf.tanh(h @ weight)
        return h @ net.all[-1]

    def step(x: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape(persistent=True) as first:
                    first.watch([x, t])
                    value = u(x, t)
                slope, speed = first.gradient(value, x), first.gradient(value, t)
            bend = second.gradient(slope, x)
            loss = tf.reduce_mean((speed + value * slope - 0.01 * bend) ** 2)
            loss += tf.reduce_mean((u(x, 0.0 * t) + tf.sin(3.0 * x)) ** 2)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(4096, 1), tf.abs(draw(4096, 1, seed=1))))


def ode() -> Program:
    """Return a neural ODE whose solver chooses its steps, and rejects steps with large errors."""
    net = Weights(1)
    first, second, head = net(64, 128), net(128, 64), net(64, 10)

    def slope(y: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.tanh(2.0 * y @ first) @ second) - 0.1 * y

    def advance(t: tf.Tensor, dt: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        dt = tf.minimum(dt, 4.0 - t)
        k1 = slope(y)
        k2 = slope(y + dt * k1)
        k3 = slope(y + 0.25 * dt * (k1 + k2))
        better = y + dt / 6.0 * (k1 + k2 + 4.0 * k3)
        error = tf.reduce_max(abs(dt / 3.0 * (k1 + k2 - 2.0 * k3)))
        accepted = error < 2e-2
        grow = tf.clip_by_value(0.9 * (2e-2 / (error + 1e-9)) ** (1 / 3), 0.3, 2.0)
        y = tf.where(accepted, better, y)
        return tf.where(accepted, t + dt, t), tf.stop_gradient(dt * grow), y

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            start = (tf.zeros([]), tf.constant(0.05), x)
            _, _, y = tf.while_loop(lambda t, dt, y: t < 4.0 - 1e-4, advance, start)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y @ head)
            loss = tf.reduce_mean(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    labels = tf.constant([k % 10 for k in range(512)])
    return Program(step, (draw(512, 64), labels))
