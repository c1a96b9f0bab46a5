"""Running things after what they need, without recursion.

Schedules are written by going through what is wanted in order, and running first what that needs
and has not run yet: clones, postponed ops, and what those need in turn. Linear in the needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["after_needs"]

_Node = TypeVar("_Node", bound=Hashable)


def after_needs(
    wanted: Iterable[_Node], needs: Callable[[_Node], Sequence[_Node]]
) -> Iterator[_Node]:
    """``wanted`` and all that they need, each once and after what it needs itself; in the order of
    ``wanted`` otherwise.

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
