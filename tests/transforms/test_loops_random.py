"""Random loops: gradients with loops replayed are TensorFlow's own, bit for bit. The kept states
are compared with a scheme written out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.transforms.loops import selection
from memsaving_gradients.transforms.loops.checkpoint_positions import (
    Division,
    leaf_for,
    states_for,
    steps_for,
)
from tests.helpers.sampling import examples, one_of, slow
from tests.helpers.support import numbers

pytestmark = [pytest.mark.usefixtures("exact_arithmetic"), pytest.mark.sampled]

WAYS = ("segments", "treeverse")

_fast = settings(
    max_examples=examples(10),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_many = settings(
    max_examples=examples(600),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# --- random loops

SHAPE = (4, 8)
#: Kinds of states, with dtype and shape.
STATES = {
    "float": (tf.float32, SHAPE),
    "small": (tf.float32, (3,)),
    "scalar": (tf.float32, ()),
    "double": (tf.float64, (2, 8)),
    "half": (tf.bfloat16, (8,)),
    "int": (tf.int32, ()),
    "bool": (tf.bool, (8,)),
    "array": (tf.float32, SHAPE),
    "unchanged": (tf.float32, SHAPE),
}
BODY = """matmul variable layer slices gather split branch function inner_loop inner_array
stateless_random drawn_once custom_gradient element reduced softmax normalized outer step_number
where einsum cumulated rematerialized dense swish joined""".split()
CONDITIONS = """counted bounded both two_by_two run_time_steps run_time_maximum value bounded_value
fuel""".split()


@dataclass(frozen=True)
class Loop:
    """A random loop: kinds of its states, instructions of its body, its differentiated outputs."""

    states: tuple[str, ...]
    body: tuple[tuple[str, int, int], ...]
    updates: tuple[int, ...]
    condition: str
    steps: int
    outputs: tuple[int, ...]
    xs: tuple[int, ...]
    leaf: int | None
    tape: bool
    parallel: int


@st.composite
def loops(draw, most=7):
    count = draw(st.integers(0, 3))
    states = ("float", *(draw(st.sampled_from(sorted(STATES))) for _ in range(count)))
    number = st.integers(0, 30)
    body = draw(
        st.lists(st.tuples(st.sampled_from(BODY), number, number), min_size=1, max_size=most)
    )
    drawn = any(kind == "drawn_once" for kind, *_ in body)
    return Loop(
        states=states,
        body=tuple(body),
        updates=tuple(draw(number) for _ in states),
        condition=draw(st.sampled_from(CONDITIONS)),
        steps=draw(st.integers(0, 30)),
        outputs=tuple(draw(st.lists(number, min_size=1, max_size=3))),
        xs=tuple(draw(st.lists(number, min_size=1, max_size=5))),
        leaf=draw(st.one_of(st.none(), st.integers(1, 9))),
        tape=draw(st.booleans()),
        # In parallel, steps would draw in an order of their own.
        parallel=1 if drawn else draw(st.sampled_from([1, 10])),
    )


@tf.function(autograph=False)
def _squashed(h):
    return tf.sin(h) * tf.cos(h)


@tf.custom_gradient
def _clipped(h):
    return tf.exp(-tf.square(h)), lambda dy: tf.clip_by_value(-2.0 * h * dy, -0.1, 0.1)


@dataclass(frozen=True)
class Outside:
    """The tensors and the variable that a body captures."""

    x: Any
    w: Any
    v: Any
    each: Any
    shift: Any

    @property
    def all(self):
        return [self.x, self.w, self.v, self.each, self.shift]


def _instruction(kind, a, b, k, i, out):
    """Return a new tensor made of two others, for instruction ``k`` of step ``i``."""
    if kind == "matmul":
        return tf.matmul(a, out.w)
    if kind == "variable":
        return tf.tanh(tf.matmul(a, out.v) + out.v[0])
    if kind == "layer":
        return tf.tanh(tf.matmul(a, out.w) + out.shift)
    if kind == "slices":
        return tf.concat([a[1:], b[:1]], 0)
    if kind == "gather":
        return a + tf.gather(out.w, tf.stack([i % 8, 0, k % 8, 2]))
    if kind == "split":
        left, right = tf.split(a, 2, 1)
        return tf.concat([tf.sin(right), left * b[:, :4]], 1)
    if kind == "branch":
        return tf.cond(
            tf.equal((i + k) % 3, 0), lambda: tf.sin(a), lambda: tf.tanh(tf.matmul(b, out.w))
        )
    if kind == "function":
        return _squashed(a)
    if kind == "inner_loop":
        body = lambda j, h: (j + 1, tf.tanh(tf.matmul(h, out.w)))  # noqa: E731
        return tf.while_loop(lambda j, _: j < 1 + k % 3, body, (0, a))[1]
    if kind == "inner_array":
        array = tf.TensorArray(tf.float32, size=2, element_shape=SHAPE, clear_after_read=False)
        array = array.write(0, tf.sin(a)).write(1, b)
        return array.read(0) * array.read(1) + array.read(k % 2)
    if kind == "stateless_random":
        return a * tf.random.stateless_uniform(SHAPE, tf.stack([i, k]), 0.5, 1.5)
    if kind == "drawn_once":
        return a * tf.random.uniform(SHAPE, 0.5, 1.5, seed=k)
    if kind == "custom_gradient":
        return _clipped(a)
    if kind == "element":
        return a + tf.gather(out.each, i % 30)
    if kind == "reduced":
        return a - tf.reduce_mean(b, 1, keepdims=True)
    if kind == "softmax":
        return tf.nn.softmax(a)
    if kind == "normalized":
        mean, variance = tf.nn.moments(a, [0])
        return tf.nn.batch_normalization(a, mean, variance, None, None, 1e-2)
    if kind == "outer":
        return a * tf.cos(out.shift)
    if kind == "step_number":
        return a * tf.cast(i % 5 + 1, tf.float32) * 0.3
    if kind == "where":
        return tf.where(a > b, tf.tanh(a), 0.5 * b)
    if kind == "einsum":
        return tf.einsum("ij,kj,kl->il", a, b, b) * 0.1
    if kind == "cumulated":
        return 0.3 * tf.cumsum(a, 1)
    if kind == "dense":
        return tf.tanh(tf.nn.bias_add(tf.matmul(a, out.w), out.shift[0]))
    if kind == "joined":
        return tf.sigmoid((tf.matmul(a, out.w) + out.shift[0]) + tf.gather(out.each, i % 30))
    if kind == "swish":
        return tf.nn.sigmoid(tf.matmul(a, out.w) + out.shift[1]) * b
    assert kind == "rematerialized"
    return tf.recompute_grad(lambda h: tf.tanh(tf.matmul(h, out.w)))(a)


def _seen(kind, state, i):
    """Return 4 × 8 numbers of a state, for the instructions of a body to read."""
    if kind == "array":
        return state.read(tf.maximum(i - 1, 0))
    if kind in ("float", "unchanged"):
        return state
    state = tf.cast(state, tf.float32)
    if kind == "small":
        return tf.reduce_sum(state) + tf.fill(SHAPE, 0.1)
    if kind == "double":
        return tf.tile(state, [2, 1])
    return tf.zeros(SHAPE) + tf.sin(state)


def _made(kind, value, old, i):
    """Return a state's next value, made of 4 × 8 numbers."""
    value = tf.tanh(value)
    if kind == "unchanged":
        return old
    if kind == "array":
        return old.write(i, value)
    if kind == "float":
        return value
    if kind == "bool":
        return value[0] > 0.1
    if kind == "int":
        return old + tf.cast(value[0, 0] > 0.0, tf.int32)
    dtype, shape = STATES[kind]
    flat = tf.reshape(value, [-1])[: math.prod(shape)]
    return tf.cast(tf.reshape(flat, shape), dtype)


def _first(kind, x, most):
    if kind == "array":
        array = tf.TensorArray(
            tf.float32, size=most + 1, element_shape=SHAPE, clear_after_read=False
        )
        return array.write(0, x)
    if kind in ("int", "bool"):
        dtype, shape = STATES[kind]
        return tf.zeros(shape, dtype)
    return _made("float" if kind == "unchanged" else kind, tf.cos(x), None, 0)


def _condition(loop, most):
    """Return a loop's condition, its given maximum of steps, and its counter's increment."""
    name, steps = loop.condition, loop.steps
    alive = lambda h: tf.reduce_sum(tf.square(h)) > 0.2  # noqa: E731
    return {
        "counted": (lambda i, h: i < steps, None, 1),
        "bounded": (lambda i, h: i < 1000, steps, 1),
        "both": (lambda i, h: i <= steps // 2, steps, 1),
        "two_by_two": (lambda i, h: i < steps, None, 2),
        "run_time_steps": (lambda i, h: i < most, None, 1),
        "run_time_maximum": (lambda i, h: i >= 0, most, 1),
        "value": (lambda i, h: tf.logical_and(i < steps, alive(h)), None, 1),
        "bounded_value": (lambda i, h: alive(h), steps, 1),
        # Nothing in the graph says that the loop ends.
        "fuel": (lambda i, h: 1.0 - 0.1 * tf.cast(i, tf.float32) > -0.05 * steps, None, 1),
    }[name]


def built(loop, out, most):
    """Return the differentiated tensor: parts of the states that the loop ends with."""
    size = 64

    def body(i, *states):
        pool = [_seen(kind, s, i) for kind, s in zip(loop.states, states, strict=True)]
        for k, (kind, a, b) in enumerate(loop.body):
            # Mostly the last ones, so that the body is deep.
            one, other = pool[-1 - a % min(len(pool), 3)], pool[b % len(pool)]
            pool.append(_instruction(kind, one, other, k, i, out))
        news = [
            _made(kind, pool[-1 - u % len(pool)], s, i)
            for kind, u, s in zip(loop.states, loop.updates, states, strict=True)
        ]
        return (i + growth, *news)

    condition, maximum, growth = _condition(loop, most)
    first = [_first(kind, tf.sin(out.x), size) for kind in loop.states]
    _, *ends = tf.while_loop(
        lambda i, *states: condition(i, states[0]),
        body,
        (0, *first),
        maximum_iterations=maximum,
        parallel_iterations=loop.parallel,
    )
    ys = []
    for n in dict.fromkeys(k % len(ends) for k in loop.outputs):
        kind, end = loop.states[n], ends[n]
        if kind == "array":
            end = end.gather([0, 1])
        ys.append(tf.reduce_sum(tf.square(tf.cast(end, tf.float32))))
    return tf.add_n([tf.sin(y) for y in ys[:2]]) + sum(ys[2:])


_variables: list[tf.Variable] = []


def _variable():
    if not _variables:
        _variables.append(tf.Variable(numbers("v", 8, 8, scale=0.3)))
    return _variables[0]


def _inputs():
    arrays = (
        numbers("x", *SHAPE),
        numbers("w", 8, 8, scale=0.3),
        numbers("each", 30, *SHAPE, scale=0.3),
        numbers("shift", *SHAPE),
    )
    return [tf.constant(array) for array in arrays]


def gradients(loop, **options):
    """Return the gradients of a loop (plain without options), the plans, and the graph."""
    tf.random.set_seed(3)
    variable = _variable()

    @tf.function(autograph=False)
    def step(x, w, each, shift, most):
        out = Outside(x, w, variable, each, shift)
        chosen = [out.all[n] for n in dict.fromkeys(k % 5 for k in loop.xs)]
        if loop.tape:
            with tf.GradientTape() as tape:
                tape.watch([t for t in chosen if isinstance(t, tf.Tensor)])
                y = built(loop, out, most)
            return tape.gradient(y, chosen)
        y = built(loop, out, most)
        return ms.gradients(y, chosen, **options) if options else tf.gradients(y, chosen)

    patched = ms.patched(**options) if options and loop.tape else contextlib.nullcontext()
    with warnings.catch_warnings(), patched:
        warnings.simplefilter("ignore", ms.errors.NothingSavedWarning)
        warnings.simplefilter("ignore", ms.errors.PlanNote)
        # The least budget that an error names is for the gradients alone.
        warnings.simplefilter("ignore", ms.errors.BudgetWarning)
        found = step(*_inputs(), tf.constant(loop.steps))
    (concrete,) = step._list_all_concrete_functions()
    return [_array(g) for g in found], ms.plans(step), concrete.graph


def _array(grad):
    if isinstance(grad, tf.IndexedSlices):
        grad = tf.convert_to_tensor(grad)
    return None if grad is None else grad.numpy()


def _adds_in_any_order(graph):
    """Return whether `AddN` sums three or more addends: it begins with one whose buffer is free at
    that moment."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return any(n.op == "AddN" and n.attr["N"].i > 2 for n in nodes)


def _compare(loop, found, plain, graph, what):
    unordered = _adds_in_any_order(graph)
    for a, b in zip(found, plain, strict=True):
        if b is None:
            assert a is None
        elif unordered:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(b).max()))
        else:
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (
                f"{what} of {loop}: differs by {np.abs(a - b).max()}"
            )


@contextlib.contextmanager
def always_replayed(leaf):
    """Replay loops even if that saves nothing, in segments of ``leaf`` steps; ``None``: by the
    usual rules."""
    before = selection.LEAST_SAVED, selection.leaf_for
    if leaf is not None:
        selection.LEAST_SAVED = -1e9
        selection.leaf_for = lambda *_: leaf
    try:
        yield
    finally:
        selection.LEAST_SAVED, selection.leaf_for = before


def check(loop):
    plain, _, graph = gradients(loop)
    for way in one_of(WAYS):
        with always_replayed(loop.leaf):
            found, plans, _ = gradients(loop, checkpoints="memory", loops=way)
        _compare(loop, found, plain, graph, way)
    return plans


@given(loops())
@_fast
def test_gradients_of_random_loops(loop):
    check(loop)


@pytest.mark.slow
@given(loops(most=12))
@_many
def test_gradients_of_many_random_loops(loop):
    check(loop)


HANDLES = [
    Loop(("float",), (("variable", 0, 0),), (0,), "counted", 0, (0,), (0,), None, False, 1),
    Loop(
        states=("float",),
        body=(("slices", 29, 23), ("matmul", 0, 5), ("variable", 9, 3)),
        updates=(1,),
        condition="two_by_two",
        steps=12,
        outputs=(7,),
        xs=(21,),
        leaf=None,
        tape=True,
        parallel=10,
    ),
]


@pytest.mark.parametrize("loop", HANDLES)
def test_what_reads_a_handle_is_not_held_back_by_it(loop):
    """TensorFlow orders ops that read one handle when the trace ends. An identity of the handle
    would wait for its reader."""
    check(loop)
    check_budget(loop, 0.3)


@pytest.mark.parametrize("updates", [(0, 1), (0, 2)])
def test_a_loop_that_others_wait_for_is_rewritten_as_ever(updates):
    """A value that no gradient reads is not kept for ops that wait for the loop. With a kept value,
    grappler would see another body."""
    alone = Loop(
        states=("float", "double"),
        body=(("rematerialized", 14, 2), ("step_number", 11, 25)),
        updates=updates,
        condition="bounded",
        steps=5,
        outputs=(0,),
        xs=(0,),
        leaf=None,
        tape=True,
        parallel=1,
    )
    check_budget(alone, 0.3)


def _alone(kind, **more):
    """Return a loop whose body has one instruction of ``kind``, and a layer."""
    chosen = {
        "states": ("float", "small"),
        "body": ((kind, 2, 1), ("where", 0, 0), ("layer", 0, 0)),
        "updates": (0, 1),
        "condition": "counted",
        "steps": 17,
        "outputs": (0, 1),
        "xs": (0, 1, 2, 3, 4),
        "leaf": 3,
        "tape": False,
        "parallel": 1,
    }
    return Loop(**chosen | more)


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("kind", BODY)
def test_each_instruction_under_each_condition(kind, condition):
    check(_alone(kind, condition=condition))


@pytest.mark.parametrize("kind", ["dense", "swish", "joined"])
def test_what_grappler_makes_one_kernel_of(kind):
    alone = _alone(kind, states=("float",), body=((kind, 0, 0),), updates=(0,), outputs=(0,))
    plans = check(alone)
    assert plans[-1].replayed


@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition(condition):
    plans = check(_alone("matmul", condition=condition, leaf=2))
    assert plans[-1].replayed


@pytest.mark.parametrize(
    "kind", [*slow("half", "small", "scalar"), *sorted({*STATES} - {"half", "small", "scalar"})]
)
def test_each_kind_of_state(kind):
    plans = check(_alone("where", states=("float", kind, kind), updates=(0, 0, 1), leaf=4))
    assert plans[-1].replayed


# --- budgets


def check_budget(loop, budget):
    """Check a plan that keeps the budget, as simulated, or an error that names a possible one."""
    plain, _, graph = gradients(loop)
    # A least budget in bytes is not promised on a guess, so the number of steps is given.
    options = {"planner": "chain", "budget": budget, "loop_steps": max(loop.steps, 1)}
    error = None
    try:
        found, plans, _ = gradients(loop, **options)
    except ms.errors.BudgetError as refused:
        error = refused
    if error is not None:
        assert error.budget < error.least and budget < error.fraction
        found, plans, _ = gradients(loop, **options | {"budget": error.least})
    for plan in plans:
        assert plan.budget is not None and plan.allocated <= plan.budget
    _compare(loop, found, plain, graph, f"budget={budget}")


def test_loops_whose_plans_were_taken_back_run():
    """Each attribute that is noted at a loop of unknown length gets a value in the end."""
    states = {"states": ("float", "array", "array"), "updates": (0, 0, 0)}
    ends = {"outputs": (0,), "xs": (0,), "leaf": None, "steps": 30}
    body = {"body": (("element", 0, 0),), "condition": "run_time_maximum"}
    check_budget(_alone("element", **states, **body, **ends), 0.1)


@given(loops(most=4), st.sampled_from([0.3, 0.6, 0.9]))
@settings(_fast, max_examples=examples(5))
def test_budgets_of_random_loops(loop, budget):
    check_budget(loop, budget)


@pytest.mark.slow
@given(loops(), st.sampled_from([0.1, 0.3, 0.45, 0.6, 0.75, 0.9]))
@settings(_many, max_examples=examples(200))
def test_budgets_of_many_random_loops(loop, budget):
    check_budget(loop, budget)


# --- where states are kept


def cuts(division, steps, bound):
    """Return the cut of the whole loop, and a function that cuts a segment at a level."""
    outer = division.cut(tf.constant(bound))

    def inner(first, stop, level):
        return division.inner(tf.constant(first), tf.constant(stop), level)

    return outer, inner


def ends(cut, first, stop):
    """Return where the segments of a range begin and end, going forward."""
    found = [first]
    while found[-1] < stop:
        found.append(min(int(cut.after(tf.constant(found[-1]))), stop))
        assert found[-1] > found[-2], "an empty segment"
    return found


def check_cut(cut, first, stop):
    """Check that the segments partition the range, and are the same backwards."""
    marks = ends(cut, first, stop)
    for start, end in itertools.pairwise(marks):
        # The cut is the same for each step of a segment.
        for step in {start, end - 1}:
            assert min(int(cut.after(tf.constant(step))), stop) == end
            assert int(cut.before(tf.constant(step + 1))) == start
    return marks


@dataclass
class Scheme:
    """A run of a loop of ``steps``, forward and reversed with a division, by an independent reader.

    It counts how often each step runs again, and the most states held at once, with the first one,
    the loop's input. It also counts the longest stretch of steps whose values are held at once.
    """

    division: Division
    steps: int
    bound: int

    def __post_init__(self):
        self.runs, self.most_held, self.longest = [0] * self.steps, 0, 0
        self.reversed_from = self.steps
        self.outer, self.inner = cuts(self.division, self.steps, self.bound)
        marks = check_cut(self.outer, 0, self.steps)
        self.outermost = len(marks) - 1
        self._segments(marks, 1, 0)
        assert self.reversed_from == 0

    def _segments(self, marks, level, held):
        """Reverse segments whose first states are held, together with ``held`` other states."""
        kept = list(marks[:-1])
        self.most_held = max(self.most_held, held + len(kept))
        for start, stop in reversed(list(itertools.pairwise(marks))):
            assert kept.pop() == start
            self._reverse(start, stop, level, held + len(kept))

    def _reverse(self, start, stop, level, held):
        if level == self.division.repeats:
            self._run(start, stop)
            self.longest = max(self.longest, stop - start)
            self.most_held = max(self.most_held, held + 1)
            assert self.reversed_from == stop, "out of turn"
            self.reversed_from = start
            return
        marks = check_cut(self.inner(start, stop, level), start, stop)
        self._run(start, marks[-2])
        self._segments(marks, level + 1, held)

    def _run(self, start, stop):
        for step in range(start, stop):
            self.runs[step] += 1


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
@pytest.mark.parametrize("leaf", [1, 2, 5])
def test_a_known_number_of_steps(leaf, repeats):
    full = [steps_for(states, repeats, leaf) for states in range(5)]
    around = {n + more for n in full for more in (-1, 0, 1)}
    for steps in sorted(n for n in {1, 3, 17, *around} if 0 < n <= 60):
        scheme = Scheme(Division(repeats, steps, leaf), steps, -1)
        states = states_for(steps, repeats, leaf)
        assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
        assert scheme.longest <= leaf
        # The first state is included.
        assert scheme.most_held <= states + 1
        assert scheme.outermost - 1 <= states
        assert scheme.outermost <= Division(repeats, steps, leaf).most_states
        if steps == steps_for(states, repeats, leaf):
            assert scheme.outermost - 1 == states and scheme.most_held == states + 1
            assert max(scheme.runs) == repeats or states == 0


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_more_steps_than_told(way):
    # For 15 steps, the last segment would have an even number of steps.
    loop = _alone("matmul", condition="fuel", steps=15)
    plain, _, graph = gradients(loop)
    for told in (15, 7, 3):
        found, plans, _ = gradients(loop, loops=way, loop_steps=told)
        assert plans[-1].replayed
        _compare(loop, found, plain, graph, f"{told} steps told")


@given(st.integers(1, 400), st.integers(1, 4), st.integers(1, 30))
@settings(_fast, max_examples=examples(25))
def test_random_divisions(steps, repeats, leaf):
    scheme = Scheme(Division(repeats, steps, leaf), steps, -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    assert scheme.longest <= leaf
    assert scheme.most_held <= states_for(steps, repeats, leaf) + 1


@given(st.integers(1, 300), st.integers(1, 3), st.booleans(), st.sampled_from([0.1, 0.5, 1, 2, 30]))
@settings(_fast, max_examples=examples(20))
def test_a_number_of_steps_known_at_run_time(steps, repeats, bounded, ratio):
    scheme = Scheme(Division(repeats, None, 1, ratio), steps, steps if bounded else -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    if repeats == 1 and ratio == 1:
        assert scheme.most_held + scheme.longest <= 4 + 3 * math.sqrt(steps)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 3))
@settings(_fast, max_examples=examples(15))
def test_a_loop_that_ends_before_its_bound(steps, more, repeats):
    for division, bound in (
        (Division(repeats, steps + more, 3), -1),
        (Division(repeats, None, 1), steps + more),
    ):
        scheme = Scheme(division, steps, bound)
        assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1


@given(st.integers(1, 60), st.integers(1, 150), st.integers(1, 3), st.integers(1, 7))
@settings(_fast, max_examples=examples(300))
def test_a_number_of_steps_that_was_told(told, steps, repeats, leaf):
    """States and stretches are as for the given number, also for fewer steps; more steps are
    reversed, too."""
    scheme = Scheme(Division(repeats, None, leaf, told=told), steps, -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    assert scheme.longest <= leaf
    blocks = -(-steps // told)
    assert scheme.outermost <= blocks * (states_for(told, repeats, leaf) + 1)
    if blocks == 1:
        assert scheme.most_held <= states_for(told, repeats, leaf) + 1


def test_long_loops_are_divided_without_overflow():
    for repeats in (1, 2, 3):
        steps = 2**31 - 2
        leaf = leaf_for(10**6, repeats, 1.0, 1.0) * 1000
        division = Division(repeats, steps, leaf)
        cut = division.cut(tf.constant(-1))
        for step in (0, 1, leaf, steps // 3, steps - 2, steps - 1):
            start = int(cut.before(tf.constant(step + 1)))
            assert 0 <= start <= step
            assert int(cut.before(tf.constant(start + 1))) == start
    # Without a bound, segment number c has c + 1 steps.
    cut = Division(1, None, 1).cut(tf.constant(-1))
    for number in (1, 2, 3, 1000, 32767, 60000):
        first = number * (number + 1) // 2
        assert int(cut.before(tf.constant(first))) == first - number
        assert int(cut.before(tf.constant(first + 1))) == first


@functools.cache
def _longest(states, repeats):
    """Return the most steps that any scheme reverses after a complete forward pass. Each step runs
    again at most ``repeats`` times, one step at a time.

    ``states`` may be held in addition to the first one. The last segment is never crossed to keep a
    state behind it.
    """

    @functools.cache
    def fresh(states, repeats):
        """Return the most steps of a segment with only its first state held: cross it, keep states,
        reverse from its end."""
        if repeats == 0:
            return 0
        if repeats == 1:
            return 1
        # The first part is crossed once to keep the state behind it. Then each part is reversed by
        # itself.
        last = fresh(0, repeats - 1) + 1
        return last if states == 0 else fresh(states, repeats - 1) + fresh(states - 1, repeats)

    return sum(fresh(free, repeats) for free in range(states + 1))


def test_as_many_steps_as_treeverse_promises():
    for repeats in range(1, 6):
        for states in range(8):
            for leaf in (1, 3):
                found = steps_for(states, repeats, leaf)
                assert found == leaf * math.comb(states + repeats, repeats)
                assert states_for(found, repeats, leaf) == states
                assert states_for(found + 1, repeats, leaf) == states + 1
            assert steps_for(states, 1, 1) == states + 1
            if repeats > 1 and states:
                one_less = steps_for(states - 1, repeats, 1) + steps_for(states, repeats - 1, 1)
                assert steps_for(states, repeats, 1) == one_less


def test_no_scheme_needs_two_states_less():
    """Treeverse crosses the last of the inner segments as well. A scheme without this crossing
    reverses as many steps with at best one state less."""
    for repeats in range(1, 6):
        for states in range(8):
            best = _longest(states, repeats)
            assert best == math.comb(states + repeats + 1, repeats) - 1
            assert steps_for(states, repeats, 1) <= best <= steps_for(states + 1, repeats, 1)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_the_last_segments_are_as_long_as_is_best(repeats):
    for steps in (1, 2, 7, 50, 1000, 10_000):
        for state, step in ((1.0, 1.0), (1.0, 20.0), (8.0, 1.0)):

            def held(leaf, steps=steps, state=state, step=step):
                return (states_for(steps, repeats, leaf) + 1) * state + leaf * step

            chosen = leaf_for(steps, repeats, state, step)
            assert 1 <= chosen <= steps
            most = max(2, 4 * math.isqrt(steps))
            best = min(held(leaf) for leaf in range(1, 1 + min(steps, most)))
            assert held(chosen) <= 1.3 * best + state + step
