"""The executor takes hardly more bytes than the schedules that it has to follow: ops that could run
early, or in parallel with others, wait where they would add to the peak."""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.networks import build
from memsaving_gradients.engine.driver import attempts

#: The largest peak of the executor, as a share of the schedule's; chunks are not counted.
MOST = 1.05


@pytest.fixture
def followed(monkeypatch) -> list[float]:
    """Return a list of the executor's peaks, as shares of the peaks of the schedules followed."""
    found: list[float] = []
    follow = attempts.follow

    def noted(site, outcome):
        result = follow(site, outcome)
        if not outcome.estimate:
            # Later estimates leave out a part of the bytes of the rest of the step.
            found.append(result.simulation.peak / outcome.proposal.peak)
        return result

    monkeypatch.setattr(attempts, "follow", noted)
    return found


def test_what_two_convolutions_may_be_merged_with_is_waited_for(followed):
    """If a block begins with a projection, its sum reads two convolutions."""
    network = build("cifar_resnet", blocks=2, batch=2, image=16, width=8)
    variables = list(network.variables)

    @tf.function(autograph=False)
    def step(*batch):
        loss = network.loss(*batch)
        grads = ms.gradients(loss, variables, budget=0.6)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(1e-6 * grad)
        return loss

    step.get_concrete_function(*map(tf.constant, network.batch))
    assert followed
    assert max(followed) <= MOST


def growing(rows: int, dense: int):
    """Return a step of Adam for layers whose weights grow as their images shrink, and its images.

    ``dense``: the number of layers of a thousand units at the end.
    """
    shapes = [(3, 3, min(8 * 2**k, 256), min(16 * 2**k, 256)) for k in range(7)]
    shapes += [(256, 1024), (1024, 1024)][:dense]
    weights = [
        tf.Variable(tf.random.stateless_normal(shape, [k, 0]) * 0.05)
        for k, shape in enumerate(shapes)
    ]
    means, squares = ([tf.Variable(tf.zeros_like(w)) for w in weights] for _ in range(2))

    @tf.function(autograph=False)
    def step(h):
        with tf.GradientTape() as tape:
            for k, w in enumerate(weights):
                if w.shape.rank == 4:
                    h = tf.nn.relu(tf.nn.conv2d(h, w, 2 if k % 2 else 1, "SAME"))
                    h = tf.tanh(h) * tf.sigmoid(h)
                else:
                    h = tf.nn.relu((h if h.shape.rank == 2 else tf.reduce_mean(h, [1, 2])) @ w)
            loss = tf.reduce_mean(h * h)
        grads = tape.gradient(loss, weights)
        for w, mean, square, grad in zip(weights, means, squares, grads, strict=True):
            mean.assign_add((grad - mean) * 0.1)
            square.assign_add((grad * grad - square) * 0.1)
            w.assign_sub(1e-3 * mean / (tf.sqrt(square) + 1e-7))
        return loss

    return step, tf.zeros([rows, 32, 32, 8])


@pytest.mark.parametrize(
    ("budget", "rows", "dense"), [(0.7, 4, 0), (0.7, 4, 1), (0.7, 4, 2), (0.6, 8, 0), (0.6, 8, 1)]
)
def test_large_gradients_are_used_one_by_one(followed, budget, rows, dense):
    """Gradients do not fill a schedule's room: many of them, or one and the next clones, would."""
    step, images = growing(rows, dense)
    with ms.patched(budget=budget):
        step.get_concrete_function(images)
    assert followed
    assert max(followed) <= MOST


def test_what_a_constant_meets_early_waits_for_the_gate():
    """Masks are kept. A clone multiplies by one; then its reader divides by a constant, which
    folding combines with the mask."""
    weights = [
        tf.Variable(tf.random.stateless_normal([128, 128], [k, 2]) * 0.125) for k in range(10)
    ]

    def loss(x):
        for k, weight in enumerate(weights):
            mask = tf.floor(0.8 + tf.random.uniform(tf.shape(x), seed=k))
            x = tf.nn.gelu(x @ weight) * mask / 0.8
        return tf.reduce_mean(x**2)

    @tf.function
    def step(x):
        return ms.gradients(loss(x), weights, budget=0.05)

    with pytest.raises(ms.errors.BudgetError) as caught:
        step.get_concrete_function(tf.zeros([512, 128]))
    # When the masks met the constants in the forward pass, this was plain training's need.
    assert caught.value.fraction < 0.6
