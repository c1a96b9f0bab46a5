"""An order of nodes, each after the nodes that it needs, found without recursion.

A schedule goes through the wanted ops in order. Before each, it runs the needed ops that have not
run yet: clones, deferred ops, and in turn the ops that these need. Linear in the needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["after_needs"]

_Node = TypeVar("_Node", bound=Hashable)


def after_needs(
    wanted: Iterable[_Node], needs: Callable[[_Node], Sequence[_Node]]
) -> Iterator[_Node]:
    """Yield ``wanted`` and all nodes that they need, each once and after its own needs; otherwise
    in the order of ``wanted``.

    Examples
    --------
    >>> needs = {3: (2, 1), 2: (0,), 1: (0,)}
    >>> list(after_needs([1, 3], lambda node: needs.get(node, ())))
    [0, 1, 2, 3]
    """
    done: set[_Node] = set()
    for first in wanted:
        stack = [first]
        while stack:
            node = stack[-1]
            missing = () if node in done else [n for n in needs(node) if n not in done]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
