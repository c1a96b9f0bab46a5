"""Articulation points, frontiers and timelines, compared with direct counts."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from graph_tools import articulation_points, frontier, frontier_bytes, timeline


def random_dag(seed: int, n: int) -> nx.DiGraph:
    draw = random.Random(seed)
    dag = nx.DiGraph()
    dag.add_nodes_from(range(n))
    reach = draw.choice([1, 2, 3, n])
    density = draw.choice([0.1, 0.3, 0.6])
    for b in range(1, n):
        for a in range(max(0, b - reach), b):
            if draw.random() < density:
                dag.add_edge(a, b)
        if draw.random() < 0.6:
            dag.add_edge(b - 1, b)
    return dag


def cuts_by_removal(dag: nx.DiGraph, first: list[int], last: list[int]) -> list[int]:
    def connected(without: set[int]) -> bool:
        left = dag.subgraph(set(dag) - without)
        return any(a in left and b in left and nx.has_path(left, a, b) for a in first for b in last)

    return [node for node in dag if connected(set()) and not connected({node})]


@pytest.mark.parametrize("seed", range(200))
def test_articulation_points_are_the_nodes_whose_removal_cuts_every_path(seed):
    draw = random.Random(seed)
    dag = random_dag(seed, draw.randint(2, 14))
    first = draw.sample(sorted(dag), draw.randint(1, 2))
    last = draw.sample(sorted(dag), draw.randint(1, 2))
    assert sorted(articulation_points(dag, first, last)) == cuts_by_removal(dag, first, last)


def test_articulation_points_come_in_topological_order():
    dag = nx.DiGraph([(5, 3), (3, 9), (9, 1), (5, 9), (1, 0), (9, 0)])
    assert articulation_points(dag, [5], [0]) == [5, 9, 0]


def test_side_inputs_hide_no_cut():
    dag = nx.DiGraph([(0, 1), (1, 2), (2, 3), *((100, k) for k in range(4))])
    assert articulation_points(dag, [0], [3]) == [0, 1, 2, 3]


def test_no_path_no_cut():
    assert articulation_points(nx.DiGraph([(0, 1), (2, 3)]), [0], [3]) == []


def test_a_node_that_is_first_and_last_is_the_cut():
    assert articulation_points(nx.DiGraph([(0, 1)]), [1], [1]) == [1]


@pytest.mark.parametrize("seed", range(50))
def test_frontiers_are_what_is_made_before_and_read_after(seed):
    draw = np.random.default_rng(seed)
    length, count = int(draw.integers(1, 20)), int(draw.integers(0, 30))
    born = draw.integers(0, length, count)
    last = draw.integers(0, length, count)  # some are never read after their birth
    size = draw.integers(0, 100, count)
    expected = [[v for v in range(count) if born[v] <= p < last[v]] for p in range(length)]
    assert frontier_bytes(born, last, size, length).tolist() == [
        sum(int(size[v]) for v in members) for members in expected
    ]
    assert frontier_bytes(born, last, np.ones_like(size), length).tolist() == list(
        map(len, expected)
    )
    for p in range(length):
        assert frontier(born, last, p).tolist() == expected[p]


# --- Liveness


@pytest.mark.parametrize("seed", range(50))
def test_timeline_sums_what_is_alive(seed):
    draw = np.random.default_rng(seed)
    steps, count = int(draw.integers(1, 20)), int(draw.integers(0, 30))
    born = draw.integers(0, steps, count)
    dies = np.array([draw.integers(b, steps) for b in born], np.int64)
    size = draw.integers(0, 1 << 40, count)
    expected = [
        sum(int(s) for b, d, s in zip(born, dies, size, strict=True) if b <= now <= d)
        for now in range(steps)
    ]
    assert timeline(born, dies, size, steps).tolist() == expected
