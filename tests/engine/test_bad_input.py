"""Bad input: an error of this package that names the argument, the value and the way out, and a
graph left usable."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graph_tools
import memsaving_gradients as ms
from tests.helpers.support import check_error

v1 = tf.compat.v1
errors = ms.errors


class Net:
    """A chain in a graph, next to things that cannot be used."""

    def __init__(self) -> None:
        with tf.Graph().as_default():
            self.elsewhere = v1.placeholder(tf.float32, [1000], name="elsewhere")
        self.eager = tf.constant([1.0])
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.x = self.y = v1.placeholder(tf.float32, [1000], name="x")
            for k in range(16):
                self.y = tf.tanh(self.y, name=f"layer{k}")
            self.variable = v1.get_variable("w", [1000], use_resource=True)
            self.y = tf.add(self.y, self.variable, name="y")
            self.apart = tf.sin(v1.placeholder(tf.float32, [1000]), name="apart")
            self.stopped = tf.cos(self.graph.get_tensor_by_name("layer3:0"), name="stopped")
            self.y += tf.stop_gradient(self.stopped)
            self.count = tf.cast(self.y, tf.int32, name="count")


@pytest.fixture
def net() -> Net:
    return Net()


# The call, the argument that the message names, what it says of the value, and the way out that it
# tells.
CASES: dict[str, tuple[Callable[[Net], Any], str, str, str]] = {
    "unknown mode": (
        lambda n: ms.gradients(n.y, n.x, checkpoints="memroy"),
        "checkpoints",
        "'memroy'",
        "did you mean 'memory'",
    ),
    "a name that is not in a list": (
        lambda n: ms.gradients(n.y, n.x, checkpoints="layer3"),
        "checkpoints",
        "'layer3'",
        "give a list: ['layer3']",
    ),
    "a tensor that is not in a list": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=n.y),
        "checkpoints",
        "'add:0'",
        "put it in a list",
    ),
    "number as checkpoints": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=3),
        "checkpoints",
        "3",
        "None, or a list",
    ),
    "number as a checkpoint": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[3]),
        "checkpoints",
        "3",
        "a name of one",
    ),
    "name that matches nothing": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=["lyaer3"]),
        "checkpoints",
        "'lyaer3'",
        "did you mean 'layer3'",
    ),
    "pattern that matches nothing": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=["bloc*"]),
        "checkpoints",
        "'bloc*'",
        "matches nothing",
    ),
    "checkpoint of another graph": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.elsewhere]),
        "checkpoints",
        "'elsewhere:0'",
        "name a tensor of the graph",
    ),
    "operation of another graph": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.elsewhere.op]),
        "checkpoints",
        "'elsewhere'",
        "name a tensor of the graph",
    ),
    "eager tensor as checkpoint": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.eager]),
        "checkpoints",
        "[1.]",
        "made inside of the tf.function",
    ),
    "checkpoint not between xs and ys": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.apart]),
        "checkpoints",
        "'apart:0'",
        "is not between xs and ys; name a tensor that",
    ),
    "checkpoint behind ys": (
        lambda n: ms.gradients(n.graph.get_tensor_by_name("layer5:0"), n.x, checkpoints=["layer6"]),
        "checkpoints",
        "'layer6'",
        "is not between xs and ys; name a tensor that",
    ),
    "ys as checkpoint": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.y]),
        "checkpoints",
        "'add:0'",
        "name a tensor before it",
    ),
    "checkpoint without a gradient": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.stopped]),
        "checkpoints",
        "'stopped:0'",
        "name a tensor on the differentiable path",
    ),
    "variable as checkpoint": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.variable]),
        "checkpoints",
        "w:0",
        "name a tensor computed from it",
    ),
    "variable handle as checkpoint": (
        lambda n: ms.gradients(n.y, n.x, checkpoints=[n.variable.handle]),
        "checkpoints",
        "'w:0'",
        "name a tensor computed from it",
    ),
    "no marks in collection mode": (
        lambda n: ms.gradients(n.y, n.x, checkpoints="collection"),
        "checkpoints",
        "'collection'",
        "mark some",
    ),
    "xs of another graph": (
        lambda n: ms.gradients(n.y, [n.x, n.elsewhere]),
        "xs",
        "'elsewhere:0'",
        "in one graph",
    ),
    "ys of two graphs": (
        lambda n: ms.gradients([n.y, n.elsewhere], n.x),
        "ys",
        "'elsewhere:0'",
        "in one graph",
    ),
    "grad_ys of another graph": (
        lambda n: ms.gradients(n.y, n.x, grad_ys=n.elsewhere),
        "grad_ys",
        "'elsewhere:0'",
        "in one graph",
    ),
    "eager ys": (lambda n: ms.gradients(n.eager, n.x), "ys", "[1.]", "inside of the tf.function"),
    "eager xs": (lambda n: ms.gradients(n.y, n.eager), "xs", "[1.]", "inside of the tf.function"),
    "integer ys": (lambda n: ms.gradients(n.count, n.x), "ys", "'count:0'", "cast or drop it"),
    "array as xs": (
        lambda n: ms.gradients(n.y, np.zeros(2)),
        "xs",
        "array([0., 0.])",
        "give tensors or variables",
    ),
    "nothing as ys": (lambda n: ms.gradients(None, n.x), "ys", "None", "give tensors"),
    "symbolic Keras tensor": (
        lambda n: ms.gradients(keras.Input([3], name="k"), n.x),
        "ys",
        "KerasTensor",
        "in a tf.function",
    ),
    "checkpoints by position": (
        lambda n: ms.gradients(n.y, n.x, None, "speed"),
        "name",
        "'speed'",
        "checkpoints='speed'",
    ),
    "list of checkpoints by position": (
        lambda n: ms.gradients(n.y, n.x, None, ["layer3"]),  # type: ignore[arg-type]
        "name",
        "['layer3']",
        "by keyword",
    ),
    "hold_gradients": (
        lambda n: ms.gradients(n.y, n.x, hold_gradients=None),  # type: ignore[arg-type]
        "hold_gradients",
        "None",
        "True or False",
    ),
    "xla": (
        lambda n: ms.gradients(n.y, n.x, xla="auto"),  # type: ignore[arg-type]
        "xla",
        "'auto'",
        "None (find out)",
    ),
    "batch_size": (lambda n: ms.gradients(n.y, n.x, batch_size=0), "batch_size", "0", "from 1"),
    "batch_size True": (
        lambda n: ms.gradients(n.y, n.x, batch_size=True),
        "batch_size",
        "True",
        "from 1",
    ),
    **{
        f"loop_steps {value!r}": (
            lambda n, value=value: ms.gradients(n.y, n.x, loop_steps=value),
            "loop_steps",
            repr(value),
            "number of steps from 1",
        )
        for value in (0, -1, 1.5, "x", True)
    },
    "batch_size without end": (
        lambda n: ms.gradients(n.y, n.x, batch_size=10**30),
        "batch_size",
        "10000000000",
        "from 1",
    ),
    "stop_gradients by name": (
        lambda n: ms.gradients(n.y, n.x, stop_gradients="a"),
        "stop_gradients",
        "'a'",
        "give tensors",
    ),
    "option of patch": (
        lambda n: ms.patch(checkpoint="speed"),
        "checkpoint",
        "'speed'",
        "did you mean 'checkpoints'",
    ),
    "mode of patch": (
        lambda n: ms.patch(checkpoints="sped"),
        "checkpoints",
        "'sped'",
        "did you mean 'speed'",
    ),
    "plans of something else": (
        lambda n: ms.plans("graph"),
        "graph_or_function",
        "'graph'",
        "give a tf.Graph",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_names_argument_value_and_way_out(net: Net, case: str) -> None:
    ask, argument, value, way_out = CASES[case]
    with net.graph.as_default(), pytest.raises(errors.ArgumentError) as caught:
        ask(net)
    check_error(caught.value, argument, value, way_out)


def assert_left_as_it_was(net: Net, *cases: str) -> None:
    with net.graph.as_default():
        before = [op.name for op in net.graph.get_operations()]
        for case in cases:
            with pytest.raises(errors.ArgumentError):
                CASES[case][0](net)
            assert [op.name for op in net.graph.get_operations()] == before, case
        ms.gradients(net.y, net.x)
        assert len(ms.plans(net.graph)) == 1


def test_graph_is_left_as_it_was_by_all(net: Net) -> None:
    assert_left_as_it_was(net, *CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_graph_is_left_as_it_was(net: Net, case: str) -> None:
    assert_left_as_it_was(net, case)


def test_eager_gradients() -> None:
    x = tf.constant([1.0])
    with pytest.raises(errors.EagerExecutionError, match=r"@tf\.function"):
        ms.gradients(x * x, x)


def test_bad_option_is_reported_before_eager_execution() -> None:
    x = tf.constant([1.0])
    with pytest.raises(errors.ArgumentError, match="memroy"):
        ms.gradients(x * x, x, checkpoints="memroy")


def test_error_leaves_a_function_as_itself() -> None:
    # AutoGraph replaces errors of types that it does not know.
    @tf.function
    def f(x: tf.Tensor) -> Any:
        return ms.gradients(tf.tanh(tf.sin(x)), x, checkpoints=["nope"])

    with pytest.raises(errors.SelectionError, match="'nope'") as caught:
        f(tf.ones([4]))
    assert caught.value.value == "nope"


def test_ys_of_a_finished_function() -> None:
    leaked = []

    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        leaked.append(tf.tanh(x))
        return x

    @tf.function
    def g(x: tf.Tensor) -> Any:
        return ms.gradients(leaked[0], x)

    f(tf.ones([4]))
    with pytest.raises(errors.ArgumentError, match="another graph"):
        g(tf.ones([4]))


@pytest.mark.parametrize("inside", ["branch", "loop"])
def test_ys_of_an_enclosing_graph_give_plain_gradients_and_a_warning(inside: str) -> None:
    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(tf.sin(x))

        def slope() -> tf.Tensor:
            return ms.gradients(y, x)[0]

        if inside == "branch":
            return tf.cond(tf.reduce_sum(x) > 0, slope, lambda: x)
        _, total = tf.while_loop(
            lambda i, _: i < 2, lambda i, s: (i + 1, s + slope()), [0, tf.zeros_like(x)]
        )
        return total

    @tf.function
    def plain(x: tf.Tensor) -> tf.Tensor:
        return tf.gradients(tf.tanh(tf.sin(x)), x)[0]

    x = tf.linspace(0.1, 1.0, 5)
    with pytest.warns(errors.NothingSavedWarning, match="call gradients where ys are computed"):
        found = f(x)
    np.testing.assert_allclose(found, plain(x) * (1 if inside == "branch" else 2), rtol=1e-6)


def test_nothing_to_save_warns_once_and_says_why() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [4])
        y = 2.0 * x
        with pytest.warns(errors.NothingSavedWarning, match="save no memory: "):
            first = ms.gradients(y, x)
        # Warnings are errors here: the second call must not warn.
        second = ms.gradients(y, x)
        with v1.Session() as session:
            for grads in (first, second):
                assert session.run(grads[0], {x: np.ones(4)}).tolist() == [2.0] * 4


def test_old_signature_with_keywords_works() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [1000])
        for _ in range(16):
            y = tf.tanh(y)
        ms.gradients(y, x, grad_ys=None, checkpoints="memory", gate_gradients=True)
        assert ms.plans(graph)[-1].mode == "memory"


def test_gradients_outside_of_the_graph_of_ys() -> None:
    # tf.compat.v1.gradients enters the graph of its arguments.
    net = Net()
    with tf.Graph().as_default():
        (grad,) = ms.gradients(net.y, net.x)
    assert grad.graph is net.graph


@pytest.mark.parametrize(
    "kind", [errors.ArgumentError, errors.EagerExecutionError, errors.PatchError]
)
def test_one_hierarchy(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.MemorySavingError)
    assert issubclass(kind, graph_tools.errors.GraphToolsError)


def test_builtin_types_are_kept() -> None:
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.SelectionError, errors.ArgumentError)
    assert issubclass(errors.EagerExecutionError, RuntimeError)
    assert issubclass(errors.PatchError, RuntimeError)


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_can_be_copied(again: Callable[[Exception], Exception]) -> None:
    error = errors.SelectionError("checkpoints", "nope", "matches nothing")
    other = again(error)
    assert isinstance(other, errors.SelectionError)
    assert str(other) == str(error) == "checkpoints='nope': matches nothing"
    assert other.argument == "checkpoints"


def test_long_values_are_cut() -> None:
    error = errors.ArgumentError("xs", list(range(1000)), "too long")
    assert len(str(error)) < 200


def test_warning_can_be_an_error() -> None:
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("error", errors.NothingSavedWarning)
        x = v1.placeholder(tf.float32, [4])
        with pytest.raises(errors.NothingSavedWarning):
            ms.gradients(2.0 * x, x)
