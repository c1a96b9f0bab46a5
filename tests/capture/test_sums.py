"""Chains of sums: which sums become chains, their bits (as from TensorFlow's kernel, for any order
of addends), and their memory of few addends at a time."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.capture.sums import Sums
from memsaving_gradients.capture.training_step import capture_step
from memsaving_gradients.engine.planning import by_mode
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.random_graphs import rich
from tests.helpers.sampling import covering, examples
from tests.helpers.schedules import forgetful
from tests.helpers.support import arithmetic_rewriting, session_config

v1 = tf.compat.v1
WIDTH = 64


@pytest.mark.parametrize(
    ("many", "kind"),
    # The first numbers, which the fast suite tries with all dtypes, make several groups of addends.
    covering([64, 33, *reversed(range(3, 20))], ["float32", "float64", "float16", "bfloat16"]),
)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.usefixtures("exact")
def test_bits_are_those_of_the_kernel(many: int, in_order: bool, kind: str) -> None:
    dtype = tf.as_dtype(kind)
    numbers = np.random.default_rng(many).standard_normal((many, 257)).astype(dtype.as_numpy_dtype)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(dtype, numbers.shape)
        y = tf.reduce_sum(x)
        border = len(graph.get_operations())
        addends = [tf.tanh(x[k]) for k in range(many)]
        total = tf.add_n(addends)
        step = capture_step(border, [y], [total], batch=1, hold_gradients=False, may_chain=True)
        ops, (position,) = step.source.ops, step.graph.sums
        sums = Sums(step.graph, ops, {position})
        made = [ops.index(addend.op) for addend in addends]
        if not in_order:
            random.Random(many).shuffle(made)
        added = [sums.add(k, ops[k]) for k in made]
        chain = sums.total(position)
        with v1.Session(config=session_config()) as session:
            # Each runs alone: the kernel begins with the first input that no other op reads.
            found, expected = (session.run(one, {x: numbers}) for one in (chain, total))
    assert found.tobytes() == expected.tobytes()
    if in_order:
        # Each addend is added at once, except those that begin the sum or a group.
        assert sum(op is None for op in added) == 1 + (many - 1) // 8 - (many % 8 == 1)
    assert sums.last_of(made[0], numbers.nbytes) == [chain.op]
    assert not sums.last_of(made[0], numbers.nbytes + 1)
    assert not sums.last_of(position, 0)


@pytest.mark.parametrize("sorts", [True, False])
@pytest.mark.parametrize("many", [3, 5, 9])
def test_bits_of_short_sums_are_those_of_plain_training(
    many: int, sorts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grappler sorts addends by name where its arithmetic rewriting is on."""
    # These sums are far from the peak, where planners would leave them alone.
    monkeypatch.setattr(by_mode, "left_alone", lambda graph, proposal, budget: proposal)
    numbers = np.random.default_rng(many).standard_normal((64, 257)).astype(np.float32)
    outputs = []
    with arithmetic_rewriting(sorts):
        for gradients, options in ((tf.gradients, {}), (ms.gradients, {"checkpoints": "memory"})):
            with tf.Graph().as_default() as graph:
                x = v1.placeholder(tf.float32, numbers.shape)
                h = x
                for _ in range(8):
                    h = tf.sin(h)
                # The gradients get their names from these ops.
                used = [tf.tanh(h * (0.1 + 0.3 * k), name="hfgbecdia"[k]) for k in range(many)]
                found = gradients(tf.add_n([tf.reduce_sum(one) for one in used]), x, **options)
                if gradients is ms.gradients:
                    names = [op.name for op in graph.get_operations()]
                    assert "accumulate" in names
                with v1.Session(config=session_config(arithmetic=sorts)) as session:
                    outputs.append(session.run(found, {x: numbers})[0].tobytes())
    assert outputs[0] == outputs[1]


def test_addends_wait_until_the_last_one_is_added() -> None:
    steps = 48
    with tf.Graph().as_default() as graph:
        weights = v1.placeholder(tf.float32, [WIDTH, WIDTH])
        state = v1.placeholder(tf.float32, [2, WIDTH])
        for _ in range(steps):
            state = tf.tanh(state @ weights)
        ms.gradients(tf.reduce_sum(state), weights, budget=0.5)
    (plan,) = ms.plans(graph)
    addend = 4 * WIDTH * WIDTH
    assert plan.peak_plain > steps * addend
    # The executor holds the states, the sum, its last group, an addend, and little else.
    assert plan.peak < steps * 2 * WIDTH * 4 + 5 * addend
    assert plan.clones == 0


def captured(build, short_sums: bool = True):
    """Capture the step behind one forward tensor and the results of ``build``: the total, and
    others."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [8, WIDTH])
        y = tf.tanh(x) * 2.0
        border = len(graph.get_operations())
        total, *others = build(y)
        return capture_step(
            border,
            [y],
            [total, *others],
            batch=1,
            hold_gradients=False,
            may_chain=True,
            short_sums=short_sums,
        )


def normalized(y):
    """Return a sum as in a normalization's gradient: of three large addends, the second is read
    again to compute the third."""
    second = tf.sin(y)
    third = tf.reduce_sum(second) * tf.ones_like(y)
    return [tf.add_n([tf.cos(y), second, third])]


def test_few_large_addends_are_chained_but_not_by_xla() -> None:
    step = captured(normalized)
    (position,) = step.graph.sums
    assert step.source.ops[position].type == "AddN"
    assert not captured(normalized, short_sums=False).graph.sums


def test_additions_are_made_where_the_addends_are() -> None:
    def build(y):
        with tf.device("/GPU:1"):
            return [tf.add_n([f(y) for f in (tf.sin, tf.cos, tf.tanh)])]

    step = captured(build)
    (position,) = step.graph.sums
    with step.source.ops[0].graph.as_default():
        total = Sums(step.graph, step.source.ops, {position}).total(position)
    assert total.device == total.op.inputs[0].device == "/device:GPU:1"


def test_few_small_addends_are_left_alone() -> None:
    def build(y):
        small = [f(y[:1, :1]) for f in (tf.sin, tf.cos, tf.tanh)]
        return [tf.add_n(small) * y]

    assert not captured(build).graph.sums


@pytest.mark.parametrize("held", [1, 2])
def test_sums_whose_kernel_may_begin_with_another_addend_are_left_alone(held: int) -> None:
    """If neither the first nor the second buffer is free when the kernel runs, it takes over the
    third, and adds in another order."""

    def build(y):
        addends = [f(y) for f in (tf.sin, tf.cos, tf.tanh)]
        # Read by an op that the sum does not wait for.
        return [tf.add_n(addends), *(tf.exp(addend) for addend in addends[:held])]

    assert len(captured(build).graph.sums) == (held < 2)


def test_a_result_is_no_buffer_to_add_into() -> None:
    def build(y):
        addends = [f(y) for f in (tf.sin, tf.cos, tf.tanh)]
        return [tf.add_n(addends), addends[0], addends[1]]

    assert not captured(build).graph.sums


@pytest.mark.usefixtures("exact")
def test_an_addend_of_two_sums_is_added_to_both() -> None:
    numbers = np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)

    def grads(x, gradients, **options):
        h = tf.tanh(x)
        both = [tf.sin(h), tf.cos(h), tf.exp(h)]
        # In the backward pass, two sums share the gradient from `h * h`.
        y = tf.reduce_sum(tf.add_n(both) * h * h) + tf.reduce_sum(tf.math.cumsum(h) * h)
        return gradients(y, [x, h], **options)

    outputs = []
    for gradients, options in ((tf.gradients, {}), (ms.gradients, {"checkpoints": "memory"})):
        with tf.Graph().as_default():
            x = v1.placeholder(tf.float32, numbers.shape)
            found = grads(x, gradients, **options)
            with v1.Session(config=session_config()) as session:
                outputs.append(session.run(found, {x: numbers}))
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        assert ours.tobytes() == theirs.tobytes()


@given(rich(sums=True), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_a_chain_is_simulated_as_its_additions(graph, seed) -> None:
    schedule = forgetful(graph, seed, chained=True)
    longer, steps = with_additions(graph, schedule)
    chain, additions = simulate(graph, schedule), simulate(longer, steps)
    largest = max((int(graph.size[v]) for op in graph.sums for v in graph.writes[op]), default=0)
    assert additions.peak <= chain.peak <= additions.peak + largest


def with_additions(graph: TrainingGraph, schedule: Schedule) -> tuple[TrainingGraph, Schedule]:
    """Return the graph with an op for each addition of each chain, and the schedule that runs these
    as soon as it can."""
    reads, writes = list(graph.reads), list(graph.writes)
    producer, size = graph.producer.tolist(), graph.size.tolist()

    def addition(first: int, second: int) -> int:
        reads.append((first, second))
        writes.append((len(size),))
        producer.append(len(reads) - 1)
        size.append(size[second])
        return len(size) - 1

    chains = {}
    for op in sorted(schedule.chained):
        begin, addends = len(reads), list(graph.reads[op])
        head = next(n for n in (*range(2, 10), 1) if n % 8 == len(addends) % 8)
        total = None
        while addends:
            part = addends[0]
            for addend in addends[1:head]:
                part = addition(part, addend)
            addends, head = addends[head:], 8
            total = part if total is None else addition(total, part)
        if len(reads) > begin:
            # The last addition makes the total.
            writes[-1] = writes[op]
            for made in (producer, size):
                made.pop()
            producer[writes[op][0]] = len(reads) - 1
            reads[op] = writes[op] = ()
            chains[op] = list(range(begin, len(reads)))
    steps, there = [], set(np.flatnonzero(graph.source).tolist())
    for step in schedule.steps:
        if step.op not in chains:
            steps.append(step)
            there.update(writes[step.op])
        for op in sorted(chains):
            while chains[op] and there.issuperset(reads[chains[op][0]]):
                steps.append(Step(chains[op].pop(0)))
                there.update(writes[steps[-1].op])
    new = len(reads) - graph.length
    no, zeros = np.zeros(new, np.bool_), np.zeros(new, np.int64)
    values = np.arange(len(graph.size), len(size))
    workspace = graph.workspace
    longer = dataclasses.replace(
        graph,
        reads=reads,
        writes=writes,
        producer=np.array(producer, np.int64),
        storage=np.concatenate([graph.storage, values]),
        size=np.array(size, np.int64),
        source=np.concatenate([graph.source, np.zeros(len(values), np.bool_)]),
        clonable=np.concatenate([graph.clonable, no]),
        joins=np.concatenate([graph.joins, no]),
        forwards=np.concatenate([graph.forwards, ~no]),
        fuses=np.concatenate([graph.fuses, no]),
        seconds=np.concatenate([graph.seconds, zeros.astype(float)]),
        expensive=np.concatenate([graph.expensive, no]),
        workspace=None if workspace is None else np.concatenate([workspace, zeros]),
    )
    return longer, Schedule(tuple(steps))
