"""`Precedence` orders as networkx does."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_tools.errors import GraphError
from graph_tools.graph.precedence import Precedence

edges = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40)


@given(edges, st.sets(st.integers(0, 12)))
def test_it_agrees_with_networkx(pairs, chosen):
    nodes = list(range(13))
    ours, theirs = Precedence(nodes), nx.DiGraph()
    theirs.add_nodes_from(nodes)
    for one, other in pairs:
        ours.add(one, [other])
        theirs.add_edge(one, other)
    if nx.is_directed_acyclic_graph(theirs):
        assert ours.order() == list(nx.topological_sort(theirs))
    else:
        with pytest.raises(GraphError, match="cycle"):
            ours.order()
    assert ours.needed(chosen) == chosen.union(*(nx.ancestors(theirs, node) for node in chosen))
    part = ours.within(chosen)
    assert set(part) == chosen
    for one in nodes:
        assert list(ours.after(one)) == list(theirs.successors(one))
        assert list(ours.before(one)) == list(theirs.predecessors(one))
        assert list(ours.behind(one)) == [node for _, node in nx.bfs_edges(theirs, one)]
        for other in chosen:
            assert ours.leads(one, other) == nx.has_path(theirs, one, other)
            if one in chosen:
                assert (other in part.after(one)) == theirs.has_edge(one, other)
