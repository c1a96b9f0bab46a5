"""The five strategies of the founding paper, on graphs whose figures can be counted by hand and on
traced functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.networks.deep import deep_resnet, units_of
from benchmarks.planning.strategies import strategies
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from tests.helpers.graphs import GRAPHS, Maker, chain

NAMES = ["no optimization", "inplace", "sharing", "drop cheap", "sublinear plan"]


@pytest.mark.parametrize("name", GRAPHS)
def test_each_strategy_does_what_those_before_it_do(name):
    graph = GRAPHS[name]()
    found = strategies(graph)
    assert [row.name for row in found] == NAMES
    none, in_place, sharing, drop, sublinear = (row.peak for row in found)
    assert none == graph.size.sum() >= in_place >= sharing >= max(drop, sublinear)
    assert sharing == simulate(graph, plain(graph)).peak
    assert all(row.extra == row.clones == 0 for row in list(found)[:3])


def test_figures_of_a_chain_by_hand():
    # Forward: 1 to 6; backward: 6 to 2, and the seed. Each backward op reads the input of its op.
    graph = chain([10] * 6, forwards=True)
    found = strategies(graph, parameters=7)
    assert found["no optimization"].peak == 10 * (6 + 6)
    # An op cannot write into values that backward reads. At each step it can write into the last
    # gradient, and into the loss's input.
    assert found["inplace"].peak == 10 * (6 + 6 - _taken(graph))
    assert found.parameters == 7
    whole = graph.total_seconds
    for row in found:
        assert row.extra == pytest.approx(row.clones / whole)


def _taken(graph) -> int:
    """Return how many ops have an input of their size that no later op reads; every op reads its
    maker's value last."""
    count = 0
    for op in range(graph.length):
        later = {v for after in range(op + 1, graph.length) for v in graph.reads[after]}
        if graph.forwards[op] and any(
            v not in later and not graph.source[v] and graph.size[v] for v in graph.reads[op]
        ):
            count += 1
    return count


def test_an_input_is_written_into_once_and_only_by_what_fits():
    make = Maker()
    a = make.op(make.source(), size=4, residual="none")
    b = make.op(a, size=4, residual="none", forwards=True)  # a lives on
    c = make.op(a, b, size=4, residual="none", forwards=True)  # takes one of a and b
    make.op(c, size=3, residual="none", forwards=True)  # does not fit
    graph = make.graph()
    forward = replace(
        graph,
        first_backward=graph.first_backward,
        forwards=graph.forwards & (np.arange(graph.length) < graph.first_backward),
    )
    assert strategies(forward)["inplace"].peak == graph.size.sum() - 4


def test_cheap_results_are_dropped_and_expensive_ones_stay():
    make = Maker()
    at = make.op(make.source(), size=8)
    for _ in range(12):
        at = make.op(at, size=8, expensive=True)
        at = make.op(at, size=8, residual="both")
        at = make.op(at, size=8, residual="output")
    make.op(at, size=1)
    found = strategies(make.graph())
    assert found["drop cheap"].peak < 0.6 * found["sharing"].peak
    assert 0 < found["drop cheap"].extra < 0.25
    assert found["sublinear plan"].peak < found["drop cheap"].peak


def test_scratch_stands_beside():
    graph = chain([4] * 20)
    scratch = np.zeros(graph.length, np.int64)
    scratch[7] = 1000
    with_scratch = strategies(replace(graph, workspace=scratch))
    assert with_scratch.workspace == 1000
    assert [r.peak for r in with_scratch] == [r.peak for r in strategies(graph)]


def test_the_table():
    text = str(strategies(chain([10] * 30), parameters=12_345))
    assert all(name in text for name in NAMES) and "12,345" in text
    with pytest.raises(KeyError, match="no strategy 'best'"):
        strategies(chain([1]))["best"]


# --- Functions


def test_a_function_is_traced_and_not_run():
    weights = [tf.Variable(tf.zeros([64, 64])) for _ in range(12)]
    traced = []

    def loss(x, y):
        traced.append(tf.executing_eagerly())
        for w in weights:
            x = tf.nn.relu(x @ w)
        return tf.reduce_mean((x - y) ** 2)

    spec = tf.TensorSpec([None, 64])
    small, large = (strategies(loss, spec, spec, batch_size=b) for b in (16, 160))
    assert traced == [False, False]
    assert small.parameters == large.parameters == 12 * 64 * 64 * 4
    assert large["sublinear plan"].peak < large["sharing"].peak
    assert large["no optimization"].peak > 3 * small["no optimization"].peak
    few = strategies(loss, spec, spec, variables=weights[-2:])
    assert few.parameters == 2 * 64 * 64 * 4
    assert few["no optimization"].peak < large["no optimization"].peak


def test_what_cannot_be_traced_says_why():
    x = tf.TensorSpec([4])
    with pytest.raises(ArgumentError, match="nothing to differentiate"):
        strategies(lambda t: tf.reduce_sum(t), x)
    idle = tf.Variable(1.0)
    with pytest.raises(ArgumentError, match="depends on none"):
        strategies(lambda t: tf.reduce_sum(t), x, variables=[idle])
    with pytest.raises(ArgumentError, match="neither arguments"):
        strategies(chain([1]), x)


# --- The paper's network


def test_depths_of_the_papers_network():
    assert units_of(200) == (3, 24, 36, 3)
    assert 2 + 3 * sum(units_of(1001)) == 1001
    assert units_of(5) == (1, 1, 1, 1)


def test_the_papers_network_small():
    with tf.Graph().as_default() as graph:
        loss, weights = deep_resnet(17, batch=2, image=64, width=8, classes=10)
        assert loss.shape == [] and all(w.shape.is_fully_defined() for w in weights)
        convolutions = [op for op in graph.get_operations() if op.type == "Conv2D"]
    # One at the start, three in each of the units, one at the shortcut of each of four stages.
    assert len(convolutions) == 1 + 3 * sum(units_of(17)) + 4
