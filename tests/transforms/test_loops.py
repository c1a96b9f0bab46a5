"""Loops that are replayed: gradients are TensorFlow's own for all contents of a loop, and the
replay really happens."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.sampling import one_of
from tests.helpers.support import Inputs, Net, assert_identical, in_function, in_session, numbers

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
]

WAYS = ("segments", "treeverse")
RUNNERS = {"session": in_session, "function": in_function}


def data(**more):
    return Inputs({"x": numbers("x", 4, 8), "w": numbers("w", 8, 8, scale=0.3)} | more)


def counted(body, steps=24, **options):
    """Return a builder of a loop with a known number of steps and one state, the input."""

    def build(p):
        _, y = tf.while_loop(
            lambda i, _: i < steps, lambda i, h: (i + 1, body(p, i, h)), (0, p["x"]), **options
        )
        return Net(tf.reduce_sum(y))

    return build


def layer(p, _, h):
    return tf.tanh(tf.matmul(h, p["w"]))


def branching(p, i, h):
    return tf.cond(tf.equal(i % 3, 0), lambda: tf.sin(h), lambda: tf.tanh(tf.matmul(h, p["w"])))


@tf.function(autograph=False)
def squashed(h):
    return tf.sin(h) * tf.cos(h)


def calling(_p, _i, h):
    return squashed(h)


def gathering(p, i, h):
    rows = tf.gather(p["w"], tf.stack([i % 8, 0, 1, 2]))
    return tf.tanh(h + rows)


@tf.custom_gradient
def clipped(h):
    return tf.exp(-tf.square(h)), lambda dy: tf.clip_by_value(-2.0 * h * dy, -0.1, 0.1)


def customized(p, i, h):
    return clipped(layer(p, i, h))


def noisy(_, i, h):
    return tf.tanh(h) * tf.random.stateless_uniform(tf.shape(h), [1, 2 + i], 0.5, 1.5)


def drawn_once(p, i, h):
    return layer(p, i, h) * tf.random.uniform(tf.shape(h), 0.5, 1.5, seed=3)


def nested(p, _, h):
    return tf.while_loop(
        lambda j, _: j < 5, lambda j, g: (j + 1, tf.tanh(tf.matmul(g, p["w"]))), (0, h)
    )[1]


def rematerialized(p, i, h):
    return tf.recompute_grad(lambda g: layer(p, i, g))(h)


def with_variable(p):
    weight = p.weight("v", 8, 8)
    return counted(lambda p, i, h: tf.tanh(tf.matmul(h, weight)))(p)


def unbounded(p):
    """Build a loop whose condition depends on the values that it computes."""
    _, y = tf.while_loop(
        lambda i, h: tf.logical_and(i < 40, tf.reduce_sum(tf.square(h)) > 0.05),
        lambda i, h: (i + 1, 0.9 * layer(p, i, h)),
        (0, p["x"]),
    )
    return Net(tf.reduce_sum(y))


def bounded_at_run_time(p):
    _, y = tf.while_loop(
        lambda *_: True,
        lambda i, h: (i + 1, layer(p, i, h)),
        (0, p["x"]),
        maximum_iterations=p["steps"],
    )
    return Net(tf.reduce_sum(y))


def several_states(p):
    def body(i, a, b, flag, count):
        a, b = tf.tanh(tf.matmul(b, p["w"])), tf.where(flag, a * b, tf.sin(a))
        return i + 1, a, b, tf.logical_not(flag), count + tf.cast(i, tf.float64)

    begin = (0, p["x"], tf.cos(p["x"]), True, tf.constant(0.0, tf.float64))
    _, a, b, _, count = tf.while_loop(lambda i, *_: i < 21, body, begin)
    return Net([tf.reduce_sum(a * b), count * tf.cast(tf.reduce_sum(a), tf.float64)])


def scanned(p):
    y = tf.scan(lambda h, e: tf.tanh(tf.matmul(h, p["w"]) + e), p["xs"], initializer=p["x"])
    return Net(tf.reduce_sum(tf.square(y)))


def scanned_backwards(p):
    y = tf.scan(lambda h, e: tf.tanh(h * e), p["xs"], reverse=True)
    return Net(tf.reduce_sum(y))


def mapped(p):
    y = tf.map_fn(lambda e: tf.tanh(tf.matmul(e, p["w"])), p["xs"])
    return Net(tf.reduce_sum(tf.square(y)))


def folded(p):
    left = tf.foldl(lambda h, e: tf.tanh(tf.matmul(h, p["w"]) * e), p["xs"], initializer=p["x"])
    return Net(tf.reduce_sum(left + tf.foldr(lambda h, e: tf.sin(h + e), p["xs"])))


def reading_back(p):
    """Build a loop whose steps read values that earlier steps wrote."""
    array = tf.TensorArray(tf.float32, size=20, element_shape=[4, 8], clear_after_read=False)
    array = array.write(0, p["x"])

    def body(i, array):
        h = array.read(i - 1) + 0.5 * array.read(tf.maximum(i - 3, 0))
        return i + 1, array.write(i, tf.tanh(tf.matmul(h, p["w"])))

    _, array = tf.while_loop(lambda i, _: i < 20, body, (1, array))
    return Net(tf.reduce_sum(tf.square(array.stack())))


def growing(p):
    """Build a loop with a state whose shape changes from step to step."""
    _, y = tf.while_loop(
        lambda i, _: i < 14,
        lambda i, h: (i + 1, tf.concat([tf.tanh(h), p["x"][:1]], 0)),
        (0, p["x"]),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 8])),
    )
    return Net(tf.reduce_sum(tf.square(y)))


def inside_of_branch(p):
    y = tf.cond(
        tf.reduce_sum(p["x"]) > -1e9,
        lambda: counted(layer)(p).ys,
        lambda: tf.reduce_sum(p["x"] * p["w"][0]),
    )
    return Net(y)


def inside_of_function(p):
    @tf.function(autograph=False)
    def inner(x, w):
        return tf.while_loop(
            lambda i, _: i < 24, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, x)
        )[1]

    return Net(tf.reduce_sum(inner(p["x"], p["w"])))


def chained(p):
    """Build a loop that reads another loop's result; both read the same tensor."""
    first = tf.while_loop(lambda i, _: i < 16, lambda i, h: (i + 1, layer(p, i, h)), (0, p["x"]))[1]
    second = tf.while_loop(
        lambda i, _: i < 25, lambda i, h: (i + 1, tf.sin(h) + first), (0, p["x"])
    )[1]
    return Net(tf.reduce_sum(second))


LOOPS = {
    "layer": counted(layer),
    "layer of a variable": with_variable,
    "one step": counted(layer, 1),
    "no step": counted(layer, 0),
    "bounded": counted(layer, 100, maximum_iterations=17),
    "branch": counted(branching),
    "function": counted(calling),
    "gather": counted(gathering),
    "custom gradient": counted(customized),
    "stateless random": counted(noisy),
    "nested loop": counted(nested, 9),
    "recompute_grad": counted(rematerialized),
    "unbounded": unbounded,
    "several states": several_states,
    "scan": scanned,
    "scan backwards": scanned_backwards,
    "map": mapped,
    "fold": folded,
    "reading back": reading_back,
    "growing": growing,
    "in a branch": inside_of_branch,
    "in a function": inside_of_function,
    "two": chained,
}
#: Nothing in these loops can be replayed, or it is not worth it.
ALONE = {"one step", "no step"}


def assert_replayed_same(build, inputs, kinds, replayed=True, **options):
    """Check that gradients with loops replayed are TensorFlow's own, to the last bit."""

    def program(gradients, p, _):
        net = build(p)
        xs = p.all if net.xs is None else net.xs
        return [net.ys, gradients(net.ys, xs, **net.options)]

    for kind in one_of(kinds):
        run = RUNNERS[kind]
        plain = run(functools.partial(program, tf.gradients), inputs)
        for way in one_of(WAYS):
            ours = functools.partial(ms.gradients, checkpoints="memory", loops=way, **options)
            found = run(functools.partial(program, ours), inputs)
            assert_identical(found.results, plain.results, f"{kind}, loops={way!r}")
            if replayed:
                assert found.plans, f"{kind}, loops={way!r}: nothing saved"
                assert found.plans[-1].replayed, f"{kind}, loops={way!r}: nothing replayed"


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_of_replayed_loops_are_those_of_tensorflow(name):
    # In sessions TensorFlow itself fails: outside of functions it takes the first step's shape for
    # all steps.
    kinds = ["function"] if name == "growing" else RUNNERS
    inputs = data(xs=numbers("xs", 30, 4, 8))
    inside = name in ALONE or name.startswith("in a")
    assert_replayed_same(LOOPS[name], inputs, kinds, replayed=not inside)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 16, 31])
def test_number_of_steps_known_at_run_time(steps):
    inputs = data(steps=np.array(steps, np.int32))
    inputs.shape = lambda name: list(inputs.arrays[name].shape)
    assert_replayed_same(bounded_at_run_time, inputs, RUNNERS)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("loops", ["auto", "segments", "treeverse"])
def test_few_large_steps_are_replayed(steps, loops):
    def build(p):
        return counted(lambda p, _, h: tf.sin(tf.tanh(tf.sin(tf.tanh(h)))), steps)(p)

    def program(gradients, p, _):
        net = build(p)
        return [net.ys, gradients(net.ys, p["x"])]

    ours = functools.partial(ms.gradients, checkpoints="memory", loops=loops)
    plain = in_function(functools.partial(program, tf.gradients), data())
    found = in_function(functools.partial(program, ours), data())
    assert_identical(found.results, plain.results, loops)
    assert [how.steps for how in found.plans[-1].replayed] == [steps]


@pytest.mark.parametrize("steps", [0, 1, 11, 12, 13, 40])
def test_number_of_steps_that_was_told(steps):
    """Gradients are TensorFlow's also for fewer steps than the given 12, and for more."""

    def build(p):
        _, y = tf.while_loop(
            lambda i, _: i < p["steps"], lambda i, h: (i + 1, layer(p, i, h)), (0, p["x"])
        )
        return Net(tf.reduce_sum(y))

    inputs = data(steps=np.array(steps, np.int32))
    inputs.shape = lambda name: list(inputs.arrays[name].shape)
    assert_replayed_same(build, inputs, RUNNERS, loop_steps=12)


def test_random_numbers_are_drawn_once():
    def program(gradients, p, _):
        # In parallel, steps would draw in an order of their own.
        net = counted(drawn_once, 12, parallel_iterations=1)(p)
        return [net.ys, gradients(net.ys, p.all)]

    plain = in_function(functools.partial(program, tf.gradients), data(), steps=2)
    for way in one_of(WAYS):
        ours = functools.partial(ms.gradients, checkpoints="memory", loops=way)
        found = in_function(functools.partial(program, ours), data(), steps=2)
        assert_identical(found.results, plain.results, way)


def kernels_run(way, steps):
    """Return how many ``Tanh`` the optimized graph has, and how many run."""
    v1 = tf.compat.v1
    arrays = data().arrays
    traced = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    with tf.Graph().as_default(), v1.Session() as session:
        given = {name: v1.placeholder(tf.float32, array.shape) for name, array in arrays.items()}
        ys = counted(layer, steps, parallel_iterations=1)(given).ys
        grads = ms.gradients(ys, list(given.values()), loops=way)
        feed = {given[name]: array for name, array in arrays.items()}
        session.run(grads, feed, options, traced)
    nodes = [node for graph in traced.partition_graphs for node in graph.node]
    tanh = {
        node.name for node in nodes if node.op == "Tanh" or b"Tanh" in node.attr["fused_ops"].list.s
    }
    ran = [node for device in traced.step_stats.dev_stats for node in device.node_stats]
    return len(tanh), sum(node.node_name.split(":")[0] in tanh for node in ran)


@pytest.mark.usefixtures("control_flow_v2")
def test_steps_run_again_in_the_optimized_graph():
    assert kernels_run("keep", 64) == (1, 64)
    assert kernels_run("segments", 64) == (2, 2 * 64)
    # Treeverse runs each step at most three times more.
    kernels, runs = kernels_run("treeverse", 64)
    assert kernels == 4 and 3 * 64 < runs <= 4 * 64


def test_a_vectorized_map_stays_plain():
    x = tf.constant(numbers("x", 3, 8))

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(
                lambda i, _: i < 12, lambda i, h: (i + 1, tf.tanh(1.1 * h)), (0, x)
            )
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    plain = tf.vectorized_map(slope, x)
    with ms.patched(loops="segments"):
        found = tf.function(lambda x: tf.vectorized_map(slope, x), autograph=False)(x)
    assert_identical(found, plain, "vectorized")


def test_several_tapes_are_named_where_a_loop_is_kept():
    weight = tf.Variable(numbers("w", 8, 8))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as one, tf.GradientTape() as other:
            _, y = tf.while_loop(
                lambda i, _: i < 12, lambda i, h: (i + 1, tf.tanh(h @ weight)), (0, x)
            )
            losses = tf.reduce_sum(y), tf.reduce_sum(y**2)
        return one.gradient(losses[0], weight), other.gradient(losses[1], weight)

    with ms.patched(loops="segments"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(tf.ones([4, 8]))
    assert any("several tapes" in str(warning.message) for warning in said)
