"""The simulated execution of finished graphs: order, threads, views, constants that move."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools import capture
from graph_tools.grappler.constant_folding import folded
from graph_tools.memory import executor
from graph_tools.memory.executor import simulate_execution
from graph_tools.ops.views import viewed_input
from memsaving_gradients.engine.driver import attempts
from tests.helpers.fresh import fresh
from tests.helpers.processor import needs_bfloat16
from tests.helpers.support import normalized_network

UNIT = 4 * 2**14


def fed(*shape: int) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.float32, shape)


def peak(*targets: tf.Tensor) -> int:
    return simulate_execution(capture(targets), batch=1)[0].peak


def test_a_chain_holds_two_buffers_without_forwarding():
    with tf.Graph().as_default():
        y = fed(128, 128)
        for _ in range(6):
            y = tf.transpose(y)
        assert peak(y) == 2 * UNIT


def test_elementwise_ops_take_over_a_buffer_that_nobody_else_holds():
    with tf.Graph().as_default():
        y = tf.transpose(fed(128, 128))
        for _ in range(6):
            y = tf.sin(y)
        assert peak(y) == UNIT
        z = tf.sin(y)
        assert peak(tf.matmul(z, y)) == 3 * UNIT


def test_inputs_stay_while_an_op_runs_on_another_thread():
    with tf.Graph().as_default():
        x = fed(128, 128)
        slow = tf.matmul(tf.sin(x), tf.cos(x))
        graph = capture([slow])
    work = executor._work(graph, 1, ())
    order, until = executor._run(work, (1, 1))
    place = {graph.ops[op].type: k for k, op in enumerate(order)}
    sin, cos = (graph.position[name] for name in ("Sin", "Cos"))
    # Each of them begins before the other is done.
    assert until[sin] >= place["Cos"] and until[cos] >= place["Cos"]
    alone = executor._run(work, (1,))
    assert alone[1][sin] < alone[0].index(cos) or alone[1][cos] < alone[0].index(sin)


@pytest.mark.parametrize("slowness", [(1,), (1, 1), (1, 4), (4, 1, 1)])
def test_every_op_starts_once_and_after_all_that_it_waits_for_has_ended(slowness):
    with tf.Graph().as_default():
        x = y = fed(32, 32)
        for k in range(12):
            with tf.control_dependencies([y.op] if k % 3 else []):
                y = tf.matmul(tf.sin(y), tf.reshape(tf.cos(x), [32, 32])) + y
        grads = tf.gradients(y, x)
        graph = capture(grads)
    work = executor._work(graph, 1, ())
    order, until = executor._run(work, slowness)
    assert sorted(order) == list(range(len(graph.ops)))
    start = {op: k for k, op in enumerate(order)}
    for op, before in enumerate(work.before):
        assert all(until[other] < start[op] for other in before)


def test_worse_plays_are_the_peak_and_the_same_every_time():
    with tf.Graph().as_default():
        x = fed(64, 64)
        branches = []
        for _ in range(8):
            y = x
            for _ in range(4):
                y = tf.matmul(y, x)
            branches.append(tf.reduce_sum(y))
        graph = capture([tf.add_n(branches)])
    worst, even = simulate_execution(graph, batch=1)
    again, _ = simulate_execution(graph, batch=1)
    assert worst.peak >= even.peak
    assert np.array_equal(worst.bytes_alive, again.bytes_alive)
    assert worst.allocated_peak >= worst.peak


def test_a_pushed_constant_lets_a_product_run_early():
    with tf.Graph().as_default():
        x, y, z = (tf.sin(fed(8, 8)) for _ in range(3))
        inner = x * (y * z)
        graph = capture([inner * 0.5])
        plain = capture([tf.sin(x * y)])
    reads = folded(graph).reads

    def made_by(op: str) -> set[str]:
        return {graph.ops[graph.producer[v]].name for v in reads[graph.position[op]]}

    assert made_by("mul") == {"Sin_2"}
    assert made_by("mul_1") == {"Sin_1", "mul"}
    assert made_by("mul_2") >= {"Sin", "mul_1"}
    assert folded(plain).reads == list(plain.inputs)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_names_decide_which_factor_a_constant_joins(names):
    """Grappler sorts products' inputs by name before it moves constants; the runtime agrees."""
    with tf.Graph().as_default() as built:
        fed_ = [fed(64, 64), fed(64, 64)]
        x, y = (tf.sin(t, name=name) for t, name in zip(fed_, names, strict=True))
        result = tf.exp(0.5 * tf.multiply(x, y, name="product"), name="end")
        ops = capture([result])
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session(graph=built) as session:
            session.run(
                result,
                {t: np.ones(t.shape) for t in fed_},
                options=tf.compat.v1.RunOptions(output_partition_graphs=True),
                run_metadata=metadata,
            )
    (read,) = folded(ops).reads[ops.position["product"]]
    assert ops.ops[ops.producer[read]].name == "b"
    nodes = {node.name: node for part in metadata.partition_graphs for node in part.node}
    assert {name for name in nodes["product"].input if name in ("a", "b")} == {"b"}


def test_what_is_read_twice_keeps_its_constant_out():
    with tf.Graph().as_default():
        x, y = tf.sin(fed(8, 8)), tf.cos(fed(8, 8))
        product = x * y
        graph = capture([product * 0.5, tf.exp(product)])
    assert folded(graph).reads == list(graph.inputs)


def test_views_by_shape():
    with tf.Graph().as_default():
        rows, odd = fed(6, 32), fed(6, 3)
        many = tf.unstack(rows) + tf.split(rows, 2)
        views = [*many, rows[2:4], rows[1], tf.slice(rows, [2, 0], [1, 32]), rows * 1.0, rows + 0.0]
        copies = [
            *tf.unstack(rows, axis=1)[:2],
            *tf.split(rows, 2, axis=1),
            *tf.unstack(odd)[:2],
            rows[::2],
            rows[:, :16],
            rows * 2.0,
            1.0 - rows,
            0.0 + fed(1, 32) * fed(6, 1),
        ]
        assert all(viewed_input(t.op, t.op.outputs.index(t)) is not None for t in views)
        assert [t for t in copies[:-1] if viewed_input(t.op, 0) is not None] == []


def test_a_view_of_several_tensors_holds_none_of_them():
    # TensorFlow's own activations contain such views, for their custom gradients.
    def step(activation):
        with tf.Graph().as_default():
            x, slow = fed(128, 128), fed(512, 512)
            for _ in range(8):
                x = activation(tf.matmul(x, fed(128, 128)))
            return peak(x, tf.matmul(slow, tf.matmul(slow, tf.matmul(slow, slow))))

    assert step(tf.nn.silu) == step(lambda x: x * tf.sigmoid(x))


def run_views() -> list[bool]:
    """Return whether slices of several kinds have no buffer of their own at run time."""
    from benchmarks.allocation_trace import allocation_events

    answers = []
    for cut in (lambda x: tf.unstack(x)[1], lambda x: x[1:3], lambda x: x[:, :32]):

        @tf.function
        def step(x, cut=cut):
            return tf.reduce_sum(tf.cos(cut(tf.transpose(x))))

        x = tf.ones([64, 64])
        for _ in range(2):
            step(x)
        events = allocation_events(lambda step=step, x=x: step(x).numpy())
        names = {event.op for event in events if event.requested >= 256}
        answers.append(any("unstack" in n or "strided_slice" in n for n in names))
    return answers


def test_the_runtime_agrees_on_slices():
    own = fresh("tests.graph_tools.test_executor:run_views")
    assert own == [False, False, True]


def test_held_gradients_live_to_the_end():
    with tf.Graph().as_default():
        x = fed(128, 128)
        y = tf.transpose(x)
        graph = capture([tf.transpose(tf.matmul(y, tf.reduce_sum(y) * tf.ones([128, 1])))])
        value = graph.value(y)
    free = simulate_execution(graph, batch=1)[0].bytes_alive[-1]
    held = simulate_execution(graph, batch=1, held=[value])[0].bytes_alive[-1]
    assert held - free == UNIT


def test_a_plan_tells_what_the_rewritten_graph_will_take():
    with tf.Graph().as_default() as graph:
        x = y = fed(128, 128)
        for _ in range(30):
            y = tf.sin(tf.transpose(y))
        ms.gradients(y, x, checkpoints="memory")
    (plan,) = ms.plans(graph)
    assert plan.peak < plan.peak_plain
    # Clones, gates and held edges are in the timeline.
    assert len(plan.timeline) > len(plan.timeline_plain)
    assert plan.peak == plan.timeline.max()


@pytest.mark.parametrize("planner", ["chain", pytest.param("auto", marks=pytest.mark.slow)])
def test_where_buffers_are_large_a_step_runs_as_planned(planner, monkeypatch):
    """A buffer is a quarter of the peak. Ops that could run early, and would hold one more buffer,
    wait for their turn all the same."""
    peaks = []
    follow = attempts.follow

    def spy(site, outcome):
        followed = follow(site, outcome)
        peaks.append((outcome.proposal.peak, followed.outcome.plan.peak))
        return followed

    monkeypatch.setattr(attempts, "follow", spy)
    # A thread that is four times slower than the other may still be at the loss when the backward
    # pass is far on.
    monkeypatch.setattr(executor, "RUNS", executor.RUNS[:1])
    with tf.Graph().as_default():
        x, y = normalized_network()
        ms.gradients(y, x, budget=0.4, planner=planner)
    assert peaks
    assert all(simulated <= 1.02 * planned for planned, simulated in peaks)


def run_normalizations(dtype: str) -> dict[str, int]:
    """Return the simulated and the requested bytes of a chain of convolutions, batch normalizations
    and ReLUs."""
    from benchmarks.allocation_trace import allocation_events, requested_peak

    filters = tf.Variable(tf.ones([8, 1, 1, 32, 32], dtype) / 32)
    simulated = []

    @tf.function(autograph=False)
    def step(x):
        y = x
        for k in range(8):
            y = tf.nn.conv2d(y, filters[k], 1, "SAME")
            y, *_ = tf.compat.v1.nn.fused_batch_norm(y, tf.ones(32), tf.zeros(32))
            y = tf.nn.relu(y)
        grads = tf.gradients(tf.reduce_sum(y), x)
        simulated.append(simulate_execution(capture(grads), batch=1)[0].peak)
        return grads[0]

    batch = tf.cast(tf.random.stateless_normal([16, 32, 32, 32], [1, 2]), dtype)
    for _ in range(2):
        step(batch).numpy()
    measured = requested_peak(allocation_events(lambda: step(batch).numpy()))
    return {"simulated": simulated[0], "measured": measured}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_what_a_normalization_reserves_for_its_gradient_is_counted(dtype):
    bytes_ = fresh("tests.graph_tools.test_executor:run_normalizations", {"dtype": dtype})
    assert bytes_["simulated"] == pytest.approx(bytes_["measured"], rel=0.02)


@pytest.mark.parametrize(("given", "simulated"), [(1, 2), (2, 2), (4, 4), (64, 64)])
def test_as_many_threads_as_the_process_has(monkeypatch, given, simulated):
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: given)
    run, seen = executor._run, set()

    def spied(work, slowness):
        seen.add(len(slowness))
        return run(work, slowness)

    monkeypatch.setattr(executor, "_run", spied)
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        graph = capture([tf.matmul(x, x)])
    executor.simulate_execution(graph, batch=1)
    assert seen == {simulated}
