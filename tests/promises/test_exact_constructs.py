"""Gradients are TensorFlow's own for everything a graph may contain and every argument of
``tf.gradients``."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import covering, one_of, slow
from tests.helpers.support import (
    SHORT,
    Inputs,
    Net,
    assert_identical,
    assert_same,
    assert_same_gradients,
    data,
    layers,
    numbers,
    session_config,
    tall,
    v1,
)

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
]


def sandwich(between, *, every=True):
    """Return a builder of a chain with ``between`` after each layer, and a mark in the middle."""

    def build(p):
        h = p.mark(layers(p, p["x"], 0, 3, between))
        return Net(tf.reduce_sum(layers(p, h, 3, 6, between if every else None)))

    return build


def ran(step, gradients, *inputs):
    """Return the results of ``step(gradients, *inputs)`` in a function, and the plans."""
    function = tf.function(lambda *inputs: step(gradients, *inputs), autograph=False)
    found = function(*inputs)
    return [t.numpy() for t in tf.nest.flatten(found)], ms.plans(function)


def compared(step, *inputs, **options):
    """Check that a step gives the same bits with ``ms.gradients`` and ``options`` as with
    ``tf.gradients``; return the plans."""
    found, plans = ran(step, functools.partial(ms.gradients, **options), *inputs)
    expected, _ = ran(step, tf.gradients, *inputs)
    assert_identical(found, expected, f"{options}")
    return plans


@tf.custom_gradient
def clipped(h):
    return tf.exp(-tf.square(h)), lambda dy: tf.clip_by_value(-2.0 * h * dy, -0.1, 0.1)


def split(_, h):
    a, b, c = tf.split(h, [8, 8, 16], 1)
    return tf.concat([b * tf.sin(a), a, c], 1)


def unstacked(_, h):
    parts = tf.unstack(tf.reshape(h, [-1, 4, 8]), axis=1)
    return tf.concat([parts[2], tf.sin(parts[0]) * parts[3], parts[1], parts[0]], 1)


def top(_, h):
    values, places = tf.math.top_k(h, 16)
    return tf.concat([values, tf.sin(values) + tf.cast(places, tf.float32) * 0.01], 1)


def branched(_, h):
    return tf.cond(tf.reduce_sum(h) > 0, lambda: tf.sin(h), lambda: tf.cos(h) * 2.0)


def looped(_, h):
    return tf.while_loop(lambda i, _: i < 3, lambda i, g: (i + 1, tf.sin(g)), (0, h))[1]


@tf.function(autograph=False)
def inner(h):
    return tf.sin(h) * tf.cos(h)


def recomputing(_, h):
    return tf.recompute_grad(lambda g: tf.sin(tf.tanh(g)))(h)


def batch_norm(_, h):
    out, *_ = v1.nn.fused_batch_norm(
        h[:, None, None, :], tf.ones([32]), tf.zeros([32]), is_training=True
    )
    return tf.reshape(out, tf.shape(h))


BETWEEN = {
    "dropout with seeds": lambda i, h: tf.nn.dropout(h, 0.3, seed=i),
    "dropout without": lambda i, h: tf.nn.dropout(h, 0.3),
    "stateless dropout": lambda i, h: tf.nn.experimental.stateless_dropout(h, 0.3, seed=[i, 2]),
    "stateless normal": lambda i, h: h * tf.random.stateless_normal(tf.shape(h), [i, 3]),
    "custom_gradient": lambda i, h: clipped(h),
    "split": split,
    "unstack": unstacked,
    "top_k": top,
    "cond": branched,
    "while_loop": looped,
    "tf.function": lambda i, h: inner(h),
    "recompute_grad": recomputing,
    "fused_batch_norm": batch_norm,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_in_the_middle_of_a_chain(name):
    kinds = ("session", "function", "tape") if "recompute" not in name else ("function", "tape")
    assert_same_gradients(sandwich(BETWEEN[name]), data(), modes=one_of(SHORT), kinds=one_of(kinds))


def test_stateful_dropout_draws_the_same_masks_for_three_steps():
    def program(p, gradients):
        net = sandwich(lambda i, h: tf.nn.dropout(h, 0.3))(p)
        return [net.ys, gradients(net.ys, p.all)]

    assert_same(program, data(), modes=SHORT, steps=3)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_gather_gives_indexed_slices(dtype):
    ids = np.array([[1, 4, 1, 0], [3, 3, 2, 9]] * 2, dtype)

    def program(p, gradients):
        table = p.weight("table", 10, 32)
        read = table if isinstance(table, tf.Tensor) else tf.convert_to_tensor(table)
        h = tf.reshape(tf.gather(read, p["ids"]), [-1, 32])
        h = p.mark(layers(p, h, 0, 3))
        loss = tf.reduce_sum(layers(p, h, 3, 6))
        grads = gradients(loss, [table, read, *p.all])
        assert isinstance(grads[0], tf.IndexedSlices)
        assert isinstance(grads[1], tf.IndexedSlices)
        return [loss, grads]

    assert_same(program, Inputs({"ids": ids}), modes=SHORT)


def test_checkpoint_at_an_output_that_is_not_the_first():
    def build(p):
        h = layers(p, p["x"], 0, 3)
        parts = tf.split(h, 2, 1)
        p.marks.append(parts[1])
        h = tf.concat([tf.sin(parts[0]), parts[1] * tf.cos(parts[0])], 1)
        return Net(tf.reduce_sum(layers(p, h, 3, 6)))

    found = assert_same_gradients(
        build,
        data(),
        modes=("list", "collection"),
        kinds=("session", "function"),
        recomputed=("list",),
    )
    plans = [plan for case, outcome in found.items() if case[1] == "list" for plan in outcome.plans]
    assert any(":1" in name for plan in plans for name in plan.checkpoints)


ARGUMENTS = {
    "grad_ys": lambda p, h, y: Net(y, None, {"grad_ys": tf.cos(y)}),
    "grad_ys in a list": lambda p, h, y: Net([y], None, {"grad_ys": [tf.ones_like(y) * 3.0]}),
    "stop at an x": lambda p, h, y: Net(y, None, {"stop_gradients": [p["x"]]}),
    "stop in the middle": lambda p, h, y: Net(y, None, {"stop_gradients": [h]}),
    "stop at the first layer": lambda p, h, y: Net(y, [h, p["x"]], {"stop_gradients": h}),
    "several ys": lambda p, h, y: Net([y, tf.reduce_sum(tf.sin(y)), tf.square(y)]),
    "y in the middle": lambda p, h, y: Net([y, tf.sin(h)]),
    "x in the middle": lambda p, h, y: Net(y, [h, p["x"], *p.weights.values()]),
    "xs in a tuple": lambda p, h, y: Net(y, (p["x"], p.weights["w0"])),
    "a single x": lambda p, h, y: Net(y, p["x"]),
    "a single variable": lambda p, h, y: Net(y, p.weights["w1"]),
    "x twice": lambda p, h, y: Net(y, [p["x"], p["x"]]),
    "y is x": lambda p, h, y: Net(y, [y, p["x"]]),
    "unconnected none": lambda p, h, y: Net(
        y, [p["x"], p["other"]], {"unconnected_gradients": tf.UnconnectedGradients.NONE}
    ),
    "unconnected zero": lambda p, h, y: Net(
        y, [p["x"], p["other"]], {"unconnected_gradients": tf.UnconnectedGradients.ZERO}
    ),
    "stop_gradient op": lambda p, h, y: Net(y * tf.stop_gradient(tf.sin(y)) + h),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument(name):
    def build(p):
        return ARGUMENTS[name](p, *tall(p))

    taped = "stop" not in name or name == "stop_gradient op"
    kinds = ("session", "function", "tape") if taped else ("session", "function")
    inputs = data(other=numbers("other", 3))
    assert_same_gradients(build, inputs, modes=one_of(SHORT), kinds=one_of(kinds))


def test_unconnected_gradients_are_none():
    def program(p, gradients):
        grads = gradients(tall(p)[1], [p["x"], p["other"]])
        assert grads[1] is None
        return grads

    assert_same(program, data(other=numbers("other", 3)), modes=SHORT)


def test_every_other_argument_of_v1_gradients():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8, 32])
        y = x
        for _ in range(12):
            y = tf.tanh(y)
        more = {
            "name": "mine",
            "colocate_gradients_with_ops": True,
            "gate_gradients": True,
            "aggregation_method": tf.AggregationMethod.EXPERIMENTAL_TREE,
        }
        ours = ms.gradients(y, x, checkpoints="memory", **more)
        plain = v1.gradients(y, x, **more)
        with v1.Session() as session:
            assert_identical(*session.run([ours, plain], {x: numbers("x", 8, 32)}), "arguments")


def test_two_gradient_calls_in_one_graph():
    def program(p, gradients):
        h, y = tall(p)
        first = gradients(y, p.all)
        second = gradients(tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(h**2), p.all)
        return [first, second]

    assert_same(program, data(), modes=SHORT)


# --- Recomputation really happens


@pytest.mark.parametrize("mode", ["memory", "list", None])
def test_clones_survive_grappler(mode):
    found = assert_same_gradients(sandwich(None), data(), modes=(mode,), kinds=("session",))
    ours = found["session", mode]
    kinds = ("Tanh", "MatMul")
    made = [n for n in ours.clones if n.split("/")[-1].startswith(kinds)]
    left = [n for n in ours.surviving if n.split("/")[-1].startswith(kinds)]
    assert len(made) >= 4
    assert sorted(made) == sorted(left)
    assert found["session", "plain"].surviving == []


def test_clones_survive_grappler_with_a_sum_of_everything():
    def program(p, gradients):
        _, y = tall(p)
        return [tf.add_n([tf.reduce_sum(g) for g in gradients(y, p.all)])]

    found = assert_same(program, data(), modes=("memory",), kinds=("session",))
    ours = found["session", "memory"]
    assert ours.clones and len(ours.surviving) >= 0.9 * len(ours.clones)


# --- TF1

OPTIMIZERS = {
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}


@pytest.mark.parametrize(("use_resource", "optimizer"), covering([False, True], [*OPTIMIZERS]))
def test_v1_minimize(optimizer, use_resource):
    def train(mode):
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(7)
            p = Inputs({"x": numbers("x", 16, 32)}, use_resource=use_resource)
            p.restart({"x": v1.placeholder(tf.float32, [None, 32])})
            loss = tf.reduce_mean(tf.square(tall(p)[1] - 0.5))
            if mode == "plain":
                step = OPTIMIZERS[optimizer]().minimize(loss)
            else:
                with ms.patched(checkpoints=mode):
                    step = OPTIMIZERS[optimizer]().minimize(loss)
            values = []
            with v1.Session(config=session_config()) as session:
                session.run(v1.global_variables_initializer())
                for _ in range(5):
                    values.append(session.run([loss, step], {p["x"]: p.arrays["x"]})[0])
                weights = session.run(v1.global_variables())
        return [values, weights], ms.plans(graph)

    plain, _ = train("plain")
    for mode in one_of(("memory", None)):
        ours, plans = train(mode)
        assert plans and plans[-1].clones
        assert_identical(ours, plain, f"{optimizer}, {mode!r}")


@pytest.mark.parametrize("mode", ["memory", "list", None])
def test_every_gate_waits_for_something_computed_from_the_data(mode):
    # Gradients begin with ones of a known shape: a gate that waits only for these is open from the
    # start.
    with tf.Graph().as_default() as graph:
        p = data()
        p.restart({"x": v1.placeholder(tf.float32, [16, 32])})
        loss = sandwich(None)(p).ys
        ms.gradients(loss, p.all, checkpoints=list(p.marks) if mode == "list" else mode)
        fed = {p["x"].op}
        gates = [op for op in graph.get_operations() if op.type == "NoOp" and "_gate" in op.name]
        assert gates
        for gate in gates:
            above, stack = set(), [gate]
            while stack:
                op = stack.pop()
                if op not in above:
                    above.add(op)
                    stack += [*op.control_inputs, *(t.op for t in op.inputs)]
            assert fed & above, f"{gate.name} waits only for {sorted(op.name for op in above)}"


@pytest.mark.parametrize("used", [False, True])
def test_what_reads_a_value_and_leads_to_no_gradient_may_be_used_or_not(exact, used):
    """If the product's only other reader is dead, grappler folds it with the constant's reader; if
    another op reads it, grappler does not."""
    x = tf.constant(np.random.default_rng(11).normal(size=(4, 4)), tf.float32)

    def step(gradients, x):
        square = x * x
        beside = tf.tanh(tf.tanh(square))
        noise = tf.random.stateless_normal(x.shape, seed=[3, 0])
        grads = gradients(tf.reduce_sum(tf.tanh(square * noise)), x)
        return grads, beside if used else x

    compared(step, x, checkpoints=[])


#: Layers, and how many of them make the network.
BODIES = {
    "square": (lambda h: tf.square(h / 3.0), 1),
    "gelu": (lambda h: h + tf.nn.gelu(h + 0.7), 2),
    "root": (lambda h: h + tf.sqrt(tf.abs(h - 0.3) + 1.0), 3),
}


@pytest.mark.parametrize(
    ("name", "mode", "returned"),
    covering([*BODIES], ["memory", "speed", None], [False, True], pairs=False),
)
@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_a_loss_that_is_not_asked_for_is_pruned(exact, name, mode, returned):
    body, depth = BODIES[name]
    x = tf.constant(np.random.default_rng(0).normal(size=(64, 32)), tf.float32)

    def step(gradients, x):
        h = x
        for _ in range(depth):
            h = body(h)
        loss = tf.reduce_sum(h)
        return gradients(loss, [x])[0], loss if returned else x

    ours, _ = ran(step, functools.partial(ms.gradients, checkpoints=mode), x)
    plain, _ = ran(step, tf.gradients, x)
    assert_identical(ours[0], plain[0], f"{name}, {mode!r}")


@pytest.mark.parametrize("mode", ["memory", "speed"])
def test_silu_is_one_kernel_in_copies_too(exact, mode):
    """It is ``h * sigmoid(1 * h)``. Copies of both products must read h behind the same gate,
    though ``1 * h`` is no op of a plan."""
    draw = np.random.default_rng(5)
    x = tf.constant(draw.normal(size=(64, 64)), tf.float32)
    weights = [tf.constant(draw.normal(size=(64, 64)) / 8, tf.float32) for _ in range(5)]

    def step(gradients, x, *weights):
        h = x
        for weight in weights:
            h = tf.nn.silu(h @ weight)
        return gradients(tf.reduce_mean(h**2), weights)

    compared(step, x, *weights, checkpoints=mode)


def test_a_constant_gradient_moves_past_a_product_that_others_wait_for(exact):
    """In ``c * (sigmoid(x) * y)``, the inner product may end a kernel. A reader that is waited for
    in its place would keep the constant where it is."""
    draw = np.random.default_rng(8)
    x = tf.constant(draw.normal(size=(256, 32)), tf.float32)
    weights = [tf.constant(draw.normal(size=(32, 32)) / 6, tf.float32) for _ in range(3)]

    def step(gradients, x):
        h = x
        for w in weights:
            h = tf.nn.silu(h @ w)
        return gradients(h, x, grad_ys=tf.fill(h.shape, 0.1))[0]

    (plan,) = compared(step, x, checkpoints="memory")
    assert plan.clones


@pytest.mark.parametrize("asked", [["matmul_2", "BiasAdd_6"], "memory", *slow("speed")])
def test_what_becomes_one_kernel_is_not_parted(exact, asked):
    """With side losses, the output of a product is a tempting place for a cut. The original would
    not be fused any more."""
    draw = np.random.default_rng(6)
    x = tf.constant(draw.normal(size=(32, 128)), tf.float32)
    weights = [tf.constant(draw.normal(size=(128, 128)) / 11, tf.float32) for _ in range(12)]
    biases = [tf.constant(draw.normal(size=128) / 10, tf.float32) for _ in range(12)]

    def step(gradients, x, weights, biases):
        h, losses = x, []
        for k in range(6):
            h = tf.tanh(tf.nn.bias_add(h @ weights[2 * k], biases[2 * k]))
            losses.append(1e-3 * tf.reduce_mean(tf.square(h)))
            h = tf.nn.gelu(tf.nn.bias_add(h @ weights[2 * k + 1], biases[2 * k + 1]))
        return gradients(tf.add_n([tf.reduce_mean(h**2), *losses]), [*weights, *biases])

    (plan,) = compared(step, x, weights, biases, checkpoints=asked)
    assert plan.clones
    if isinstance(asked, list):
        kept = {one.tensor: one.reason for one in plan.decisions if one.fate == "keep"}
        assert "matmul_2" in kept["Tanh_1:0"]


def test_layers_of_a_dense_block_are_kept_one_by_one(exact):
    """No kernel merges with a concatenation: the default plan may keep its parts (DenseNet)."""
    growth, layers = 8, 16
    draw = np.random.default_rng(7)

    def kernel(size, inputs, outputs):
        return tf.constant(draw.normal(size=(size, size, inputs, outputs)) / 10, tf.float32)

    narrow = [kernel(1, growth * (k + 1), 4 * growth) for k in range(layers)]
    wide = [kernel(3, 4 * growth, growth) for _ in range(layers)]
    x = tf.constant(draw.normal(size=(2, 16, 16, growth)), tf.float32)

    def step(gradients, x, narrow, wide):
        h = x
        for one, other in zip(narrow, wide, strict=True):
            new = tf.nn.relu(tf.nn.conv2d(tf.nn.relu(h), one, 1, "SAME"))
            h = tf.concat([h, tf.nn.conv2d(new, other, 1, "SAME")], -1)
        return gradients(tf.reduce_mean(h**2), [*narrow, *wide])

    (plan,) = compared(step, x, narrow, wide)
    assert plan.peak <= 0.5 * plan.peak_plain


def test_what_keeps_a_clone_apart_is_out_of_the_callers_scopes():
    with tf.Graph().as_default() as graph:
        h = x = v1.placeholder(tf.float32, [64, 32])
        for _ in range(8):
            z = tf.nn.bias_add(h, tf.ones([32]))
            h = tf.tanh(z + tf.sin(z) * 1.5) * tf.stop_gradient(tf.cos(z))
        first = tf.no_op("first")
        with tf.control_dependencies([first]):
            ms.gradients(tf.reduce_sum(h), x, checkpoints="memory")
        ours = [op for op in graph.get_operations() if _protected(op)]
        assert ours
        assert not any(first in op.control_inputs for op in ours)


def _protected(op):
    return "_grappler_do_not_remove" in op.node_def.attr
