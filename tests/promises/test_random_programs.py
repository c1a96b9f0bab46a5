"""Random programs: the same gradients, bit for bit, and schedules that an independent reader finds
to be valid."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dataclasses
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from graph_tools import capture
from graph_tools.editing.rewiring import CLONE_SUFFIX
from graph_tools.tf_private import graphs
from memsaving_gradients.engine.driver import attempt
from memsaving_gradients.planners import Limits, named
from memsaving_gradients.planners.proposal import propose
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.checker import check_schedule, naive_peak
from tests.helpers.random_programs import (
    IN_ANY_ORDER,
    KINDS,
    Program,
    Weights,
    adds_in_any_order,
    between,
    build,
    inputs,
    programs,
    rounding,
)
from tests.helpers.sampling import examples

pytestmark = pytest.mark.usefixtures("exact_arithmetic")

_fast = settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_thousand = settings(
    max_examples=examples(1000),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: The ways to choose checkpoints: a mode, tensors by number, or (``kept``) any set of residuals by
#: number.
_choices = st.one_of(
    st.sampled_from(["memory", "speed", None]),
    st.tuples(st.just("tensors"), st.lists(st.integers(0, 40), max_size=4)),
    st.tuples(st.just("kept"), st.lists(st.integers(0, 60), max_size=12)),
)


class _Spy:
    """A record of the engine's plans and rewrites, which may replace a plan by a kept set."""

    def __init__(self, kept: list[int] | None) -> None:
        self.kept = kept
        self.seen: list[tuple[object, object]] = []

    def __enter__(self) -> _Spy:
        self.rewrite, self.plan = attempt.rewrite, named.plan
        attempt.rewrite = self._rewrite
        if self.kept is not None:
            named.plan = self._plan
        return self

    def __exit__(self, *_: object) -> None:
        attempt.rewrite, named.plan = self.rewrite, self.plan

    def _rewrite(self, step, schedule, simulation, **kwargs):
        self.seen.append((step, schedule))
        return self.rewrite(step, schedule, simulation, **kwargs)

    def _plan(self, graph, limits):
        residuals = sorted(graph.residuals)
        some = {residuals[k % len(residuals)]: "random" for k in self.kept} if residuals else {}
        return propose(graph, Limits(), some)


def _run(program: Program, choice, weights: Weights, *, xla: bool | None = None):
    """Return gradients of a program (plain if ``choice`` is ``"plain"``), and a record of the
    rewriting."""
    kept = choice[1] if isinstance(choice, tuple) and choice[0] == "kept" else None
    spy = _Spy(kept)
    built_graphs = []
    tf.random.set_seed(3)

    @tf.function(autograph=False)
    def step(first, side, indices):
        built = build(program, weights, first, side, indices)
        if choice == "plain":
            return tf.gradients(built.losses, built.xs)
        checkpoints = choice
        if kept is not None:
            checkpoints = None
        elif isinstance(choice, tuple):
            fit = between(built.xs, built.losses, built.tensors)
            checkpoints = [fit[k % len(fit)] for k in choice[1]] if fit else []
        built_graphs.append((built.losses[0].graph, len(built.losses[0].graph.get_operations())))
        with spy:
            return ms.gradients(built.losses, built.xs, checkpoints=checkpoints, xla=xla)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
        grads = step(*inputs())
    return grads, spy.seen, built_graphs


def _rounding(built_graphs) -> float:
    return IN_ANY_ORDER if any(adds_in_any_order(*built) for built in built_graphs) else 0.0


def _same(plain, ours, *, rounding: float = 0.0) -> None:
    """Check that both are equal to the bit, or to a ``rounding``, a share of the largest value."""
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert type(a) is type(b)
        if a is None:
            continue
        parts = [(a, b)]
        if isinstance(a, tf.IndexedSlices):
            parts = [(a.values, b.values), (a.indices, b.indices)]
        for p, q in parts:
            assert p.dtype == q.dtype and p.shape == q.shape
            if rounding:
                # If one is infinite or no number, the other must be as well.
                one, other = p.numpy().astype(np.float64), q.numpy().astype(np.float64)
                most = np.abs(one).max(initial=1.0, where=np.isfinite(one))
                np.testing.assert_allclose(other, one, rtol=0, atol=rounding * most)
            else:
                assert p.numpy().tobytes() == q.numpy().tobytes(), (p.numpy(), q.numpy())


def _check_graph(graph: tf.Graph, forward: int, step, schedule) -> None:
    """Check that the rewritten graph has the clones of the schedule, each once, and none before the
    forward pass ended."""
    operations = graph.get_operations()
    clones = [op for op in operations[forward:] if CLONE_SUFFIX in op.name and op.type != "NoOp"]
    originals = [step.source.ops[s.op] for s in schedule.steps if s.copy]
    assert sorted(op.type for op in clones) == sorted(op.type for op in originals)
    assert not any(_stateful(op) for op in clones)
    for op in operations[:forward]:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            assert graphs.creation_index(before) < graphs.creation_index(op), (
                "a forward op was edited"
            )
    gates = {op for op in operations[forward:] if op.type == "NoOp" and "_gate" in op.name}
    assert all(gate.control_inputs for gate in gates)
    if clones:
        capture(clones)  # raises at a cycle
        held = {
            op
            for op in operations[forward:]
            if op not in gates and not gates.isdisjoint(op.control_inputs)
        }
        assert all(op.type == "Identity" for op in held)
        waits = set(held)
        new = set(operations[forward:])

        def comes_late(op: tf.Operation) -> bool:
            apart = op.type == "Identity" and op in new and op not in waits
            return op in waits or (apart and comes_late(op.inputs[0].op))

        for op in sorted(clones, key=graphs.creation_index):
            assert any(comes_late(t.op) for t in op.inputs), f"{op.name} waits for nothing"
            waits.add(op)


def _stateful(op: tf.Operation) -> bool:
    return op.op_def.is_stateful


_weights: list[Weights] = []


def _shared_weights() -> Weights:
    if not _weights:
        _weights.append(Weights())
    return _weights[0]


def _check(program: Program, choice) -> None:
    weights = _shared_weights()
    plain, _, _ = _run(program, "plain", weights)
    ours, seen, built_graphs = _run(program, choice, weights)
    for (graph, forward), (step, schedule) in zip(built_graphs, seen, strict=False):
        check_schedule(step.graph, schedule)
        _check_graph(graph, forward, step, schedule)
        unchained = dataclasses.replace(schedule, chained=frozenset())
        naive = naive_peak(step.graph, unchained)
        rigid = dataclasses.replace(step.graph, forwards=np.zeros_like(step.graph.forwards))
        assert simulate(rigid, unchained).peak == naive
        assert simulate(step.graph, unchained).peak <= naive
    _same(plain, ours, rounding=_rounding(built_graphs))


def test_within_a_rounding_infinite_values_are_the_same() -> None:
    values = tf.constant([1.0, np.inf, np.nan])
    _same([values], [values * (1 + 1e-6)], rounding=1e-5)
    for other in ([1.0, np.inf, 1.0], [1.0, -np.inf, np.nan], [1.1, np.inf, np.nan]):
        with pytest.raises(AssertionError):
            _same([values], [tf.constant(other)], rounding=1e-5)


@given(programs(), _choices)
@_fast
def test_gradients_of_random_programs_are_bit_identical(program, choice):
    _check(program, choice)


@pytest.mark.slow
@given(programs(most=40), _choices)
@_thousand
def test_gradients_of_a_thousand_random_programs_are_bit_identical(program, choice):
    _check(program, choice)


@given(programs(most=14), _choices)
@settings(_fast, max_examples=examples(12))
def test_data_gates_change_no_value(program, choice):
    """Outside of XLA these are conditionals. Values are equal but for rounding: grappler does not
    fuse across their ends, and oneDNN has no kernels in them."""
    weights = _shared_weights()
    plain, _, _ = _run(program, "plain", weights)
    ours, seen, _ = _run(program, choice, weights, xla=True)
    for step, schedule in seen:
        check_schedule(step.graph, schedule)
    _same(plain, ours, rounding=rounding(program))


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_each_instruction_alone_in_a_deep_program(kind):
    """Test every kind of op, repeated, with everything recomputed."""
    steps = tuple((kind, k % 3, k, k + 1) for k in range(8))
    _check(Program(steps, (0, 2), True), None)


def test_a_second_trace_gives_the_same_plan_and_names():
    steps = tuple((KINDS[k % len(KINDS)], k % 4, k, k + 2) for k in range(24))
    program = Program(steps, (0, 1), True)
    weights = _shared_weights()
    names = []
    for _ in range(2):
        _, seen, built_graphs = _run(program, "memory", weights)
        names.append(
            ([op.name for op in built_graphs[0][0].get_operations()], [s.steps for _, s in seen])
        )
    assert names[0] == names[1]


def test_gates_wait_for_the_forward_pass_where_the_first_gradients_are_constant():
    """The gradient of a sum of multiples is a constant, so a gate that waits only for it does not
    wait."""
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [1000])
        for _ in range(6):
            y = tf.sin(y) * 1.5
        last = y.op.inputs[0].op
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
            ms.gradients(tf.reduce_sum(y), x, checkpoints=None)
        gates = [op for op in graph.get_operations() if op.type == "NoOp" and op.control_inputs]
        assert gates
        for gate in gates:
            assert last.name in capture([gate]).position, (
                f"{gate.name} opens before the forward pass ends"
            )


def test_clones_of_sums_of_many_addends_give_the_same_bits_every_time():
    """`AddN` adds in an order that depends on which input buffers are free when it runs."""
    program = Program(
        (
            ("concat", 9, 11, 5),
            ("gather", 3, 4, 0),
            ("many_addends", 4, 2, 1),
            ("binary", 4, 1, 11),
            ("many_addends", 6, 8, 10),
        ),
        (0,),
        False,
    )
    kept = [11, 14, 16, 40, 7, 42, 44, 27]
    weights = _shared_weights()

    @tf.function(autograph=False)
    def step(first, side, indices):
        built = build(program, weights, first, side, indices)
        with _Spy(kept):
            return ms.gradients(built.losses, built.xs, checkpoints=None)[0]

    given_ = inputs()
    assert len({step(*given_).numpy().tobytes() for _ in range(1500)}) == 1
