"""Sequences and sets: speech, world models, waves, graphs, experts."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.users.base import Program, Weights, descend, draw, normalized


def ctc() -> Program:
    """Return a speech recognizer: two bidirectional GRUs of Keras, and the CTC loss."""
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.Sequential(
        [
            keras.Input([96, 40]),
            keras.layers.Bidirectional(keras.layers.GRU(96, return_sequences=True)),
            keras.layers.Bidirectional(keras.layers.GRU(96, return_sequences=True)),
            keras.layers.Dense(29),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(layers.trainable_variables)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        rows = tf.ones_like(labels[:, 0])
        with tf.GradientTape() as tape:
            logits = layers(x, training=True)
            losses = tf.nn.ctc_loss(
                labels, logits, 12 * rows, 96 * rows, logits_time_major=False, blank_index=-1
            )
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, layers.trainable_variables)
        optimizer.apply_gradients(zip(grads, layers.trainable_variables, strict=True))
        return loss

    labels = tf.constant([[(3 * k + i) % 28 for k in range(12)] for i in range(32)])
    return Program(step, (draw(32, 96, 40), labels))


def dreamer() -> Program:
    """Return a world model by ``tf.scan``, and an actor trained on states that it predicts."""
    world, actor = Weights(1), Weights(2)
    encode, gates, fresh = world(64, 128), world(320, 256), world(320, 128)
    prior, posterior, decode, reward = (
        world(128, 128),
        world(256, 128),
        world(192, 64),
        world(192, 1),
    )
    first, second = actor(192, 128), actor(128, 64)

    def move(h: tf.Tensor, z: tf.Tensor, action: tf.Tensor) -> tf.Tensor:
        inputs = tf.concat([h, z, action, z], 1)
        update, reset = tf.split(tf.sigmoid(inputs @ gates), 2, 1)
        new = tf.tanh(tf.concat([reset * h, z, action, z], 1) @ fresh)
        return update * h + (1.0 - update) * new

    def sample(parameters: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        mean, raw = tf.split(parameters, 2, 1)
        deviation = tf.nn.softplus(raw) + 0.1
        return mean + deviation * tf.random.normal(tf.shape(mean)), mean, deviation

    def observe(state: tuple[tf.Tensor, ...], now: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        h = move(state[0], state[1], now[1])
        _, mean, deviation = sample(h @ prior)
        z, seen, spread = sample(tf.concat([h, now[0]], 1) @ posterior)
        divergence = tf.math.log(deviation / spread) - 0.5
        divergence += (spread**2 + (seen - mean) ** 2) / (2.0 * deviation**2)
        return h, z, tf.reduce_sum(divergence, 1)

    def act(h: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.nn.elu(tf.concat([h, z], 1) @ first) @ second)

    def step(x: tf.Tensor, actions: tf.Tensor, rewards: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start = (tf.zeros([64, 128]), tf.zeros([64, 64]), tf.zeros([64]))
        with tf.GradientTape() as tape:
            # Parallel iterations draw random numbers in any order, even under op determinism.
            inputs = tf.nn.elu(x @ encode), actions
            h, z, divergence = tf.scan(observe, inputs, start, parallel_iterations=1)
            both = tf.concat([h, z], 2)
            loss = tf.reduce_mean((both @ decode - x) ** 2) + tf.reduce_mean(divergence)
            loss += tf.reduce_mean((both @ reward - rewards) ** 2)
        descend(world.all, tape.gradient(loss, world.all))
        with tf.GradientTape() as tape:
            now = tf.reshape(h, [-1, 128]), tf.reshape(z, [-1, 64])
            earned = []
            for _ in range(8):
                h = move(*now, act(*now))
                now = h, sample(h @ prior)[0]
                earned.append(tf.squeeze(tf.concat(now, 1) @ reward, 1))
            values = tf.stack(earned)
            returns = tf.scan(lambda a, r: r + 0.95 * a, values, reverse=True)
            second = -tf.reduce_mean(returns)
        descend(actor.all, tape.gradient(second, actor.all))
        return loss, second

    return Program(step, (draw(24, 64, 64), draw(24, 64, 64, seed=1), draw(24, 64, 1, seed=2)))


def wavenet() -> Program:
    """Return dilated causal convolutions with gates, whose skip connections are summed."""
    net = Weights(1)
    stem, head, last = net(2, 1, 32), net(1, 32, 64), net(1, 64, 64)
    layers = [(2**k, net(2, 32, 64), net(1, 32, 64)) for k in range(9)]

    def causal(x: tf.Tensor, weight: tf.Variable, dilation: int) -> tf.Tensor:
        x = tf.pad(x, [[0, 0], [dilation, 0], [0, 0]])
        return tf.nn.conv1d(x, weight, 1, "VALID", dilations=dilation)

    def step(wave: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            x, skips = causal(wave[:, :-1], stem, 1), []
            for dilation, weight, mix in layers:
                a, b = tf.split(causal(x, weight, dilation), 2, 2)
                more, skip = tf.split(
                    tf.nn.conv1d(tf.tanh(a) * tf.sigmoid(b), mix, 1, "SAME"), 2, 2
                )
                x += more
                skips.append(skip)
            h = tf.nn.relu(tf.nn.conv1d(tf.nn.relu(tf.add_n(skips)), head, 1, "SAME"))
            logits = tf.nn.conv1d(h, last, 1, "SAME")
            levels = tf.cast(tf.clip_by_value(wave[:, 1:, 0] * 16.0 + 32.0, 0.0, 63.0), tf.int32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(levels, logits)
            loss = tf.reduce_mean(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(4, 2049, 1),))


def graph_network() -> Program:
    """Return a network that sends messages along the edges of a graph, and sums them by node."""
    net = Weights(1)
    layers = [(net(128, 64), net(64, 64), net(128, 64)) for _ in range(5)]
    head = net(64, 8)

    def step(nodes: tf.Tensor, senders: tf.Tensor, receivers: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = nodes
            for first, second, update in layers:
                ends = tf.concat([tf.gather(h, senders), tf.gather(h, receivers)], 1)
                messages = tf.nn.relu(ends @ first) @ second
                summed = tf.math.unsorted_segment_sum(messages, receivers, h.shape[0])
                h = normalized(h + tf.nn.relu(tf.concat([h, summed], 1) @ update))
            loss = tf.reduce_mean(tf.nn.log_softmax(h @ head)[:, 0] ** 2)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    ends = tf.random.stateless_uniform([2, 8000], [0, 1], 0, 1000, tf.int32)
    return Program(step, (draw(1000, 64), ends[0], ends[1]))


def experts() -> Program:
    """Return a switch Transformer's layers: each token goes to the expert that a gate chooses."""
    net = Weights(1)
    layers = [
        (net(64, 4), [(net(64, 256), net(256, 64)) for _ in range(4)], net(64, 64))
        for _ in range(4)
    ]
    head = net(64, 32)

    def switch(x: tf.Tensor, gate: tf.Variable, pairs: list[tuple[tf.Variable, ...]]) -> tf.Tensor:
        shares = tf.nn.softmax(x @ gate)
        chosen = tf.argmax(shares, 1, tf.int32)
        parts = tf.dynamic_partition(x, chosen, 4)
        places = tf.dynamic_partition(tf.range(x.shape[0]), chosen, 4)
        done = [tf.nn.gelu(p @ a) @ b for p, (a, b) in zip(parts, pairs, strict=True)]
        y = tf.ensure_shape(tf.dynamic_stitch(places, done), x.shape)
        return y * tf.reduce_max(shares, 1, keepdims=True)

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for gate, pairs, mix in layers:
                x = normalized(x + tf.nn.relu(x @ mix))
                x = normalized(x + switch(x, gate, pairs))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ head)
            loss = tf.reduce_mean(losses)
        descend(net.all, tape.gradient(loss, net.all))
        return loss

    return Program(step, (draw(4096, 64), tf.range(4096) % 32))
