"""The largest buffers that are alive at a peak, by the names of their tensors.

A simulation knows buffers by numbers. The few largest get their names while the graph is at hand,
so that a plan can report them later without keeping the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from graph_tools.memory.timeline import Alive, Part, Timeline

__all__ = ["with_names"]

#: Layout: the number of buffers that get names in a message.
MOST_NAMED = 24

AnyTimeline = TypeVar("AnyTimeline", bound=Timeline)


def with_names(
    simulation: AnyTimeline, name: Callable[[int, int], tuple[str, Part]]
) -> AnyTimeline:
    """Return the simulation with its ``largest`` set: the largest buffers at the peak, in order.

    Parameters
    ----------
    simulation
        Bytes alive, and the lives of buffers.
    name
        A function of a value and the place where its buffer begins. It returns the name of the
        tensor, and its part of the step.
    """
    alive = simulation.bytes_alive
    if not len(alive):
        return simulation
    born, dies, size = simulation.buffers
    there = simulation.at_peak
    # The largest first; of equal ones, the earliest born first.
    there = there[np.lexsort((there, born[there], -size[there]))][:MOST_NAMED]
    owner, last = simulation.owner, len(alive) - 1
    found = []
    for number in there.tolist():
        value = owner[number] if number < len(owner) else -1
        tensor, part = name(value, int(born[number])) if value >= 0 else ("", "scratch")
        lives = max(int(born[number]), 0), min(int(dies[number]), last)
        found.append(Alive(tensor, int(size[number]), part, *lives))
    return replace(simulation, largest=tuple(found))
