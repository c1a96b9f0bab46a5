"""Graphs that today's programs would not make: imported ones, control flow and shapes of TensorFlow
1, ``Defun``, constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function

import memsaving_gradients as ms
from graph_tools import capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.tf_private import autodiff
from tests.helpers.fresh import fresh

v1 = tf.compat.v1

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

OPTIONS = [{}, {"checkpoints": None}, {"checkpoints": "speed"}]


@pytest.fixture
def control_flow_v1() -> Iterator[None]:
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()


# --- imported graphs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_imported_graph(options: dict[str, Any]) -> None:
    with tf.Graph().as_default():
        h = v1.placeholder(tf.float32, [1000], name="x")
        for _ in range(12):
            h = tf.sin(h)
        tf.identity(h, name="y")
        meta = v1.train.export_meta_graph()

    def slope(gradients: Callable[..., Any]) -> Any:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            v1.train.import_meta_graph(meta)
            x, y = (graph.get_tensor_by_name(name) for name in ("x:0", "y:0"))
            (found,) = gradients(y, x)
            return session.run(found, {x: np.linspace(0, 1, 1000)}), ms.plans(graph)

    plain, _ = slope(tf.gradients)
    found, (plan,) = slope(lambda y, x: ms.gradients(y, x, **options))
    np.testing.assert_array_equal(found, plain)
    assert {decision.source for decision in plan.decisions} == {"imported"}
    assert "imported" in str(plan)


# --- reference variables


@pytest.mark.parametrize("assign", ["add", "scatter", "branch"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_reference_variable_that_the_forward_pass_assigns(
    options: dict[str, Any], assign: str, control_flow_v1: None
) -> None:
    """A clone of the op that reads the variable would read the new value."""
    images = np.random.default_rng(0).normal(size=[64, 16])

    def step(gradients: Callable[..., Any]) -> Any:
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(0)
            x = v1.placeholder(tf.float32, [64, 16])
            shift = v1.get_variable("shift", [16], use_resource=False)
            h = x
            for i in range(12):
                # No backward op reads `shift`: only a clone of the sum can see that it changed.
                h = tf.sin(h + shift)
                if i == 6:
                    with tf.control_dependencies([h]):
                        if assign == "add":
                            done = v1.assign_add(shift, tf.ones([16]))
                        elif assign == "scatter":
                            done = v1.scatter_update(shift, [3, 4], [1.0, 2.0])
                        else:
                            _, on = tf.raw_ops.RefSwitch(
                                data=shift._ref(), pred=tf.reduce_sum(x) < 1e9
                            )
                            done = tf.raw_ops.Assign(ref=on, value=tf.ones([16]))
                    with tf.control_dependencies([done]):
                        h = tf.identity(h)
            session.run(v1.global_variables_initializer())
            return session.run(gradients(tf.reduce_sum(h), [x]), {x: images})

    plain = step(tf.gradients)
    found = step(lambda ys, xs: ms.gradients(ys, xs, **options))
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_array_equal(a, b)


# --- control flow of TensorFlow 1


def _chosen(h: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
    return tf.cond(which, lambda: tf.tanh(tf.sin(h)), lambda: 3.0 * h)


def _nested(h: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
    def inner() -> tf.Tensor:
        return tf.cond(tf.reduce_sum(h) > 0, lambda: tf.sin(h) * h, lambda: tf.cos(h))

    return tf.cond(which, inner, lambda: tf.sin(h))


def _case(h: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
    pairs = [(which, lambda: tf.tanh(h)), (tf.reduce_sum(h) > 0, lambda: tf.sin(h) * h)]
    return tf.case(pairs, lambda: 3.0 * h)


@pytest.mark.usefixtures("control_flow_v1")
@pytest.mark.parametrize("branch", [_chosen, _nested, _case])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_branches_of_control_flow_v1(branch: Any, options: dict[str, Any]) -> None:
    """Ops that wait for an op of a branch that is not taken would never run."""

    def slopes(gradients: Callable[..., Any]) -> Any:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            which, x = v1.placeholder(tf.bool, []), v1.placeholder(tf.float32, [1000])
            h = x
            for _ in range(5):
                h = branch(tf.sin(tf.tanh(h * 1.5)), which)
            first = gradients(tf.reduce_sum(h), [x])
            second = gradients(tf.reduce_sum(first[0] ** 2), [x])
            feed = {x: np.linspace(-1, 1, 1000)}
            found = [session.run([*first, *second], feed | {which: b}) for b in (True, False)]
            return found, ms.plans(graph)

    (plain, _), (found, plans) = (
        slopes(gradients)
        for gradients in (tf.gradients, lambda y, x: ms.gradients(y, x, **options))
    )
    assert plans and plans[0].clones > 0
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("control_flow_v1")
def test_only_what_is_in_a_branch_is_conditional() -> None:
    with tf.Graph().as_default():
        which, x = v1.placeholder(tf.bool, []), v1.placeholder(tf.float32, [4])
        before = tf.sin(x)
        inside: list[tf.Tensor] = []

        def taken() -> tf.Tensor:
            inside.append(tf.tanh(before))
            return inside[0]

        after = tf.cos(tf.cond(which, taken, lambda: before))
        ops = capture([after])
    names = {ops.ops[i].name for i in ops.conditional}
    assert inside[0].op.name in names
    assert before.op.name not in names
    assert after.op.name not in names
    assert not any(ops.clonable[i] for i in ops.conditional)


# --- shapes of TensorFlow 1


def with_shapes_of_v1() -> list[tuple[float, int]]:
    """Return distances from TensorFlow's gradients, and numbers of clones, in a process in which
    shapes consist of ``Dimension``."""
    v1.disable_v2_behavior()
    v1.enable_control_flow_v2()

    def network(kind: str, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        h = x
        for _ in range(2 if kind in ("loop", "attention") else 5):
            if kind == "product":
                h = tf.tanh(h @ w)
            elif kind == "convolution":
                image = tf.reshape(h, [-1, 8, 8, 1])
                image = tf.nn.relu(
                    tf.nn.conv2d(image, tf.reshape(w[0, :9], [3, 3, 1, 1]), 1, "SAME")
                )
                h = tf.reshape(tf.nn.max_pool2d(image, 1, 1, "SAME"), [-1, 64]) + h
            elif kind == "einsum":
                h = tf.tanh(tf.einsum("ij,jk->ik", h, w))
            elif kind == "loop":
                h = tf.while_loop(lambda k, h: k < 9, lambda k, h: (k + 1, tf.tanh(h @ w)), (0, h))[
                    1
                ]
            else:
                parts = tf.reshape(h @ w, [-1, 16, 4])
                seen = tf.nn.softmax(tf.matmul(parts, parts, transpose_b=True) / 2.0) @ parts
                h = tf.reshape(seen, [-1, 64]) + tf.tanh(h)
        return tf.reduce_sum(h)

    found = []
    for kind, options in (
        ("product", {"checkpoints": None}),
        ("convolution", {"encode": "lossless"}),
        ("einsum", {"checkpoints": None}),
        ("loop", {}),
        ("attention", {"attention": "blocks"}),
    ):
        results, clones = [], 0
        for ours in (False, True):
            with tf.Graph().as_default() as graph, v1.Session() as session:
                x = v1.placeholder(tf.float32, [None, 64])
                w = tf.constant(np.random.default_rng(0).normal(size=(64, 64)) / 8, tf.float32)
                y = network(kind, x, w)
                grads = ms.gradients(y, [x, w], **options) if ours else tf.gradients(y, [x, w])
                results.append(session.run(grads, {x: np.linspace(-1, 1, 2048).reshape(32, 64)}))
                clones = sum(plan.clones + len(plan.replayed) for plan in ms.plans(graph))
        far = max(
            float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(*results, strict=True)
        )
        found.append((far, clones))
    return found


def test_shapes_of_tensorflow_1() -> None:
    found = fresh("tests.promises.test_graphs_of_others:with_shapes_of_v1")
    # Attention in blocks adds in another order.
    assert all(far < 1e-4 for far, _ in found), found
    assert all(clones > 0 for _, clones in found[:-1]), found


# --- ops whose type is the name of a function


@pytest.mark.parametrize("options", [*OPTIONS, {"loops": "segments"}], ids=str)
def test_a_defun_in_a_loop(options: dict[str, Any]) -> None:
    @function.Defun(tf.float32)
    def squared(x: tf.Tensor) -> tf.Tensor:
        return tf.square(tf.sin(x))

    def slope(gradients: Callable[..., Any]) -> Any:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            x = v1.placeholder(tf.float32, [1000])
            invariants = (tf.TensorShape([]), tf.TensorShape(None))
            y = tf.while_loop(
                lambda i, v: i < 50,
                lambda i, v: (i + 1, tf.tanh(squared(v)) + v),
                (0, x),
                shape_invariants=invariants,
            )[1]
            (found,) = gradients(tf.reduce_sum(squared(y)), x)
            return session.run(found, {x: np.linspace(0, 1, 1000)}), ms.plans(graph)

    plain, _ = slope(tf.gradients)
    found, plans = slope(lambda y, x: ms.gradients(y, x, **options))
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert any(plan.replayed for plan in plans) == (options != OPTIONS[2])


# --- constants


def _chain_of(start: tf.Tensor, order: int) -> tf.Tensor:
    f = tf.function(lambda v: tf.sin(v) * v)
    y = f(start)
    for _ in range(order):
        (y,) = ms.gradients(y, [start])
    return y


def test_functions_of_constants() -> None:
    """Folded ops compute, and take scratch space, before the step."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [16])
        expected = session.run(_chain_of(x, 2), {x: np.ones(16)})
    with tf.Graph().as_default(), v1.Session() as session:
        np.testing.assert_allclose(session.run(_chain_of(tf.ones([16]), 2)), expected, rtol=1e-6)


def test_updates_by_constants_are_part_of_the_step() -> None:
    unit = 4 * 1000
    v, w = tf.Variable(tf.ones([1000])), tf.Variable(tf.ones([1000]))

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        y = v.read_value() * 2.0
        v.assign(tf.zeros([1000]))
        w.assign_add(tf.ones([1000]))
        return y + tf.sin(w)

    ops = capture(autodiff.ends_of(step.get_concrete_function().graph))
    simulated, _ = simulate_execution(ops, batch=1)
    born, dies, _ = simulated.buffers
    assert (born >= 0).all() and (dies >= born).all()
    assert simulated.peak == 2 * unit


def test_large_constants_of_sessions_are_planned() -> None:
    """When gradients are built, it is unknown whether the session folds constants."""
    with tf.Graph().as_default() as graph:
        x = y = tf.ones([250_000])
        for _ in range(100):
            y = tf.sin(y)
        ms.gradients(y, x)
    (plan,) = ms.plans(graph)
    assert plan.peak < plan.peak_plain / 4

    @tf.function(autograph=False)
    def slope() -> tf.Tensor:
        x = y = tf.ones([250_000])
        for _ in range(100):
            y = tf.sin(y)
        return ms.gradients(y, x)[0]

    # Functions fold the constant, and nothing is left to save.
    assert not ms.plans(slope.get_concrete_function())
