"""Control edges and ops that TensorFlow merges later: no circle is closed, and kernels are fused as
in plain training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from graph_tools.memory.measure import in_fresh_process
from graph_tools.tf_private import graphs
from memsaving_gradients.engine.rewire import observing
from memsaving_gradients.rewriting.fusion import Merging
from tests.helpers.merged import circle, pairs
from tests.helpers.sampling import examples
from tests.helpers.schedules import forgetful, shuffled
from tests.helpers.support import assert_identical, numbers
from tests.rewriting.test_clones import Scheduled

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

_few = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

CHANNELS = 4


class Layers:
    """Layers of random networks, and their variables in order of creation; a name asked for twice
    means one variable."""

    def __init__(self) -> None:
        self.kept: dict[str, tf.Variable] = {}

    def restart(self) -> None:
        self.asked: dict[str, tf.Variable] = {}

    def variable(self, name: str, *shape: int) -> tf.Variable:
        key = f"{name} {shape}"
        if key not in self.kept:
            with tf.init_scope():
                self.kept[key] = tf.Variable(numbers(key, *shape, scale=0.4))
        self.asked[key] = self.kept[key]
        return self.kept[key]

    def conv(self, h, name, padding="SAME"):
        width = h.shape[-1]
        weights = self.variable(name + " filter", 3, 3, width, width)
        return tf.nn.conv2d(h, weights, 1, padding)

    def bias(self, h, name):
        bias = self.variable(name + " bias", h.shape[-1])
        # Keras gives a bias this form.
        return tf.nn.bias_add(h, tf.squeeze(tf.reshape(bias, [1, 1, 1, -1])))

    def convolved(self, h, name):
        return tf.nn.relu(self.bias(self.conv(h, name), name))

    def linear(self, h, name):
        return tf.tanh(self.bias(self.conv(h, name), name))

    def waved(self, h, name):
        """Return a layer with a bias computed from a variable: backward ops read its gradient."""
        bias = tf.sin(self.variable(name + " wave", h.shape[-1]))
        return tf.nn.elu(tf.nn.bias_add(self.conv(h, name), bias))

    def padded(self, h, name):
        h = tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]])
        return tf.nn.relu6(self.bias(self.conv(h, name, "VALID"), name))

    def tied(self, h, name):
        """Return a layer that shares its variables with all such layers: gradients are sums."""
        return self.waved(h, f"tied {h.shape[-1]}")

    def dense(self, h, name):
        width = h.shape[-1]
        flat = tf.reshape(h, [-1, width])
        weights = self.variable(name + " matrix", width, width)
        bias = self.variable(name + " bias", width)
        return tf.reshape(tf.nn.relu(tf.matmul(flat, weights) + bias), tf.shape(h))

    def swish(self, h, name):
        h = self.bias(self.conv(h, name), name)
        return h * tf.sigmoid(h)

    def gelu(self, h, name):
        return tf.nn.gelu(self.bias(self.conv(h, name), name))

    def batch_norm(self, h, name):
        scale, offset = (self.variable(f"{name} {k}", h.shape[-1]) for k in "gb")
        return tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(h, scale, offset)[0])

    def layer_norm(self, h, name):
        mean, variance = tf.nn.moments(h, [1, 2, 3], keepdims=True)
        scale = self.variable(name + " scale", h.shape[-1])
        return (h - mean) * tf.math.rsqrt(variance + 1e-3) * scale

    def residual(self, h, name):
        return h + self.linear(tf.nn.relu(h), name)

    def block(self, h, name):
        return self.linear(self.convolved(h, name + " 1"), name + " 2")

    def again(self, h, name):
        """Return a block whose gradient computes the block once more."""
        return self._again(h, name, self.block, self._of(h, name))

    def dense_again(self, h, name):
        """Return the same for a product, which is fused with its bias and its rectifier."""
        width = h.shape[-1]
        variables = [
            self.variable(name + " matrix", width, width),
            self.variable(name + " bias", width),
        ]
        return self._again(h, name, self.dense, variables)

    def _again(self, h, name, block, weights):
        @tf.custom_gradient
        def run(h, *read):
            def gradient(d, variables):
                with tf.GradientTape() as tape:
                    tape.watch(h)
                    y = block(h, name)
                grads = tape.gradient(y, [h, *weights], output_gradients=d)
                return grads, [None for _ in variables]

            return block(h, name), gradient

        # The variables get the gradients of the tensors passed here. TensorFlow adds the other
        # gradients of the variables to these.
        return run(h, *[tf.convert_to_tensor(v) for v in weights])

    def reversible(self, h, name):
        """Return two halves; the gradient recovers the inputs of the blocks from their outputs."""
        a, b = tf.split(h, 2, -1)
        first, second = name + " f", name + " g"
        weights_f, weights_g = self._of(b, first), self._of(a, second)

        @tf.custom_gradient
        def run(a, b, *_):
            y1 = a + self.block(b, first)
            y2 = b + self.block(y1, second)

            def gradient(d1, d2, variables):
                with tf.GradientTape() as tape:
                    tape.watch(y := tf.stop_gradient(y1))
                    g = self.block(y, second)
                x2 = tf.stop_gradient(y2) - g
                back_g = tape.gradient(g, [y, *weights_g], output_gradients=d2)
                d1 = d1 + back_g[0]
                with tf.GradientTape() as tape:
                    tape.watch(x2)
                    f = self.block(x2, first)
                back_f = tape.gradient(f, [x2, *weights_f], output_gradients=d1)
                grads = d1, d2 + back_f[0], *back_f[1:], *back_g[1:]
                return grads, [None for _ in variables]

            return (y1, y2), gradient

        weights = [tf.convert_to_tensor(v) for v in (*weights_f, *weights_g)]
        return tf.concat(run(a, b, *weights), -1)

    def _of(self, h, name) -> list[tf.Variable]:
        """Return the variables of `block` for inputs as wide as ``h``."""
        width = h.shape[-1]
        return [
            variable
            for part in (name + " 1", name + " 2")
            for variable in (
                self.variable(part + " filter", 3, 3, width, width),
                self.variable(part + " bias", width),
            )
        ]


KINDS = [
    name
    for name in vars(Layers)
    if not name.startswith("_") and name not in ("restart", "variable", "conv", "bias", "block")
]

_layers = Layers()
_images = numbers("images", 2, 6, 6, CHANNELS)


def late(seed: int, forget: float):
    """Return a schedule's maker: backward ops come in a random order, and random forward values are
    forgotten."""

    def make(step):
        merging = Merging(step)
        alone = {op for op in range(step.graph.first_backward) if merging.merges(op)}
        order = shuffled(step, seed)
        return forgetful(
            step.graph, seed, forget=forget, alone=alone, chained=bool(seed % 2), order=order
        )

    return make


def step_of(kinds, gradients):
    """Return a step of a network with these kinds of layers: its loss and gradients."""

    @tf.function(autograph=False)
    def step(h):
        _layers.restart()
        for k, kind in enumerate(kinds):
            h = getattr(_layers, kind)(h, f"{k} {kind}")
        loss = tf.reduce_sum(tf.square(h))
        return [loss, *gradients(loss, list(_layers.asked.values()))]

    return step.get_concrete_function(tf.constant(_images))


def ends(function) -> list[tf.Operation]:
    return [*(t.op for t in function.graph.outputs), *function.graph.control_outputs]


def differentiated(make):
    """Return a function for our gradients, with the schedules of ``make`` if it is given."""

    def gradients(loss, variables):
        if make is None:
            return ms.gradients(loss, variables)
        with Scheduled(make):
            return ms.gradients(loss, variables)

    return gradients


def compared(kinds, make, what: str) -> None:
    """Check that our gradients run, and that they are TensorFlow's."""
    ours, plain = step_of(kinds, differentiated(make)), step_of(kinds, tf.gradients)
    assert circle(ours.graph, ends(ours)) == []
    images = tf.constant(_images)
    if "batch_norm" not in kinds:
        assert_identical(ours(images), plain(images), what)
        return
    # oneDNN fuses a normalization with the rectifier if only this op reads its first result. A
    # clone made for other readers is not fused, and has other last bits.
    for found, expected in zip(ours(images), plain(images), strict=True):
        far = np.max(np.abs(found.numpy() - expected.numpy()))
        assert far <= 1e-4 * np.max(np.abs(expected.numpy())), what


@given(
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=6),
    st.integers(0, 1000),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
)
@_few
def test_merged_ops_close_no_circle(exact_arithmetic, kinds, seed, forget):
    """For every network and order of its backward ops, the step runs and has TensorFlow's bits."""
    compared(kinds, None if forget is None else late(seed, forget), f"{kinds}")


@pytest.mark.parametrize("kind", ["again", "dense_again", "reversible"])
def test_gradients_that_compute_layers_again(exact_arithmetic, kind):
    """These layers are in the backward pass, where gates hold back their ops one after the
    other."""
    compared([kind] * 3, None, kind)
    compared([kind] * 3, late(1, 0.3), kind)


@pytest.mark.slow
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_with_and_without_onednn(onednn):
    """Last bits may differ where grappler rewrites arithmetic, as it sees other sums."""
    found = in_fresh_process(
        "tests.rewriting.test_fusion:far", env={"TF_ENABLE_ONEDNN_OPTS": onednn}
    )
    assert found <= 1e-6


def far() -> float:
    """Return the largest distance of gradients of reversible blocks from TensorFlow's, relative to
    the largest number of each."""
    kinds = ["convolved", "reversible", "reversible", "padded", "dense_again", "again"]
    images = tf.constant(_images)
    expected = step_of(kinds, tf.gradients)(images)
    return max(
        float(tf.reduce_max(tf.abs(a - b)) / tf.reduce_max(tf.abs(b)))
        for make in (None, late(1, 0.3), late(2, 1.0))
        for a, b in zip(step_of(kinds, differentiated(make))(images), expected, strict=True)
    )


# --- The oracle


def held(tensor: tf.Tensor, trigger: tf.Tensor) -> tf.Tensor:
    return graphs.create_held(tensor, "held", [trigger.op], "")


def test_what_reads_an_equal_op_is_not_merged_with_it():
    # The gradient of swish recomputes the sigmoid, in an op that equals the forward one. Products
    # that read it are no part of the forward kernel, so gates may wait for them.
    weights = tf.Variable(tf.eye(8))
    steps = []

    @tf.function
    def step(h):
        return ms.gradients(tf.reduce_sum(tf.nn.silu(h @ weights) @ weights), [weights])

    with observing(lambda site: steps.append(site.capture())):
        step.get_concrete_function(tf.TensorSpec([4, 8]))
    (captured,) = steps
    merging, border = Merging(captured), captured.graph.first_backward
    sigmoids = [k for k, op in enumerate(captured.source.ops) if op.type == "Sigmoid"]
    assert len(sigmoids) == 2
    assert merging.until(sigmoids[0]) < border <= sigmoids[1]


def test_constants_meet_in_the_same_order(exact_arithmetic):
    """The gradient goes through three constants: no gate waits for the products between them."""
    x, weights = numbers("x", 16, 16), numbers("w", 16, 16)
    constants = [numbers(f"c{k}", 16, 16) for k in range(3)]

    def step(gradients):
        def traced(x):
            y = tf.matmul(tf.tanh(tf.nn.relu(tf.tanh(x))), weights)
            for constant in constants:
                y = y * constant
            return gradients(tf.reduce_sum(tf.tanh(y)), [x])

        return tf.function(traced, autograph=False)

    with Scheduled(lambda step: forgetful(step.graph, 0, forget=0.2)):
        found = step(ms.gradients)(x)
    assert_identical(found, step(tf.gradients)(x), "three constants")


def test_the_oracle_sees_what_waits_for_a_part_of_a_kernel():
    with tf.Graph().as_default() as graph:
        x, bias = tf.zeros([1, 4, 4, 2]), tf.zeros([2])
        conv = tf.nn.conv2d(x, tf.zeros([3, 3, 2, 2]), 1, "SAME")
        good = tf.nn.bias_add(conv, held(bias, x))
        assert pairs(graph, [good.op]) == [(conv.op, good.op)]
        assert circle(graph, [good.op]) == []
        bad = tf.nn.bias_add(conv, held(bias, conv))
        assert len(circle(graph, [bad.op])) == 2
        # With two readers, the convolution is not fused.
        assert circle(graph, [bad.op, good.op]) == []


def test_the_oracle_sees_what_waits_for_a_bias_gradient():
    with tf.Graph().as_default() as graph:
        x, d = tf.zeros([1, 4, 4, 2]), tf.zeros([1, 4, 4, 2])
        bias = tf.raw_ops.BiasAddGrad(out_backprop=d)
        read = held(x, tf.sin(bias))
        sizes = [3, 3, 2, 2]
        filters = [
            tf.raw_ops.Conv2DBackpropFilter(
                input=y, filter_sizes=sizes, out_backprop=d, strides=[1] * 4, padding="SAME"
            )
            for y in (x, read)
        ]
        assert circle(graph, [bias.op, filters[0].op]) == []
        assert circle(graph, [filters[1].op]) != []
