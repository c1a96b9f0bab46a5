"""Gradients of whole networks are TensorFlow's own, bit for bit, for any kept tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.sampling import one_of, slow
from tests.helpers.support import KINDS, MODES, Inputs, Net, assert_same_gradients, numbers

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
]

BATCH = 16
SHORT = ("memory", "speed", "list", None)


def dense(p, h, name, width, activation=None):
    h = tf.matmul(h, p.weight(f"{name}_w", h.shape[-1], width)) + p.weight(f"{name}_b", width)
    return h if activation is None else activation(h)


def conv(p, h, name, width, size=3, activation=tf.nn.relu):
    h = tf.nn.conv2d(h, p.weight(f"{name}_w", size, size, h.shape[-1], width), 1, "SAME")
    return activation(h + p.weight(f"{name}_b", width))


def norm(p, h, name):
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-5) * p.weight(f"{name}_g", h.shape[-1])


def rows(width=32):
    return {"x": numbers("x", BATCH, width)}


def images(side=8, depth=3):
    return {"x": numbers("images", 4, side, side, depth)}


def chain(p):
    h = p["x"]
    for i in range(12):
        h = tf.tanh(tf.matmul(h, p.weight(f"w{i}", 32, 32)))
        h = p.mark(h) if i in (3, 7) else h
    return Net(tf.reduce_sum(h))


def bare_chain(p):
    h = p["x"]
    for i in range(16):
        h = tf.tanh(h)
        h = p.mark(h) if i % 4 == 3 and i < 15 else h
    return Net(h)


def residual(p):
    h = p["x"]
    for i in range(6):
        h = p.mark(
            h + dense(p, dense(p, norm(p, h, f"n{i}"), f"a{i}", 64, tf.nn.gelu), f"b{i}", 32)
        )
    return Net(tf.reduce_mean(h**2))


def densenet(p):
    h = conv(p, p["x"], "stem", 8)
    for block in range(2):
        for i in range(4):
            h = tf.concat([h, conv(p, h, f"c{block}_{i}", 4)], -1)
        h = p.mark(conv(p, h, f"t{block}", 8, size=1))
        h = tf.nn.avg_pool2d(h, 2, 2, "SAME")
    return Net(tf.reduce_mean(tf.square(h)))


def unet(p):
    h, skips = p["x"], []
    for i in range(2):
        h = conv(p, conv(p, h, f"d{i}a", 8), f"d{i}b", 8)
        skips.append(h)
        h = p.mark(tf.nn.max_pool2d(h, 2, 2, "SAME"))
    h = conv(p, h, "bottom", 16)
    for i, skip in reversed(list(enumerate(skips))):
        shape = tf.shape(skip)
        up = tf.nn.conv2d_transpose(
            h, p.weight(f"u{i}", 2, 2, 8, h.shape[-1]), [shape[0], shape[1], shape[2], 8], 2, "SAME"
        )
        up.set_shape([None, skip.shape[1], skip.shape[2], 8])
        h = p.mark(conv(p, conv(p, tf.concat([skip, up], -1), f"u{i}a", 8), f"u{i}b", 8))
    return Net(tf.reduce_mean(tf.square(conv(p, h, "top", 1, 1, tf.sigmoid))))


def inception(p):
    h = conv(p, p["x"], "stem", 8)
    for i in range(3):
        h = tf.concat(
            [
                conv(p, h, f"i{i}a", 4, 1),
                conv(p, conv(p, h, f"i{i}b", 4, 1), f"i{i}c", 4, 3),
                conv(p, conv(p, h, f"i{i}d", 2, 1), f"i{i}e", 4, 5, tf.nn.elu),
                conv(p, tf.nn.max_pool2d(h, 3, 1, "SAME"), f"i{i}f", 4, 1),
            ],
            -1,
        )
        h = p.mark(h)
    return Net(tf.reduce_mean(tf.reduce_max(h, [1, 2])))


def vgg(p):
    h = p["x"]
    for i, width in enumerate((8, 8, 16)):
        h = conv(p, conv(p, h, f"v{i}a", width), f"v{i}b", width)
        h = p.mark(tf.nn.max_pool2d(h, 2, 2, "SAME"))
    h = tf.reshape(h, [-1, 16])
    h = dense(p, dense(p, h, "f1", 32, tf.nn.relu), "f2", 10)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant([1, 2, 3, 4]), h)
    return Net(tf.reduce_mean(loss))


HEADS, WIDTH, LENGTH, VOCABULARY = 2, 16, 6, 20


def attention(p, h, name, mask):
    q, k, v = (
        tf.transpose(
            tf.reshape(dense3(p, h, f"{name}{part}", WIDTH), [-1, LENGTH, HEADS, WIDTH // HEADS]),
            [0, 2, 1, 3],
        )
        for part in "qkv"
    )
    scores = tf.matmul(q, k, transpose_b=True) * (WIDTH // HEADS) ** -0.5
    if mask is not None:
        scores += mask
    mixed = tf.matmul(tf.nn.softmax(scores), v)
    mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, LENGTH, WIDTH])
    return dense3(p, mixed, f"{name}o", WIDTH)


def dense3(p, h, name, width):
    w = p.weight(f"{name}_w", h.shape[-1], width)
    return tf.tensordot(h, w, 1) + p.weight(f"{name}_b", width)


def transformer(p, *, blocks=3, mask=False, tied=False, dropout=False, decay=False, aside=False):
    table = p.weight("table", VOCABULARY, WIDTH)
    h = tf.gather(table, p["ids"]) + p.weight("positions", LENGTH, WIDTH)
    bias = None
    if mask:
        seen = tf.linalg.band_part(tf.ones([LENGTH, LENGTH]), -1, 0)
        real = tf.cast(tf.not_equal(p["ids"], 0), tf.float32)[:, None, None, :]
        bias = -1e9 * (1.0 - seen * real)
    for i in range(blocks):
        a = attention(p, norm(p, h, f"n{i}a"), f"l{i}", bias)
        h = h + (tf.nn.dropout(a, 0.2, seed=10 + i) if dropout else a)
        f = dense3(p, tf.nn.gelu(dense3(p, norm(p, h, f"n{i}b"), f"m{i}a", 32)), f"m{i}b", WIDTH)
        h = p.mark(h + (tf.nn.dropout(f, 0.2) if dropout else f))
    if tied:
        logits = tf.matmul(tf.reshape(h, [-1, WIDTH]), table, transpose_b=True)
    else:
        logits = tf.reshape(dense3(p, h, "head", VOCABULARY), [-1, VOCABULARY])
    labels = tf.reshape(p["labels"], [-1])
    if aside:
        # The op has a second output; no gradient depends on the probabilities and the accuracy.
        loss = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, VOCABULARY), logits)
        right = tf.equal(tf.argmax(tf.nn.softmax(logits), -1), labels)
        tf.reduce_mean(tf.cast(right, tf.float32), name="accuracy")
    else:
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    loss = tf.reduce_mean(loss)
    if decay:
        loss += 1e-2 * tf.add_n([tf.reduce_sum(tf.square(w)) for w in p.weights.values()])
    return Net(loss)


def tokens():
    draw = np.random.default_rng(3)
    return {
        "ids": draw.integers(0, VOCABULARY, (4, LENGTH)),
        "labels": draw.integers(0, VOCABULARY, (4, LENGTH)),
    }


def lstm(p, steps=16):
    h = c = tf.zeros([BATCH, 16])
    w, b = p.weight("w", 24, 64), p.weight("b", 64)
    for t in range(steps):
        z = tf.matmul(tf.concat([p["sequence"][:, t], h], 1), w) + b
        i, j, f, o = tf.split(z, 4, 1)
        c = c * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(j)
        h = tf.tanh(c) * tf.sigmoid(o)
        if t % 6 == 5 and t < steps - 1:
            h = p.mark(h)
    return Net(tf.reduce_mean(tf.square(h)))


def gan(p):
    def generator(z):
        for i in range(4):
            z = dense(p, z, f"g{i}", 32, tf.nn.leaky_relu)
        return p.mark(dense(p, z, "gx", 16, tf.tanh))

    def discriminator(h):
        for i in range(4):
            h = dense(p, h, f"d{i}", 32, tf.nn.leaky_relu)
            h = p.mark(h) if i == 1 else h
        return dense(p, h, "dy", 1)

    fake = generator(p["z"])
    on_fake, on_real = discriminator(fake), discriminator(p["real"])
    cross = tf.nn.sigmoid_cross_entropy_with_logits
    of_d = tf.reduce_mean(cross(tf.ones_like(on_real), on_real)) + tf.reduce_mean(
        cross(tf.zeros_like(on_fake), on_fake)
    )
    of_g = tf.reduce_mean(cross(tf.ones_like(on_fake), on_fake))
    by_name = p.weights
    return [
        Net(of_d, [w for n, w in by_name.items() if n.startswith("d")]),
        Net(of_g, [w for n, w in by_name.items() if n.startswith("g")]),
    ]


# Marks are at the joints of each network. Listed are the modes that must recompute something.
NETWORKS = {
    "chain": (chain, rows, (None, "memory", "list", "collection")),
    "bare_chain": (bare_chain, rows, (None, "memory", "list", "collection")),
    "residual": (residual, rows, ("memory", "speed", "list", "collection")),
    "densenet": (densenet, images, ("memory", "speed", "list", "collection")),
    "unet": (unet, images, ("list", "collection")),
    "inception": (inception, images, ("list", "collection")),
    "vgg": (vgg, images, ("list", "collection")),
}


@pytest.mark.parametrize(
    "name", ["chain", "bare_chain", "residual", "densenet", "unet", *slow("inception", "vgg")]
)
def test_network(name):
    build, data, recomputed = NETWORKS[name]
    full = name in ("chain", "residual")
    assert_same_gradients(
        build,
        Inputs(data()),
        modes=one_of(MODES if full else SHORT),
        kinds=one_of(KINDS),
        recomputed=set(recomputed) & set(SHORT),
    )


@pytest.mark.parametrize("activation", [tf.tanh, *slow(tf.sigmoid, tf.nn.elu)])
def test_remapping_treats_a_clone_as_it_treats_its_original(activation):
    # Grappler fuses MatMul, Add and activation into one op with other bits. In the plain graph it
    # fuses all of them, here it does not.
    def build(p):
        h = p["x"]
        for i in range(4):
            h = dense(p, h, f"d{i}", 32, activation)
        return Net(tf.reduce_mean(tf.square(h)))

    assert_same_gradients(build, Inputs(rows()), modes=("memory",), kinds=("session",))


@pytest.mark.parametrize("name", ["residual", *slow("unet", "densenet")])
def test_network_with_an_unknown_batch_dimension(name):
    build, data, _ = NETWORKS[name]
    assert_same_gradients(
        build,
        Inputs(data(), dynamic=True),
        modes=one_of(("memory", "list")),
        kinds=one_of(("session", "function")),
        recomputed=("list",),
    )


TRANSFORMERS = {
    "plain": {},
    "mask": {"mask": True},
    "tied": {"tied": True},
    "dropout": {"dropout": True},
    "decay": {"decay": True, "aside": True},
    "everything": {"mask": True, "tied": True, "dropout": True, "decay": True, "aside": True},
}


@pytest.mark.parametrize("name", ["everything", *slow("plain", "mask", "tied", "dropout", "decay")])
def test_transformer(name):
    flags = TRANSFORMERS[name]
    kinds = {"plain": ["session"], "everything": one_of(("session", "tape"))}
    assert_same_gradients(
        lambda p: transformer(p, **flags),
        Inputs(tokens()),
        modes=one_of(("memory", "speed", "list", None) if name == "plain" else ("memory", "list")),
        kinds=kinds.get(name, ["function"]),
        recomputed=("memory", "list"),
    )


def test_transformer_with_an_unknown_batch_dimension():
    assert_same_gradients(
        lambda p: transformer(p, blocks=2, mask=True, dropout=True),
        Inputs(tokens(), dynamic=True),
        modes=("memory",),
        kinds=("session",),
        recomputed=("memory",),
    )


def test_unrolled_lstm():
    inputs = Inputs({"sequence": numbers("sequence", BATCH, 16, 8)})
    assert_same_gradients(
        lstm,
        inputs,
        modes=one_of(("memory", "speed", "list")),
        kinds=("session",),
        recomputed=("memory", "list"),
    )
    assert_same_gradients(
        lambda p: lstm(p, 12),
        inputs,
        modes=one_of(("memory", None)),
        kinds=one_of(KINDS),
        recomputed=("memory",),
    )


@pytest.mark.parametrize("use_resource", [True, *slow(False)])
@pytest.mark.parametrize("addends", [3, 9, 10, 17, 26, *slow(8, 11, 15, 16, 18, 19, 21, 25)])
def test_sum_of_a_shared_weight_becomes_a_chain_with_the_same_bits(addends, use_resource):
    def build(p):
        h, w = p["x"], p.weight("w", 32, 32)
        for _ in range(addends):
            h = tf.tanh(tf.matmul(h, w))
        return Net(tf.reduce_sum(h), [w])

    chained = []

    def looking(p):
        chained.append(tf.compat.v1.get_default_graph())
        return build(p)

    assert_same_gradients(
        looking,
        Inputs({"x": numbers("x", 8, 32)}, use_resource=use_resource),
        modes=("memory",),
        kinds=("session",),
    )
    additions = [op for op in chained[1].get_operations() if op.name.startswith("accumulate")]
    assert len(additions) == addends - 1


def test_gan_with_two_losses_and_two_gradient_calls():
    data = {"z": numbers("z", BATCH, 8), "real": numbers("real", BATCH, 16)}
    # A list would have to fit both calls; "collection" alone leaves out marks that are not between
    # xs and ys.
    modes = ["collection", *one_of(("auto", "memory", "speed", None))]
    kinds = one_of(KINDS)
    assert_same_gradients(gan, Inputs(data), modes=modes, kinds=kinds, recomputed=("collection",))
