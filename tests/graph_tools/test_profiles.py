"""Measured costs: single kernels, the properties that tell them apart, and the cache on disk."""

from __future__ import annotations

import itertools
import json
import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf

from graph_tools import capture
from graph_tools.costs import kernels, profiles
from graph_tools.costs.cache import ENVIRONMENT, CostCache, describe
from graph_tools.costs.estimates import START_SECONDS
from graph_tools.costs.kernels import Measured
from graph_tools.costs.parameters import parameters
from graph_tools.errors import CacheWarning
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import capture_step

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    return tmp_path


@pytest.fixture
def counted(monkeypatch):
    """Count kernels instead of running them; kernel number n takes n microseconds."""
    calls = []

    def measure(kernel, device):
        calls.append(kernel)
        return Measured(len(calls) * 1e-6, 10 * len(calls))

    monkeypatch.setattr(kernels, "measure", measure)
    monkeypatch.setattr(profiles, "ROUNDS", 1)
    return calls


def place(*shape, dtype=tf.float32):
    return v1.placeholder(dtype, shape)


def layers(*widths, batch=None):
    """Return the captured graph of a chain of matrix products and activations."""
    with tf.Graph().as_default():
        x = place(batch, widths[0])
        for a, b in itertools.pairwise(widths):
            x = tf.tanh(tf.matmul(x, place(a, b)))
        return capture([x])


def of_type(graph, kind):
    return [i for i, op in enumerate(graph.ops) if op.type == kind]


# --- Kernels that are measured


def test_a_larger_product_takes_longer():
    graph = layers(64, 64, 1024, batch=256)
    small, large = profiles.measured(graph, 1).seconds[of_type(graph, "MatMul")]
    assert 0 < small < large < 10


def test_equal_kernels_are_measured_once(counted):
    graph = layers(*[128] * 20)
    costs = profiles.measured(graph, 32)
    assert sorted(kernel.kind for kernel in counted) == ["MatMul", "Tanh"]
    assert len(set(costs.seconds[of_type(graph, "MatMul")])) == 1
    assert len(set(costs.workspace[of_type(graph, "Tanh")])) == 1


def test_what_takes_most_is_measured_again_after_all_others(monkeypatch):
    """So another process that slows down a few kernels in a row decides nothing."""
    graph = layers(128, 128, 64, 1, batch=1 << 14)
    calls = []

    def measure(kernel, device):
        calls.append((kernel.kind, *kernel.inputs[-1].shape))
        return Measured(1e-3 if len(calls) > 3 else 2e-3, 10)

    monkeypatch.setattr(kernels, "measure", measure)
    costs = profiles.measured(graph, 1)
    often = {call: calls.count(call) for call in calls}
    assert often["MatMul", 128, 128] == often["MatMul", 128, 64] == profiles.ROUNDS
    assert often["Tanh", 1 << 14, 1] == 1
    assert calls[: len(often)] == list(often)
    assert set(costs.seconds[of_type(graph, "MatMul")][:2]) == {1e-3 + START_SECONDS}
    # Costs on disk are not measured again.
    before = len(calls)
    profiles.measured(graph, 1)
    assert len(calls) == before


def test_shapes_dtypes_and_attributes_tell_kernels_apart(counted):
    with tf.Graph().as_default():
        a, b, c = place(64, 64), place(64, 32), place(64, 64, dtype=tf.float64)
        graph = capture(
            [a @ a, tf.matmul(a, a, transpose_a=True), a @ b, c @ c, tf.matmul(a, a, name="again")]
        )
    profiles.measured(graph, 1)
    assert len(counted) == 4


def test_parameters_tell_kernels_apart_and_data_do_not(counted):
    with tf.Graph().as_default():
        x = place(64, 64)
        graph = capture(
            [tf.reduce_sum(x, 0), tf.reduce_sum(x, 1), x * tf.fill([64, 64], 2.0), x * x]
        )
    profiles.measured(graph, 1)
    assert sorted(kernel.kind for kernel in counted) == ["Mul", "Sum", "Sum"]


def test_the_batch_is_put_in(counted):
    graph = layers(256, 256)
    profiles.measured(graph, 7)
    (product,) = (kernel for kernel in counted if kernel.kind == "MatMul")
    assert product.inputs[0].shape == (7, 256) and product.outputs == ((tf.float32, (7, 256)),)
    profiles.measured(graph, 8)
    assert len(counted) == 4


def test_what_cannot_run_alone_is_estimated(counted):
    with tf.Graph().as_default():
        x = place(256, 256)
        unknown = place(None, None)
        y = tf.random.uniform([256, 256]) * (x @ x) + tf.tanh(unknown)
        variable = tf.Variable(tf.zeros([256, 256]))
        graph = capture([y, tf.gather(variable, [1, 2])])
    costs = profiles.measured(graph, 4)
    kinds = {kernel.kind for kernel in counted}
    assert "MatMul" in kinds and kinds.isdisjoint({"RandomUniform", "Tanh", "ResourceGather"})
    for kind in ("RandomUniform", "Tanh", "ResourceGather"):
        (op,) = of_type(graph, kind)
        assert costs.seconds[op] > 0 and costs.workspace[op] == 0
    for kind in ("Placeholder", "Const", "VarHandleOp"):
        assert not costs.seconds[of_type(graph, kind)].any()


def test_what_is_estimated_is_scaled_by_what_was_measured(counted):
    with tf.Graph().as_default():
        x = place(512, 512)
        graph = capture([tf.tanh(x) * tf.tanh(place(None, None))])
    static = profiles.estimated(graph, 4).seconds
    found = profiles.measured(graph, 4).seconds
    known, unknown = of_type(graph, "Tanh")
    assert found[known] - START_SECONDS in (pytest.approx(1e-6), pytest.approx(2e-6))
    assert found[unknown] < static[unknown]


def test_a_kernel_that_fails_is_estimated_and_not_tried_again():
    with tf.Graph().as_default():
        sizes = tf.cast(place(4), tf.int32)  # only known in the step
        grad = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=sizes,
            filter=place(3, 3, 8, 8),
            out_backprop=place(2, 16, 16, 8),
            strides=[1, 1, 1, 1],
            padding="SAME",
        )
        grad.set_shape([2, 16, 16, 8])
        graph = capture([grad])
    (op,) = of_type(graph, "Conv2DBackpropInput")
    assert profiles.measured(graph, 1).seconds[op] > 0
    (entry,) = (v for k, v in CostCache(describe("CPU:0")).entries.items() if "Conv" in k)
    assert entry is None


def test_gradients_of_convolutions_and_pooling_run_alone():
    with tf.Graph().as_default():
        x, w = place(None, 32, 32, 16), place(3, 3, 16, 16)
        y = tf.nn.max_pool2d(tf.nn.conv2d(x, w, 1, "SAME"), 2, 2, "SAME")
        graph = capture(tf.gradients(y, [x, w]))
    profiles.measured(graph, 2)
    entries = CostCache(describe("CPU:0")).entries
    for kind in ("Conv2D(", "Conv2DBackpropInput(", "Conv2DBackpropFilter(", "MaxPoolGrad("):
        (entry,) = (entry for key, entry in entries.items() if key.startswith(kind))
        assert entry is not None, kind


def test_workspace_is_what_a_kernel_allocates_beside_its_outputs():
    # A convolution over three dimensions is a matrix product of patches, which are gathered first.
    with tf.Graph().as_default():
        x, w = place(2, 8, 16, 16, 8), place(3, 3, 3, 8, 8)
        y = tf.nn.conv3d(x, w, [1, 1, 1, 1, 1], "SAME")
        top = tf.math.top_k(place(64, 1024), 8).values
        graph = capture([*tf.gradients(y, [x, w]), top, tf.tanh(place(1000))])
    costs = profiles.measured(graph, 1)
    assert (costs.workspace >= 0).all()
    assert (costs.workspace < 1 << 30).all()
    assert not costs.workspace[of_type(graph, "Tanh")].any()


def test_profiling_works_while_a_function_is_traced():
    @tf.function
    def f(x):
        y = tf.tanh(x @ x)
        found.append(profiles.measured(capture([y]), 1).seconds.sum())
        return y

    found = []
    f(tf.ones([256, 256]))
    assert found[0] > 0


# --- Parameters


def test_integers_that_shapes_decide_are_known():
    with tf.Graph().as_default():
        x, other = place(None, 3, 5), place(None, 7)
        shapes = tf.raw_ops.ShapeN(input=[x, other], out_type=tf.int32)
        last = shapes[1][1:] * 2
        turned = tf.raw_ops.InvertPermutation(x=tf.constant([2, 0, 1]))
        data = tf.cast(place(2), tf.int32)
        graph = capture([last, turned, tf.size(x), tf.rank(x), data + shapes[0][:2]])
    found = parameters(graph, 4)
    assert found[graph.value(shapes[0])].tolist() == [4, 3, 5]
    assert found[graph.value(last)].tolist() == [14]
    assert found[graph.value(turned)].tolist() == [1, 2, 0]
    assert graph.value(data) not in found


# --- The cache


def test_a_second_time_nothing_is_measured(counted):
    graph = layers(256, 128, 64)
    first = profiles.measured(graph, 16)
    many = len(counted)
    second = profiles.measured(graph, 16)
    assert many == len(counted) > 0
    np.testing.assert_array_equal(first.seconds, second.seconds)
    np.testing.assert_array_equal(first.workspace, second.workspace)


@pytest.mark.parametrize("what", ["version", "device"])
def test_another_version_or_device_is_measured_anew(counted, monkeypatch, folder, what):
    graph = layers(256, 128)
    profiles.measured(graph, 16)
    many = len(counted)
    if what == "version":
        monkeypatch.setattr(tf, "__version__", "9.9.9")
    else:
        monkeypatch.setattr(profiles, "describe", lambda device: "a faster one")
    profiles.measured(graph, 16)
    assert len(counted) == 2 * many
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 0}',
        "\0",
        '{"kernels": {"a": [1]}}',
        '{"kernels": {"a": [-1, 0]}}',
        '{"kernels": {"a": [NaN, 0]}}',
        '{"kernels": []}',
    ],
)
def test_a_file_that_cannot_be_read_is_written_anew(counted, content):
    graph = layers(256, 128)
    profiles.measured(graph, 16)
    many = len(counted)
    cache = CostCache(describe("CPU:0"))
    if "kernels" in content:
        content = json.dumps({**cache.header, **json.loads(content)})
    cache.path.write_text(content, encoding="utf-8")
    with pytest.warns(CacheWarning, match="overwritten"):
        profiles.measured(graph, 16)
    assert len(counted) == 2 * many
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profiles.measured(graph, 16)
    assert len(counted) == 2 * many


def test_a_folder_that_cannot_be_written_to_is_said_once(counted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match=ENVIRONMENT):
        costs = profiles.measured(layers(256, 128), 16)
    assert costs.seconds.sum() > 0


def test_writers_keep_what_others_wrote():
    one, other = CostCache("a device"), CostCache("a device")
    one.entries["a"] = Measured(1.0, 0)
    other.entries["b"] = None
    one.write()
    other.write()
    assert CostCache("a device").entries == {"a": Measured(1.0, 0), "b": None}


def test_many_writers_never_leave_half_a_file(folder):
    def work(number):
        for k in range(10):
            cache = CostCache("a device")  # a warning, an error here, if it reads half a file
            cache.entries[f"{number} {k}" + "x" * 10_000] = Measured(float(k), number)
            cache.write()

    failures = []
    monitor = threading.excepthook
    threading.excepthook = failures.append
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = monitor
    assert not failures
    assert [path.suffix for path in folder.iterdir()] == [".json"]


# --- Limits


def test_the_most_expensive_kernels_come_first_and_the_time_is_limited(counted, monkeypatch):
    graph = layers(16, 256, 1024, 1024, batch=512)
    with monkeypatch.context() as patch:
        patch.setattr(profiles, "LIMIT", 0.0)
        profiles.measured(graph, 1)
    assert not counted
    profiles.measured(graph, 1)
    sizes = [kernel.inputs[1].shape for kernel in counted if kernel.kind == "MatMul"]
    assert sizes[:2] == [(1024, 1024), (256, 1024)]


def test_an_interruption_keeps_what_was_measured(monkeypatch):
    counted = []

    def measure(kernel, device):
        if counted:
            raise KeyboardInterrupt
        counted.append(kernel)
        return Measured(1e-6, 0)

    monkeypatch.setattr(kernels, "measure", measure)
    graph = layers(32, 512, 2048, batch=512)
    with pytest.raises(KeyboardInterrupt):
        profiles.measured(graph, 1)
    entries = CostCache(describe("CPU:0")).entries
    assert any("512,2048" in key for key in entries)  # kept, though measuring was stopped


def test_a_profiled_step_has_measured_costs(counted):
    with tf.Graph().as_default():
        x, w = place(64, 64), place(64, 64)
        y = tf.tanh(x @ w)
        border = graphs.creation_index(y.op) + 1
        options = {"batch": 1, "hold_gradients": False, "may_chain": False}
        grads = tf.gradients(y, [w])
        plain = capture_step(border, [y], grads, **options)
        step = capture_step(border, [y], grads, **options, profile=True)
    assert counted
    (product,) = (i for i in of_type(step.source, "MatMul") if i < step.graph.first_backward)
    assert step.graph.workspace[product] > 0 and not plain.graph.workspace.any()
    assert step.graph.seconds[product] != plain.graph.seconds[product]
