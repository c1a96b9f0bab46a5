"""Ops without an output buffer of their own: our rules, compared with the allocator's requests."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from benchmarks.allocation_trace import allocation_events
from graph_tools.ops import op_types
from tests.helpers.fresh import fresh

#: Bytes of a tensor that an op may write into.
LARGE = 8 * 16 * 32 * 4
NAME = "the_op"
#: Ops that do not forward, to check that the requests to the allocator are seen.
COPYING = frozenset({"Cumsum", "ReverseV2"})


def asked_for() -> dict[str, int]:
    """Return, by op type, how many buffers as large as its first input an op asks for, if no other
    op reads that input (in a fresh process)."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    x = tf.random.uniform([8, 16, 32], 0.1, 0.9)
    yes = x > 0.5
    rows = tf.range(128) % 32
    others: dict[str, dict[str, Any]] = {
        "AddN": {"inputs": lambda one: [one, x]},
        "BiasAdd": {"bias": x[0, 0]},
        "ClipByValue": {"clip_value_min": 0.2, "clip_value_max": 0.8},
        "Cumsum": {"axis": 1},
        "ReverseV2": {"axis": [1]},
        "MatrixBandPart": {"num_lower": -1, "num_upper": 0},
        "Select": {"condition": yes},
        "SelectV2": {"condition": yes},
        "SoftmaxCrossEntropyWithLogits": {"labels": tf.reshape(x, [128, 32])},
        "SparseSoftmaxCrossEntropyWithLogits": {"labels": rows},
    }

    def call(kind: str) -> tf.Tensor:
        op = getattr(tf.raw_ops, kind)
        given = dict(others.get(kind, {}))
        flat = kind.endswith("WithLogits")
        logical = kind.startswith("Logical")
        # Four booleans for each number take as many bytes.
        second = tf.tile(yes, [1, 1, 4]) if logical else x
        one = tf.raw_ops.LogicalNot(x=second) if logical else tf.raw_ops.Exp(x=second)
        fresh = tf.reshape(one, [128, 32]) if flat else one
        wanted = [
            name
            for name, parameter in inspect.signature(op).parameters.items()
            if parameter.default is inspect.Parameter.empty and name not in given
        ]
        values = {name: fresh if i == 0 else second for i, name in enumerate(wanted)}
        values |= {
            name: value(fresh) if callable(value) else value for name, value in given.items()
        }
        results = op(**values, name=NAME)
        result = results[-1] if flat else results
        return tf.reduce_any(result) if logical else tf.reduce_sum(result)

    found = {}
    for kind in sorted(op_types.FORWARDING | COPYING):
        step = tf.function(lambda kind=kind: call(kind))
        step()
        found[kind] = sum(
            event.requested == LARGE and event.kind == "output"
            for event in allocation_events(lambda step=step: step().numpy())
            if event.op.rpartition("/")[2] == NAME
        )
    return found


@pytest.fixture(scope="module")
def asked() -> dict[str, int]:
    return fresh("tests.graph_tools.test_forwarding:asked_for")


@pytest.mark.parametrize("kind", sorted(op_types.FORWARDING))
def test_an_op_that_forwards_asks_for_no_buffer(asked, kind):
    assert asked[kind] == 0


@pytest.mark.parametrize("kind", sorted(COPYING))
def test_an_op_that_does_not_forward_asks_for_one(asked, kind):
    assert kind not in op_types.FORWARDING and asked[kind] == 1


def transposed(arithmetic: bool) -> dict[str, list[bool]]:
    """Return which transposed matrices our rules call views, and which ask for no buffer (in a
    fresh process)."""
    import tensorflow as tf

    from graph_tools.ops.views import viewed_input

    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": arithmetic})
    x = tf.random.uniform([8, 16, 32])

    @tf.function
    def step():
        fed = tf.raw_ops.Exp(x=x)
        products = tf.transpose(fed, [0, 2, 1], name="products")
        outer = tf.transpose(fed, [1, 0, 2], name="outer")
        read = tf.transpose(fed + 1.0, [0, 2, 1], name="read")
        results = [fed @ products, products @ fed, fed @ read]
        results.append(tf.matmul(outer, outer, transpose_b=True))
        return [tf.reduce_sum(result) for result in [*results, tf.sin(read)]]

    names = ("products", "outer", "read")
    graph = step.get_concrete_function().graph
    step()
    asked = {event.op.rpartition("/")[2] for event in allocation_events(lambda: step()[0].numpy())}
    return {
        "said": [viewed_input(graph.get_operation_by_name(name), 0) == 0 for name in names],
        "seen": [name not in asked for name in names],
    }


@pytest.mark.parametrize(
    ("arithmetic", "views"), [(True, [True, False, False]), (False, [False] * 3)]
)
def test_products_read_matrices_the_other_way_round_themselves(arithmetic, views):
    found = fresh("tests.graph_tools.test_forwarding:transposed", {"arithmetic": arithmetic})
    assert found["said"] == found["seen"] == views
