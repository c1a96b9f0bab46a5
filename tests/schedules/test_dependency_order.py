"""Wanted ops come after the ops that they need."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.schedules.dependency_order import after_needs


@given(st.integers(1, 30), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None)
def test_all_needs_come_once_and_before(nodes, random):
    needs = {k: [j for j in range(k) if random.random() < 0.3] for k in range(nodes)}
    wanted = random.sample(range(nodes), random.randint(1, nodes))
    order = list(after_needs(wanted, needs.__getitem__))
    graph = nx.DiGraph([(j, k) for k, before in needs.items() for j in before])
    graph.add_nodes_from(range(nodes))
    assert len(order) == len(set(order))
    assert set(order) == set(wanted).union(*(nx.ancestors(graph, k) for k in wanted))
    position = {node: k for k, node in enumerate(order)}
    assert all(position[j] < position[k] for k in order for j in needs[k])


def test_deep_needs_hit_no_recursion_limit():
    assert list(after_needs([10_000], lambda node: [node - 1] if node else [])) == list(
        range(10_001)
    )
