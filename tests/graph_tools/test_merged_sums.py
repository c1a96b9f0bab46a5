"""Additions that become one, compared with what grappler leaves of random sums."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools import capture
from graph_tools.grappler.merged_sums import ADDITIONS, merged_sums
from graph_tools.memory.executor import simulate_execution
from graph_tools.tf_private import graphs
from tests.helpers.optimized import optimized_nodes
from tests.helpers.sampling import examples

SHAPE, FED = [4, 4], 4
#: Ops between two additions that grappler removes.
NOTHING = {
    "identity": tf.identity,
    "stop": tf.stop_gradient,
    "several": lambda tensor: tf.stop_gradient(tf.identity(tensor)),
}


def sums_of(network: list[tuple[list[int], str]], fed: list[tf.Tensor]) -> tf.Tensor:
    """Return one tensor that is made of all values of a network that nothing else reads."""
    # Enough values for all additions to differ; equal ones would be merged.
    made = [tf.tanh(fed[k % len(fed)] * (k + 1.0)) for k in range(8)]
    seen: set[object] = set()
    for places, kind in network:
        reads = [*{made[place % len(made)].ref(): made[place % len(made)] for place in places}]
        values = [reference.deref() for reference in reads]
        if kind != "add_n":
            values = values[:2]
        key = frozenset(tensor.ref() for tensor in values)
        if len(values) < 2 or key in seen:
            continue
        seen.add(key)
        if kind in NOTHING:
            values[0] = NOTHING[kind](values[0])
        if kind == "tanh":
            made.append(tf.tanh(values[0] * (len(made) + 1.0)))
        elif kind == "add_n":
            made.append(tf.raw_ops.AddN(inputs=values))
        elif kind == "waits":
            with tf.control_dependencies([values[0].op]):
                made.append(values[0] + values[1])
        else:
            made.append(values[0] + values[1])
            if kind == "protected":
                graphs.protect(made[-1].op)
    unread = [tensor for tensor in made if not tensor.consumers()]
    return tf.concat([tf.reshape(tf.tanh(tensor), [-1]) for tensor in unread], 0)


def addends(step: tf.types.experimental.ConcreteFunction, fed: list[tf.Tensor]) -> list[int]:
    """Return the number of addends of each addition that runs, in ascending order."""
    return sorted(
        sum(not name.startswith("^") for name in node.input)
        for node in optimized_nodes(lambda: step(*fed))
        if node.op.removeprefix("_Mkl") in ADDITIONS
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 30), min_size=2, max_size=3, unique=True),
            st.sampled_from(["add", "add", "add_n", "tanh", "waits", "protected", *NOTHING]),
        ),
        max_size=12,
    )
)
def test_as_many_addends_meet_as_grappler_lets_meet(network):
    fed = [tf.fill(SHAPE, 0.5)] * FED
    step = tf.function(lambda *xs: sums_of(network, [*xs]), autograph=False)
    traced = step.get_concrete_function(*fed)
    ops = capture(traced.outputs)
    merged = merged_sums(ops, ops.inputs, (), ())
    # Sums of the same addends become one.
    different = {
        tuple(sorted(merged.get(i, ops.inputs[i])))
        for i, op in enumerate(ops.ops)
        if op.type in ADDITIONS and merged.get(i) != []
    }
    predicted = sorted(map(len, different))
    assert addends(traced, fed) == predicted


def test_what_is_broadcast_is_added_to_the_others():
    @tf.function(autograph=False)
    def step(a, b, c, number, row):
        return (tf.tanh(a) + number + tf.tanh(b)) + row + tf.tanh(c)

    specs = [tf.TensorSpec(SHAPE)] * 3 + [tf.TensorSpec([]), tf.TensorSpec(SHAPE[1:])]
    traced = step.get_concrete_function(*specs)
    ops = capture(traced.outputs)
    (found,) = (sums for sums in merged_sums(ops, ops.inputs, (), ()).values() if sums)
    assert len(found) == 5
    fed = [tf.ones(spec.shape) for spec in specs]
    # The three large addends, then the sum of the small ones.
    assert max(addends(traced, fed)) == 3


def test_a_reshape_to_the_same_shape_and_a_product_with_one_do_not_keep_sums_apart():
    @tf.function(autograph=False)
    def step(a, b, c, d):
        total = tf.tanh(a)
        for other in (b, c, d):
            total = tf.reshape(1.0 * total + tf.tanh(other), SHAPE)
        return tf.tanh(total)

    traced = step.get_concrete_function(*[tf.TensorSpec(SHAPE)] * 4)
    ops = capture(traced.outputs)
    (found,) = (sums for sums in merged_sums(ops, ops.inputs, (), ()).values() if sums)
    assert addends(traced, [tf.ones(SHAPE)] * 4) == [len(found)] == [4]


def test_what_is_read_elsewhere_is_no_part_of_another_sum():
    @tf.function
    def step(a, b, c, d):
        first = tf.tanh(a) + tf.tanh(b)
        return first + c + d, first

    traced = step.get_concrete_function(*[tf.TensorSpec([4])] * 4)
    ops = capture(traced.outputs)
    first = ops.ops[int(ops.producer[ops.value(traced.outputs[1])])]
    assert first.type in ADDITIONS or first.type == "Identity"
    sums = sorted(len(found) for found in merged_sums(ops, ops.inputs, (), ()).values())
    assert sums == [0, 3]


def test_all_addends_of_a_merged_sum_are_alive_together():
    def peak(*, protected: bool) -> float:
        @tf.function(autograph=False)
        def step(x):
            total = None
            for _ in range(12):
                # Each addend needs the one before.
                x = tf.cumsum(x)
                total = x if total is None else total + x
                if protected and total is not x:
                    graphs.protect(total.op)
            return total

        ops = capture(step.get_concrete_function(tf.TensorSpec([2**14])).outputs)
        return simulate_execution(ops, batch=1)[0].peak / (4 * 2**14)

    merged = peak(protected=False)
    assert merged >= 12
    assert peak(protected=True) < merged
