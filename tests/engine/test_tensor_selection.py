"""Tensors selected by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.engine.tensor_selection import resolve

v1 = tf.compat.v1


def select(ys: tf.Tensor, xs: object, *spec: object) -> list[str]:
    """Return the names of the tensors that ``spec`` selects."""
    graph = ys.graph
    tensors = resolve(graph, len(graph.get_operations()), spec, [ys], tf.nest.flatten(xs))
    return [t.name for t in tensors]


@pytest.fixture
def graph() -> tf.Graph:
    """Return ``x → block1 → block2 → y``, with a skip, a stopped branch, integers and an unrelated
    op."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8], name="x")
        w = v1.get_variable("w", [8], use_resource=True)
        with tf.name_scope("block1"):
            h = tf.tanh(x * w, name="act")
            with tf.name_scope("inner"):
                h = tf.sin(h, name="act")
        with tf.name_scope("block2"):
            a, b = tf.split(h, 2, name="halves")
            index = tf.argmax(h, name="index")
            g = tf.concat([b, a], 0, name="joined")
            stopped = tf.stop_gradient(tf.cos(g, name="no_gradient"))
        tf.exp(x, name="unrelated")
        tf.add(g + stopped, tf.gather(h, index), name="y")
    return graph


def at(graph: tf.Graph, name: str) -> tf.Tensor:
    return graph.get_tensor_by_name(name + ":0")


@pytest.fixture
def pick(graph: tf.Graph) -> Callable[..., list[str]]:
    return lambda *spec: select(at(graph, "y"), at(graph, "x"), *spec)


Pick = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param("block1/act:0", ["block1/act:0"], id="tensor"),
        pytest.param("block1/act", ["block1/act:0"], id="operation"),
        pytest.param("inner/act", ["block1/inner/act:0"], id="operation, outer scope left out"),
        pytest.param("halves", ["block2/halves:0", "block2/halves:1"], id="all outputs"),
        pytest.param("block2/halves:1", ["block2/halves:1"], id="second output"),
        pytest.param("block1", ["block1/inner/act:0"], id="scope"),
        pytest.param("inner", ["block1/inner/act:0"], id="inner scope"),
        pytest.param("block2", ["block2/joined:0"], id="scope with several branches"),
        pytest.param("block[12]", ["block1/inner/act:0", "block2/joined:0"], id="scopes"),
        pytest.param("*/inner/a*", ["block1/inner/act:0"], id="part by part"),
        pytest.param("act", ["block1/act:0", "block1/inner/act:0"], id="operations"),
        pytest.param("b*k1*/act", ["block1/act:0"], id="no slash crossed if that matches"),
        pytest.param("bl*ner*t", ["block1/inner/act:0"], id="else slashes crossed"),
        pytest.param("h*:1", ["block2/halves:1"], id="pattern of tensors"),
    ],
)
def test_names(pick: Pick, item: str, expected: list[str]) -> None:
    assert sorted(pick(item)) == sorted(expected)


def test_tensors_and_operations(graph: tf.Graph, pick: Pick) -> None:
    tensor, op = at(graph, "block1/act"), graph.get_operation_by_name("block2/halves")
    assert pick(tensor, op) == ["block1/act:0", "block2/halves:0", "block2/halves:1"]


def test_each_tensor_once_in_order(graph: tf.Graph, pick: Pick) -> None:
    assert pick("inner", "block1/act", at(graph, "block1/inner/act")) == [
        "block1/inner/act:0",
        "block1/act:0",
    ]


def test_pattern_takes_what_can_be_a_checkpoint(pick: Pick) -> None:
    assert pick("block2/*") == ["block2/halves:0", "block2/halves:1", "block2/joined:0"]


def test_variables_as_xs(graph: tf.Graph) -> None:
    with graph.as_default():
        (w,) = v1.global_variables()
    assert select(at(graph, "y"), [w], "block1/act") == ["block1/act:0"]


def test_reference_variables_as_xs() -> None:
    with tf.Graph().as_default():
        w = v1.get_variable("w", [4], use_resource=False)
        y = tf.sin(tf.tanh(w, name="act"))
        assert select(y, [w], "act") == ["act:0"]


def test_captured_variable_and_tensor_as_xs() -> None:
    w = tf.Variable(tf.ones([4]))
    found = []

    @tf.function
    def f(x: tf.Tensor) -> tf.Tensor:
        def branch() -> tf.Tensor:
            y = tf.sin(tf.tanh(x * w, name="act"))
            found.append((select(y, [w], "act"), select(y, [x], "act")))
            return y

        return tf.cond(tf.reduce_sum(x) > 0, branch, branch)

    f(tf.ones([4]))
    assert found
    for by_variable, by_tensor in found:
        assert by_variable == by_tensor
        assert len(by_tensor) == 1


def test_x_that_is_computed_may_be_a_checkpoint(graph: tf.Graph) -> None:
    h = at(graph, "block1/act")
    assert select(at(graph, "y"), [at(graph, "x"), h], h) == ["block1/act:0"]


def test_y_on_the_way_to_another_y_may_be_a_checkpoint(graph: tf.Graph) -> None:
    h, y = at(graph, "block1/act"), at(graph, "y")
    n = len(graph.get_operations())
    assert resolve(graph, n, [h], [h, y], [at(graph, "x")]) == [h]


def test_overridden_gradient_counts() -> None:
    tf.RegisterGradient("PassesAfterAll")(lambda op, grad: grad)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4])
        h = tf.tanh(x, name="act")
        with graph.gradient_override_map({"StopGradient": "PassesAfterAll"}):
            y = tf.sin(tf.stop_gradient(h))
        assert select(y, x, "act") == ["act:0"]


def test_second_computation_sees_the_graph_as_built() -> None:
    # In the rewired graph, the first gradient reads a clone of the named tensor.
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [1000])
        for _ in range(16):
            y = tf.sin(y)
        (slope,) = ms.gradients(y, x, checkpoints="memory")
        for k in (2, 5, 10):
            assert select(slope, x, f"Sin_{k}") == [f"Sin_{k}:0"]


def test_readers_in_another_backward_pass_do_not_make_an_output() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8])
        with tf.name_scope("block"):
            y = tf.sin(tf.tanh(tf.sin(x)), name="out")
        z = tf.tanh(y)
        tf.gradients(z, x)
        assert select(z, x, "block") == ["block/out:0"]


class Scopes:
    """Layers as Keras calls them: it enters a layer's scope before the call as well, so that the
    ops of the call are in a scope with a number."""

    @staticmethod
    def keras(*layers: str) -> tuple[tf.Tensor, tf.Tensor]:
        x = y = v1.placeholder(tf.float32, [4])
        for layer in layers:
            with tf.name_scope(layer):
                pass
            with tf.name_scope(layer):
                y = tf.tanh(y)
        return tf.sin(y), x


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("dense", ["dense_1/Tanh:0"]),
        ("dense_1", ["dense_1_2/Tanh:0"]),
        ("dense_2", ["dense_2_1/Tanh:0"]),
        ("dense_?", ["dense_1_2/Tanh:0", "dense_2_1/Tanh:0"]),
        ("dense*", ["dense_1/Tanh:0", "dense_1_2/Tanh:0", "dense_2_1/Tanh:0"]),
        ("dense_1_2", ["dense_1_2/Tanh:0"]),
    ],
)
def test_layer_names_as_keras_makes_scopes_of_them(item: str, expected: list[str]) -> None:
    with tf.Graph().as_default():
        y, x = Scopes.keras("dense", "dense_1", "dense_2")
        assert select(y, x, item) == expected


def test_a_layer_called_twice_means_both_calls() -> None:
    with tf.Graph().as_default():
        y, x = Scopes.keras("shared", "shared")
        assert select(y, x, "shared") == ["shared_1/Tanh:0", "shared_3/Tanh:0"]


@pytest.mark.parametrize("item", ["block", "block_1", "block_2"])
def test_plain_scopes_keep_their_numbers(item: str) -> None:
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [4])
        for _ in range(3):
            with tf.name_scope("block"):
                y = tf.tanh(y)
        assert select(tf.sin(y), x, item) == [f"{item}/Tanh:0"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("blokc1", r"'blokc1': matches nothing.*did you mean 'block1'"),
        ("nope_*", r"'nope_\*': matches nothing"),
        ("block1/act:7", r"'block1/act:7': matches nothing"),
        ("unrelated", r"'unrelated': means 'unrelated:0', which is not between xs and ys"),
        ("x", r"'x': means 'x:0', which is one of xs"),
        ("y", r"'y': means 'y:0', which is one of ys"),
        ("w", r"'w': .*variable's handle"),
        ("no_gradient", r"'no_gradient': .*has no gradient.*stop_gradient"),
        ("index", r"'index': .*int64.*no gradient"),
    ],
)
def test_unusable_names(pick: Pick, item: str, message: str) -> None:
    with pytest.raises(ms.errors.SelectionError, match=message) as caught:
        pick(item)
    assert caught.value.argument == "checkpoints"
    assert caught.value.value == item


def test_one_bad_item_among_good_ones(pick: Pick) -> None:
    with pytest.raises(ms.errors.SelectionError, match="unrelated"):
        pick("block1", "unrelated")


def test_skipped_items_are_noted_while_another_is_of_use(graph: tf.Graph) -> None:
    skipped: dict[int, ms.errors.SelectionError] = {}
    y, x = at(graph, "y"), at(graph, "x")
    n = len(graph.get_operations())
    found = resolve(graph, n, ["unrelated", "block1"], [y], [x], skipped=skipped)
    assert [t.name for t in found] == ["block1/inner/act:0"]
    assert list(skipped) == [0]


def test_long_list_takes_linear_time() -> None:
    # Each name was once compared with each op: 9 million comparisons here, half a minute.
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [1])
        for k in range(3000):
            with tf.name_scope(f"layer{k}"):
                y = tf.tanh(y)
        names = [f"layer{k}" for k in range(2999)]
        assert len(select(y, x, *names)) == 2999


def test_deep_graph_needs_no_recursion() -> None:
    with tf.Graph().as_default():
        x = y = v1.placeholder(tf.float32, [1])
        for _ in range(5000):
            y = tf.tanh(y)
        assert select(y, x, "Tanh_2500") == ["Tanh_2500:0"]
