"""Unchanged code under a patch: every flavor of gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import gradients as imported_before
from tensorflow import hessians

import memsaving_gradients as ms

v1 = tf.compat.v1
errors = ms.errors


def chain(x: tf.Tensor, length: int = 16) -> tf.Tensor:
    for _ in range(length):
        x = tf.sin(x)
    return x


def data() -> tf.Tensor:
    return tf.linspace(0.1, 1.0, 1000)


def taped(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = chain(x)
    return tape.gradient(y, x)


def compare(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[ms.Plan, ...]:
    """Check that ``function`` gives the same results under a patch; return the plans used."""
    plain = tf.function(function)(*args)
    saving = tf.function(function)
    with ms.patched(**options):
        found = saving(*args)
    assert tf.nest.map_structure(type, found) == tf.nest.map_structure(type, plain)
    for ours, theirs in zip(
        tf.nest.flatten(found, expand_composites=True),
        tf.nest.flatten(plain, expand_composites=True),
        strict=True,
    ):
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    return ms.plans(saving)


# --- the covered kinds of gradients


@pytest.mark.parametrize(
    "function",
    [
        taped,
        lambda x: tf.gradients(chain(x), x),
        lambda x: tf.compat.v1.gradients(chain(x), x),
        lambda x: imported_before(chain(x), x),
    ],
    ids=["tape", "tf.gradients", "tf.compat.v1.gradients", "imported by name before"],
)
def test_flavors(function: Callable[..., Any]) -> None:
    (plan,) = compare(function, data())
    assert plan.clones > 0


@pytest.mark.parametrize("use_resource", [False, True])
def test_v1_optimizer(use_resource: bool) -> None:
    def trained(**options: Any) -> np.ndarray:
        with tf.Graph().as_default() as graph:
            w = v1.get_variable(
                "w", initializer=np.linspace(0, 1, 1000, dtype="f"), use_resource=use_resource
            )
            loss = tf.reduce_sum(chain(w * 1.5))
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            if options:
                with ms.patched(**options):
                    step = optimizer.minimize(loss)
                assert ms.plans(graph)[-1].clones > 0
            else:
                step = optimizer.minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(step)
                return session.run(w)

    np.testing.assert_allclose(trained(checkpoints="memory"), trained(), rtol=1e-6, atol=1e-6)


def test_bound_tape_method_of_before() -> None:
    def f(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        return tf.GradientTape.gradient(tape, y, x)

    assert compare(f, data())


def test_names_of_marks() -> None:
    def f(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(ms.checkpoint(chain(x, 8), name="middle"), 8)
        return tape.gradient(y, x)

    (plan,) = compare(f, data(), checkpoints=["middle"])
    assert plan.clones > 0


def test_distribution_strategy_traces_in_another_thread() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        w = tf.Variable(np.linspace(0, 1, 1000, dtype="f"))

    def replica() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = chain(w * 1.5)
        return tape.gradient(y, w)

    assert compare(lambda: strategy.run(replica))


def test_patched_in_every_thread() -> None:
    plans: list[tuple[ms.Plan, ...]] = []

    def work() -> None:
        function = tf.function(taped)
        function(data())
        plans.append(ms.plans(function))

    with ms.patched():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(plans) == 1
    assert len(plans[0]) == 1


# --- arguments and results of tapes


def test_nested_sources_keep_their_structure() -> None:
    w, b = tf.Variable(tf.ones([1000])), tf.Variable(tf.zeros([1000]))

    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x * w + b)
        return tape.gradient(y, {"weights": [w, (b,)], "input": x})

    assert compare(f, data())


def test_nested_targets() -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = {"a": chain(x), "b": [chain(x * 2.0)]}
        return tape.gradient(y, x)

    assert compare(f, data())


def test_output_gradients() -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        return tape.gradient(y, [x], output_gradients=[x])

    assert compare(f, data())


@pytest.mark.parametrize("unconnected", ["none", "zero"])
def test_unconnected_sources(unconnected: str) -> None:
    w = tf.Variable(tf.ones([3]))

    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        kind = tf.UnconnectedGradients(unconnected)
        return tape.gradient(y, [x, w], unconnected_gradients=kind)

    assert compare(f, data())


def test_persistent_tape() -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            h = chain(x)
            y = chain(h)
        return tape.gradient(y, x), tape.gradient(y, h), tape.gradient(h, x)

    assert len(compare(f, data())) == 3


def test_sparse_gradient_of_a_gather() -> None:
    w = tf.Variable(tf.random.stateless_normal([50, 64], [1, 2]))

    def f(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = chain(tf.gather(w, ids))
        grad = tape.gradient(y, w)
        assert isinstance(grad, tf.IndexedSlices)
        return grad.values, grad.indices

    assert compare(f, tf.constant([3, 1, 4, 1, 5], tf.int64))


def test_ragged_source() -> None:
    def f(x: tf.Tensor) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(x, [400, 600])
        with tf.GradientTape() as tape:
            tape.watch(ragged)
            y = ragged
            for _ in range(16):
                y = tf.ragged.map_flat_values(tf.sin, y)
        return tape.gradient(y, ragged)

    assert compare(f, data())


def test_ragged_xs_of_tf_gradients() -> None:
    def f(x: tf.Tensor) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(x, [400, 600])
        y = tf.ragged.map_flat_values(chain, ragged)
        return tf.gradients(y, [ragged])

    assert compare(f, data())


# --- higher orders, and gradients that stay plain


@pytest.mark.parametrize("parallel", [True, False], ids=["vectorized", "loop"])
def test_jacobian(parallel: bool) -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = chain(x)
        return tape.jacobian(y, x, experimental_use_pfor=parallel)

    compare(f, data()[:50])


def test_batch_jacobian() -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        return tape.batch_jacobian(y, x)

    compare(f, tf.reshape(data(), [100, 10]))


def test_nested_tapes() -> None:
    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = chain(x)
            slope = inner.gradient(y, x)
        return slope, outer.gradient(slope, x)

    assert len(compare(f, data())) == 2


def test_gradients_of_gradients() -> None:
    def f(x: tf.Tensor) -> Any:
        slope = tf.gradients(chain(x), x)[0]
        return slope, tf.gradients(slope, x)[0]

    assert len(compare(f, data())) == 2


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_hessians() -> None:
    compare(lambda x: hessians(tf.reduce_sum(chain(x, 8)), x), data()[:8])


def test_gradient_inside_a_recomputed_function_is_left_to_tensorflow() -> None:
    # tf.recompute_grad asks for gradients with a tape while TensorFlow differentiates.
    def f(x: tf.Tensor) -> Any:
        block = tf.recompute_grad(lambda h: chain(h, 4))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(block(block(chain(x))))
        return tape.gradient(y, x)

    assert len(compare(f, data())) == 1


@pytest.mark.parametrize("kind", ["call", "branch", "loop"])
def test_gradients_of_functions_are_left_to_tensorflow(kind: str) -> None:
    @tf.function
    def block(x: tf.Tensor) -> tf.Tensor:
        return chain(x, 4)

    def f(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
            if kind == "call":
                y = block(y)
            elif kind == "branch":
                h = y
                y = tf.cond(tf.reduce_sum(x) > 0, lambda: chain(h, 4), lambda: h)
            else:
                _, y = tf.while_loop(
                    lambda i, _: i < 3, lambda i, h: (i + 1, tf.sin(h)), [tf.constant(0), y]
                )
            y = chain(y)
        return tape.gradient(y, x)

    assert len(compare(f, data())) == 1


def in_a_branch(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = chain(x)
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tape.gradient(y, x), lambda: x)


def test_tape_of_an_enclosing_graph_passes_through() -> None:
    assert compare(in_a_branch, data()) == ()


def test_budget_for_a_tape_of_an_enclosing_graph_is_said_not_to_be_kept() -> None:
    with pytest.warns(errors.NothingSavedWarning, match="no budget is kept"):
        assert compare(in_a_branch, data(), budget=0.5) == ()
