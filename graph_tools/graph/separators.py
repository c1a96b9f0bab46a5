"""Separators of a topologically ordered graph, in linear time.

Between op p and op p+1 of a topological order the *frontier* is the set of values made at or before
p and read after p: removing it cuts the order into before and after. A frontier of one value is an
articulation point. Sources (variables, fed inputs, constants) are available everywhere and belong
to no frontier. A mask or a tied weight that every layer reads therefore does not hide the cut
between two layers, as it does for searches by paths.

One sweep covers all frontiers of an order of n ops: their bytes and sizes are running sums over
first and last uses (`frontier_bytes`). `frontier` lists the members at a single position.
`articulation_points` needs no order. It returns the cut nodes of the undirected graph, found by
networkx (Hopcroft and Tarjan 1973, iterative there), that are on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["IntArray", "articulation_points", "frontier", "frontier_bytes"]

IntArray = npt.NDArray[np.int64]


def frontier_bytes(born: IntArray, last: IntArray, size: IntArray, length: int) -> IntArray:
    """Return the bytes of the frontier after each of ``length`` positions.

    Parameters
    ----------
    born, last
        For each value, the position that makes it and the last one that reads it.
    size
        For each value, its bytes (or 1, to count the members).
    length
        The number of positions.

    Examples
    --------
    A chain of three values and a skip from the first to the last position:

    >>> import numpy as np
    >>> frontier_bytes(np.array([0, 1, 2, 0]), np.array([1, 2, 3, 3]), np.array([4, 4, 4, 1]), 4)
    array([5, 5, 5, 0])
    """
    delta = np.zeros(length + 1, np.int64)
    np.add.at(delta, born, size)
    np.add.at(delta, np.maximum(last, born), -size)
    return np.cumsum(delta[:length])


def frontier(born: IntArray, last: IntArray, position: int) -> IntArray:
    """Return the values made at or before ``position`` and read after it, in ascending order.

    Examples
    --------
    >>> import numpy as np
    >>> frontier(np.array([0, 1, 2, 0]), np.array([1, 2, 3, 3]), 1)
    array([1, 3])
    """
    return np.flatnonzero((born <= position) & (last > position))


def articulation_points(dag: nx.DiGraph, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Return the nodes of ``dag`` that are on every path from ``first`` to ``last``, in topological
    order.

    Only nodes on such paths count: side inputs (weights, masks) do not hide a cut.

    Examples
    --------
    >>> import networkx as nx
    >>> dag = nx.DiGraph([(0, 1), (1, 2), (0, 2), (2, 3), (9, 3)])    # 9 feeds in from the side
    >>> articulation_points(dag, [0], [3])
    [0, 2, 3]
    """
    import networkx as nx

    below = set(first).union(*(nx.descendants(dag, node) for node in first))
    above = set(last).union(*(nx.ancestors(dag, node) for node in last))
    inside = dag.subgraph(below & above)
    undirected = nx.Graph(inside.edges)
    # Two new end nodes make the first and the last node cut nodes like any other.
    undirected.add_edges_from(("begin", node) for node in first if node in inside)
    undirected.add_edges_from(("end", node) for node in last if node in inside)
    undirected.add_edges_from([("begin", "before"), ("end", "behind")])
    cuts = set(nx.articulation_points(undirected)) - {"begin", "end"}
    return [node for node in nx.topological_sort(inside) if node in cuts]
