"""Random loops: gradients with loops replayed are TensorFlow's own, bit for bit, with budgets as
well."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.transforms.loops import selection
from tests.helpers.random_loops import BODY, CONDITIONS, SHAPE, STATES, Loop, Outside, built, loops
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


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_more_steps_than_told(way):
    # For 15 steps, the last segment would have an even number of steps.
    loop = _alone("matmul", condition="fuel", steps=15)
    plain, _, graph = gradients(loop)
    for told in (15, 7, 3):
        found, plans, _ = gradients(loop, loops=way, loop_steps=told)
        assert plans[-1].replayed
        _compare(loop, found, plain, graph, f"{told} steps told")


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
