"""A directed graph of ops that come before others, with the operations that ordering a step needs.

Results and their order are as in networkx. But importing networkx takes a tenth of a second, and
every first step would wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from graph_tools.errors import GraphError

__all__ = ["Precedence"]

_Node = TypeVar("_Node", bound=Hashable)


class Precedence(Generic[_Node]):
    """A graph of nodes, and edges from each node to those that come after it, both in the order in
    which they were added.

    Examples
    --------
    >>> graph = Precedence("abcd")
    >>> graph.add("a", ["b", "c"])
    >>> graph.add("c", ["d"])
    >>> graph.order(), graph.leads("a", "d"), graph.leads("b", "d")
    (['a', 'b', 'c', 'd'], True, False)
    >>> list(graph.before("d")), list(graph.behind("a"))
    (['c'], ['b', 'c', 'd'])
    """

    def __init__(self, nodes: Iterable[_Node] = ()) -> None:
        self._after: dict[_Node, dict[_Node, None]] = {node: {} for node in nodes}
        self._before: dict[_Node, dict[_Node, None]] = {node: {} for node in self._after}

    def __contains__(self, node: object) -> bool:
        return node in self._after

    def __iter__(self) -> Iterator[_Node]:
        return iter(self._after)

    def add(self, node: _Node, after: Iterable[_Node]) -> None:
        """Let the nodes ``after`` come after ``node``."""
        for other in after:
            self._after[node][other] = None
            self._before[other][node] = None

    def before(self, node: _Node) -> Iterable[_Node]:
        """Return the nodes that come right before ``node``."""
        return self._before[node].keys()

    def after(self, node: _Node) -> Iterable[_Node]:
        """Return the nodes that come right after ``node``."""
        return self._after[node].keys()

    def needed(self, ends: Iterable[_Node]) -> set[_Node]:
        """Return ``ends``, and all nodes that come before them."""
        found = set(ends)
        stack = list(found)
        while stack:
            new = [node for node in self._before[stack.pop()] if node not in found]
            found.update(new)
            stack += new
        return found

    def within(self, nodes: set[_Node]) -> Precedence[_Node]:
        """Return the part of the graph with ``nodes`` alone."""
        part = Precedence(node for node in self if node in nodes)
        for node in part:
            part.add(node, [other for other in self._after[node] if other in nodes])
        return part

    def behind(self, node: _Node) -> Iterator[_Node]:
        """Yield all nodes that come after ``node``, those fewest edges away first."""
        seen = {node}
        waiting = deque([node])
        while waiting:
            for other in self._after[waiting.popleft()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
                    yield other

    def leads(self, node: _Node, other: _Node) -> bool:
        """Return whether ``other`` is ``node``, or comes after it."""
        return node == other or other in self.behind(node)

    def order(self) -> list[_Node]:
        """Return all nodes in a topological order.

        Raises
        ------
        GraphError
            If there is a cycle.
        """
        missing = {node: len(before) for node, before in self._before.items()}
        found = [node for node, many in missing.items() if not many]
        # The list grows while the loop runs.
        for node in found:
            for other in self._after[node]:
                missing[other] -= 1
                if not missing[other]:
                    found.append(other)
        if len(found) < len(missing):
            stuck = next(node for node, many in missing.items() if many)
            raise GraphError(f"there is a cycle before {getattr(stuck, 'name', stuck)!r}")
        return found
