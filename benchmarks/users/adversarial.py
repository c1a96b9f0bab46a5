"""Adversarial networks: a gradient penalty, and CycleGAN."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.users.base import Program, Weights, conv, descend, draw, enlarged, normalized


def wgan_gp() -> Program:
    """Return a Wasserstein GAN with a penalty on the norm of the critic's gradient."""
    critic, generator = Weights(1), Weights(2)
    down = [critic(4, 4, *c) for c in ((3, 32), (32, 64), (64, 128))]
    score = critic(4 * 4 * 128, 1)
    seed = generator(64, 4 * 4 * 128)
    up = [generator(3, 3, *c) for c in ((128, 64), (64, 32), (32, 3))]

    def judge(x: tf.Tensor) -> tf.Tensor:
        for weight in down:
            x = tf.nn.leaky_relu(conv(x, weight, 2))
        return tf.reshape(x, [-1, 4 * 4 * 128]) @ score

    def generate(noise: tf.Tensor) -> tf.Tensor:
        x = tf.reshape(noise @ seed, [-1, 4, 4, 128])
        for weight in up:
            x = conv(enlarged(tf.nn.relu(normalized(x))), weight)
        return tf.tanh(x)

    def step(real: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        fake = generate(noise)
        with tf.GradientTape() as tape:
            mixed = real + tf.random.uniform([real.shape[0], 1, 1, 1]) * (fake - real)
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                mixed_score = judge(mixed)
            slopes = inner.gradient(mixed_score, mixed)
            size = tf.sqrt(tf.reduce_sum(slopes**2, [1, 2, 3]) + 1e-12)
            loss = tf.reduce_mean(judge(fake)) - tf.reduce_mean(judge(real))
            loss += 10.0 * tf.reduce_mean((size - 1.0) ** 2)
        descend(critic.all, tape.gradient(loss, critic.all))
        with tf.GradientTape() as tape:
            second = -tf.reduce_mean(judge(generate(noise)))
        descend(generator.all, tape.gradient(second, generator.all))
        return loss, second

    return Program(step, (tf.tanh(draw(48, 32, 32, 3)), draw(48, 64, seed=1)))


def cyclegan() -> Program:
    """Return two generators and two discriminators, differentiated by one persistent tape."""
    nets = [Weights(k) for k in range(4)]
    there, back, judge_a, judge_b = nets
    for net in (there, back):
        for shape in ((5, 5, 3, 24), *[(3, 3, 24, 24)] * 6, (5, 5, 24, 3)):
            net(*shape)
    for net in (judge_a, judge_b):
        for shape in ((4, 4, 3, 24), (4, 4, 24, 48), (4, 4, 48, 1)):
            net(*shape)

    def translate(net: Weights, x: tf.Tensor) -> tf.Tensor:
        first, *blocks, last = net.all
        x = conv(x, first)
        for a, b in zip(blocks[::2], blocks[1::2], strict=True):
            x += normalized(conv(tf.nn.relu(normalized(conv(x, a), (1, 2))), b), (1, 2))
        return tf.tanh(conv(tf.nn.relu(x), last))

    def judge(net: Weights, x: tf.Tensor) -> tf.Tensor:
        for weight in net.all:
            x = conv(tf.nn.leaky_relu(x), weight, 2)
        return x

    def step(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            fake_b, fake_a = translate(there, a), translate(back, b)
            cycled_a, cycled_b = translate(back, fake_b), translate(there, fake_a)
            cycle = tf.reduce_mean(abs(a - cycled_a)) + tf.reduce_mean(abs(b - cycled_b))
            judged_a, judged_b = judge(judge_a, fake_a), judge(judge_b, fake_b)
            losses = [
                tf.reduce_mean((judged_b - 1.0) ** 2)
                + 10.0 * cycle
                + tf.reduce_mean(abs(b - translate(there, b))),
                tf.reduce_mean((judged_a - 1.0) ** 2)
                + 10.0 * cycle
                + tf.reduce_mean(abs(a - translate(back, a))),
                tf.reduce_mean((judge(judge_a, a) - 1.0) ** 2) + tf.reduce_mean(judged_a**2),
                tf.reduce_mean((judge(judge_b, b) - 1.0) ** 2) + tf.reduce_mean(judged_b**2),
            ]
        grads = [tape.gradient(loss, net.all) for loss, net in zip(losses, nets, strict=True)]
        for net, found in zip(nets, grads, strict=True):
            descend(net.all, found)
        return losses

    return Program(step, (tf.tanh(draw(1, 64, 64, 3)), tf.tanh(draw(1, 64, 64, 3, seed=1))))
