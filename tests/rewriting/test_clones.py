"""TensorFlow follows schedules that recompute ops several times: the same bits, within the promised
memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from graph_tools.memory.measure import in_fresh_process, measure_peak
from memsaving_gradients.engine.driver import attempts
from memsaving_gradients.engine.planning.outcome import Outcome
from memsaving_gradients.engine.site.simulations import simulate_plain
from memsaving_gradients.planners.meter import Found
from memsaving_gradients.planners.proposal import Proposal
from memsaving_gradients.reports.describe import describe
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.checker import check_schedule
from tests.helpers.fresh import fresh
from tests.helpers.random_programs import (
    IN_ANY_ORDER,
    KINDS,
    Program,
    Weights,
    adds_in_any_order,
    build,
    inputs,
    programs,
)
from tests.helpers.sampling import examples
from tests.helpers.schedules import forgetful, halving
from tests.helpers.support import assert_identical, exact_arithmetic, numbers

v1 = tf.compat.v1

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")

_fast = settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_thousand = settings(
    max_examples=examples(1000), deadline=None, suppress_health_check=list(HealthCheck)
)


class Scheduled:
    """A replacement for the engine's planner, in which ``make`` returns the schedule of a captured
    step."""

    def __init__(self, make) -> None:
        self.make = make
        self.seen = []

    def __enter__(self) -> Scheduled:
        self.planned = attempts.by_mode
        attempts.by_mode = self._by_mode
        return self

    def __exit__(self, *_: object) -> None:
        attempts.by_mode = self.planned

    def _by_mode(self, site, mode):
        step = site.capture()
        schedule = self.make(step)
        check_schedule(step.graph, schedule)
        self.seen.append((step, schedule))
        proposal = Proposal(schedule, {}, simulate(step.graph, schedule))
        found = Found(proposal, proposal.peak, None)
        plan = describe(
            step,
            found,
            mode="named",
            planner="the test's own",
            batch=1,
            xla=site.xla,
            packed=False,
            before=simulate_plain(site, step),
        )
        return Outcome(step, proposal, plan)


def randomly(seed: int, forget: float):
    def make(step):
        merging = Merging(step)
        alone = {op for op in range(step.graph.first_backward) if merging.merges(op)}
        return forgetful(step.graph, seed, forget=forget, alone=alone, chained=bool(seed % 2))

    return make


_weights: list[Weights] = []


def _shared_weights() -> Weights:
    if not _weights:
        _weights.append(Weights())
    return _weights[0]


def _gradients(program: Program, make, *, xla: bool = False):
    spy = Scheduled(make)
    unordered = []
    tf.random.set_seed(3)

    @tf.function(autograph=False)
    def step(first, side, indices):
        built = build(program, _shared_weights(), first, side, indices)
        if make is None:
            return tf.gradients(built.losses, built.xs)
        forward = len(built.losses[0].graph.get_operations())
        with spy:
            grads = ms.gradients(built.losses, built.xs, xla=xla)
        unordered.append(adds_in_any_order(built.losses[0].graph, forward))
        return grads

    return step(*inputs()), spy.seen, unordered


def _check(program: Program, seed: int, forget: float, *, xla: bool = False) -> None:
    plain, _, _ = _gradients(program, None)
    ours, _, unordered = _gradients(program, randomly(seed, forget), xla=xla)
    for a, b in zip(plain, ours, strict=True):
        assert type(a) is type(b)
        if a is None:
            continue
        for p, q in [(a.values, b.values)] if isinstance(a, tf.IndexedSlices) else [(a, b)]:
            p, q = p.numpy(), q.numpy()
            if any(unordered):
                largest = max(1.0, np.abs(p).max(initial=0))
                assert np.abs(p - q).max(initial=0) <= IN_ANY_ORDER * largest
            else:
                assert p.tobytes() == q.tobytes(), np.abs(p - q).max()


_cases = (programs(), st.integers(0, 2**32), st.sampled_from([0.2, 0.5, 0.8]))


@given(*_cases)
@_fast
def test_random_programs(exact, program, seed, forget):
    _check(program, seed, forget)


#: On some processors, oneDNN and Eigen round this small program differently.
SMALL = Program((("unary", 0, 0, 0), ("unary", 0, 0, 0), ("matmul", 0, 0, 0)), (0,), False)


@pytest.mark.hypothesis
def test_random_programs_behind_data_gates():
    # TensorFlow compiles the ops of conditionals apart, without oneDNN's kernels.
    onednn_off = {"TF_ENABLE_ONEDNN_OPTS": "0"}
    count = in_fresh_process(f"{__name__}:behind_data_gates", {"count": examples(10)}, onednn_off)
    assert count >= examples(10)


def behind_data_gates(count: int) -> int:
    """Compare random programs whose clones wait for data; return how many were compared."""
    compared = []

    @example(SMALL, 0, 0.3)
    @given(programs(most=14), st.integers(0, 2**32), st.sampled_from([0.3, 0.7]))
    @settings(_fast, max_examples=count)
    def compare(program, seed, forget):
        _check(program, seed, forget, xla=True)
        compared.append(program)

    with exact_arithmetic():
        compare()
    return len(compared)


@pytest.mark.slow
@given(*_cases)
@_thousand
def test_a_thousand_random_programs(exact, program, seed, forget):
    _check(program, seed, forget)


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_each_instruction_alone_in_a_deep_program(exact, kind):
    steps = tuple((kind, k % 3, k, k + 1) for k in range(8))
    _check(Program(steps, (0, 2), True), 5, 0.6)


# --- Clones that survive the compilers


def _chain(length: int, width: int = 64):
    """Return a function of x for the loss of a chain of products and tanh."""
    weights = [numbers(f"w{k}", width, width, scale=width**-0.5) for k in range(length)]

    def loss(x):
        for w in weights:
            x = tf.tanh(tf.matmul(x, w))
        return tf.reduce_sum(tf.square(x))

    return loss


def _halving(step):
    return halving(step.graph)


def test_all_copies_survive_grappler():
    loss, x = _chain(16), numbers("x", 32, 64)
    spy = Scheduled(_halving)
    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.float32, x.shape)
        with spy:
            (grad,) = ms.gradients(loss(fed), fed)
        metadata = v1.RunMetadata()
        with v1.Session() as session:
            options = v1.RunOptions(output_partition_graphs=True)
            session.run(grad, {fed: x}, options=options, run_metadata=metadata)
        clones = {op.name for op in graph.get_operations() if _is_clone(op.name, op.type)}
    ((_, schedule),) = spy.seen
    assert len(clones) == schedule.clones > 32
    nodes = {node.name for part in metadata.partition_graphs for node in part.node}
    assert clones <= nodes


def _twice_at_once(step):
    """Recompute the whole forward pass twice, one after the other, before the first backward op.
    The backward ops read both copies in turn."""
    graph = step.graph
    border, losable = graph.first_backward, graph.losable
    again = [op for op in range(border) if any(losable[v] for v in graph.writes[op])]

    def reads(op, copy):
        return tuple(copy if losable[v] else 0 for v in graph.reads[op])

    clones = [Step(op, copy, reads(op, copy)) for copy in (1, 2) for op in again]
    readers = [op for op in range(border, graph.length) if graph.losable_reads[op]]
    which = {op: 1 + k % 2 for k, op in enumerate(readers)}
    backward = [Step(op, 0, reads(op, which.get(op, 0))) for op in range(border, graph.length)]
    return Schedule((*(Step(op) for op in range(border)), *clones, *backward))


@pytest.mark.parametrize("how", ["control", "data", "compiled"])
def test_two_copies_in_one_run_stay_two(exact, how):
    """Both copies read the same tensors: behind one gate, they would be merged."""
    x, w = tf.constant(numbers("x", 32, 64)), numbers("w", 64, 64, scale=0.2)

    def sines(x):
        for _ in range(6):
            x = tf.sin(tf.matmul(x, w))
        return x

    def step(x):
        y = sines(x)
        with Scheduled(_twice_at_once):
            return y, ms.gradients(y, x, xla=how != "control")[0]

    ours = tf.function(step, jit_compile=how == "compiled", autograph=False)
    compiled = how == "compiled"
    (plain,) = tf.function(
        lambda x: tf.gradients(sines(x), x), jit_compile=compiled, autograph=False
    )(x)
    if compiled:
        np.testing.assert_allclose(ours(x)[1], plain, rtol=0, atol=1e-5)
        text = ours.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        found = len(re.findall(r"= \S+ sine\(", text))
    else:
        with tf.Graph().as_default():
            fed = v1.placeholder(tf.float32, x.shape)
            fetched = step(fed)
            metadata = v1.RunMetadata()
            with v1.Session() as session:
                options = v1.RunOptions(output_partition_graphs=True)
                _, grad = session.run(fetched, {fed: x.numpy()}, options, metadata)
        np.testing.assert_array_equal(grad, plain)
        nodes = [node for part in metadata.partition_graphs for node in part.node]
        # Clones for XLA are in the branches of conditionals.
        nodes += [node for f in fed.graph.as_graph_def().library.function for node in f.node_def]
        found = sum(node.op == "Sin" for node in nodes)
    # The originals; four clones above the last copied product, and three above the last but one,
    # which the other copy is for. The gate of the second copy waits for the end of the first copy.
    assert 6 + 4 + 3 <= found <= 6 + 6 + 6


def _is_clone(name: str, kind: str) -> bool:
    return bool(re.search(r"_recomputed(_\d+)?$", name)) and kind != "NoOp"


def test_all_copies_survive_xla():
    loss, x = _chain(12), tf.constant(numbers("x", 128, 64))
    spy = Scheduled(_halving)

    @tf.function(jit_compile=True, autograph=False)
    def ours(x):
        with spy:
            return ms.gradients(loss(x), [x])

    @tf.function(jit_compile=True, autograph=False)
    def plain(x):
        return tf.gradients(loss(x), [x])

    (a,), (b,) = ours(x), plain(x)
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-5 * np.abs(b).max())
    kinds = [spy.seen[0][0].source.ops[e.op].type for e in spy.seen[0][1].steps if e.copy]

    def count(step, pattern):
        text = step.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        return len(re.findall(pattern, text))

    tanh = r"= \S+ tanh\("
    assert count(ours, tanh) - count(plain, tanh) == kinds.count("Tanh") > 12


# --- Memory


def _measure(length: int, size: int) -> dict[str, float]:
    """Return the peaks of a chain of tanh and of its plain gradients, in values, and whether they
    agree (in a fresh process)."""
    spy = Scheduled(_halving)
    tf.config.experimental.enable_op_determinism()
    found = {}
    values = {}
    for name, gradients in (("plain", tf.gradients), ("ours", ms.gradients)):
        with tf.Graph().as_default():
            start = v1.get_variable("start", initializer=numbers("start", size), use_resource=True)
            y = tf.convert_to_tensor(start)
            for _ in range(length):
                y = tf.tanh(y)
            with spy:
                (grad,) = gradients(y, [start])
            total = tf.reduce_sum(tf.square(grad))
            session = v1.Session()
            session.run(v1.global_variables_initializer())
        values[name] = session.run(grad)
        found[name] = measure_peak(lambda s=session, t=total: s.run(t)).peak / (4 * size)
        session.close()
    ((step, schedule),) = spy.seen
    return {
        **found,
        "simulated": simulate(step.graph, schedule).peak / (4 * size),
        "same": float(values["plain"].tobytes() == values["ours"].tobytes()),
        "most": float(max(entry.copy for entry in schedule.steps)),
    }


def test_branches_of_one_run_run_one_after_the_other():
    found = fresh("tests.rewriting.test_clones:_branches", {"how_many": 12, "size": 2**16})
    # With the branches in parallel, it is 3.7.
    assert found["ours"] <= found["simulated"] + 0.5


def test_memory_follows_a_recursive_schedule():
    arguments = {"length": 64, "size": 2**18}
    found = fresh("tests.rewriting.test_clones:_measure", arguments)
    assert found["same"]
    assert found["most"] >= 4
    assert found["plain"] >= 60
    assert found["ours"] <= 12
    assert found["ours"] <= found["simulated"] + 2


def _branches(how_many: int, size: int) -> dict[str, float]:
    """Return the peak of a run of clones of branches that widen, one after the other, in wide
    values (in a fresh process)."""
    wide = 16 * 4 * size

    def make(step):
        graph, ops = step.graph, step.source.ops
        border = graph.first_backward
        read = {
            int(graph.producer[v]) for op in range(border, graph.length) for v in graph.reads[op]
        }
        again, todo = set(), [op for op in read if op < border and graph.clonable[op]]
        while todo:
            op = todo.pop()
            if op not in again and any(graph.losable[v] for v in graph.writes[op]):
                again.add(op)
                todo += [int(graph.producer[v]) for v in graph.reads[op]]
        assert sum(ops[op].type == "Tile" for op in again) == how_many

        def reads(op):
            return tuple(int(int(graph.producer[v]) in again) for v in graph.reads[op])

        originals = [Step(op) for op in range(border)]
        clones = [Step(op, 1, reads(op)) for op in sorted(again)]
        backward = [Step(op, 0, reads(op)) for op in range(border, graph.length)]
        return Schedule((*originals, *clones, *backward))

    spy = Scheduled(make)
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=numbers("x", size), use_resource=True)
        y = value = tf.tanh(tf.convert_to_tensor(x))
        for k in range(how_many):
            # The originals wait for each other; clones have no control edges.
            with tf.control_dependencies([y]):
                shifted = value + float(k)
            spread = tf.reshape(tf.sin(tf.tile(shifted, [16])), [16, size])
            y = y + tf.stop_gradient(tf.reduce_mean(spread, 0)) * tf.sin(value)
        with spy:
            (grad,) = ms.gradients(y, [x])
        total = tf.reduce_sum(tf.square(grad))
        session = v1.Session()
        session.run(v1.global_variables_initializer())
    ((step, schedule),) = spy.seen
    found = measure_peak(lambda: session.run(total)).peak / wide
    return {"ours": found, "simulated": simulate(step.graph, schedule).peak / wide}


def late_filters(step):
    """Return a schedule with filter gradients last, each behind a clone of the layer's input."""
    graph, ops = step.graph, step.source.ops
    filters = [i for i, op in enumerate(ops) if op.type == "Conv2DBackpropFilter"]
    steps = [Step(i) for i in range(graph.length) if i not in filters]
    for i in filters:
        copied = [
            v
            for v in graph.reads[i]
            if graph.clonable[p := graph.producer[v]]
            and not graph.source[v]
            and p < graph.first_backward
        ]
        steps += [Step(int(graph.producer[v]), 1) for v in copied]
        steps.append(Step(i, 0, tuple(int(v in copied) for v in graph.reads[i])))
    return Schedule(tuple(steps))


@pytest.mark.parametrize(
    "behind", [tf.sin, lambda bias: tf.squeeze(tf.reshape(bias, [1, 1, 1, 8]))]
)
def test_nothing_waits_for_what_a_merged_bias_gradient_makes(exact, behind):
    """oneDNN makes one kernel of the gradients of a bias and of its filter. Ops that wait for
    results of the bias gradient do not change this."""
    x = tf.constant(numbers("images", 2, 8, 8, 8))
    filters = [tf.Variable(numbers(f"filter {i}", 3, 3, 8, 8, scale=0.1)) for i in range(3)]
    biases = [tf.Variable(numbers(f"bias {i}", 8)) for i in range(3)]

    def gradients(make):
        spy = Scheduled(make)

        @tf.function(autograph=False)
        def step(h):
            for weights, bias in zip(filters, biases, strict=True):
                h = tf.nn.bias_add(tf.nn.conv2d(tf.tanh(h), weights, 1, "SAME"), behind(bias))
            loss = tf.reduce_sum(h**2)
            if make is None:
                return tf.gradients(loss, filters + biases)
            with spy:
                return ms.gradients(loss, filters + biases)

        return step(x), spy.seen

    ours, seen = gradients(late_filters)
    assert any(step.copy for step in seen[0][1].steps)
    assert_identical(ours, gradients(None)[0], "filters last")
