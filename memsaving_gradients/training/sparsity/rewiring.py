"""Which weights go, and where others begin: one step of dynamic sparse reparameterization, on
arrays.

Mostafa & Wang 2019 (arXiv 1902.05967), algorithm 1: all layers let go of what is below one
threshold, which is doubled or halved when that was much less or much more than what was wanted. As
many weights begin at zero, at random places, in each layer in proportion to what it has kept:
layers whose weights have grown get more. The number of weights stays what it is. Takes a sort of
nothing, a few passes over all places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Rewiring", "rewired", "shared_out"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rewiring:
    """Where weights are now.

    Attributes
    ----------
    masks
        For each layer, which places have a weight.
    sources
        For each weight, in the order of layers and places, which one it was before; -1: it is new.
    threshold
        For the next time.
    pruned
        How many weights were let go.
    """

    masks: list[Array]
    sources: Array
    threshold: float
    pruned: int


def rewired(
    masks: Sequence[Array],
    values: Array,
    threshold: float,
    wanted: int,
    draw: np.random.Generator,
    tolerance: float = 0.1,
) -> Rewiring:
    """Let go of weights below a threshold, and begin as many elsewhere.

    Parameters
    ----------
    masks
        For each layer, which places have a weight (flat, bool); every layer has one at least, and
        keeps one.
    values
        The weights, in the order of layers and places.
    threshold
        Absolute values below it go.
    wanted
        How many should go.
    draw
        Decides on places.
    tolerance
        By how much of ``wanted`` there may be more or fewer before the threshold changes.
    """
    counts = [int(mask.sum()) for mask in masks]
    numbers = np.split(np.arange(len(values)), np.cumsum(counts)[:-1])
    kept = []
    for mine in numbers:
        size = np.abs(values[mine].astype(np.float64))
        stays = size >= threshold
        stays[np.argmax(size)] = True
        kept.append(stays)
    pruned = sum(int((~stays).sum()) for stays in kept)
    survivors = [int(stays.sum()) for stays in kept]
    room = [len(mask) - count for mask, count in zip(masks, survivors, strict=True)]
    grown = shared_out(pruned, survivors, room)
    found: list[Array] = []
    sources: list[Array] = []
    for mask, mine, stays, more in zip(masks, numbers, kept, grown, strict=True):
        source = np.full(len(mask), -1)
        places = np.flatnonzero(mask)[stays]
        source[places] = mine[stays]
        now = np.zeros(len(mask), bool)
        now[places] = True
        now[draw.choice(np.flatnonzero(~now), more, replace=False)] = True
        found.append(now)
        sources.append(source[now])
    if pruned < (1 - tolerance) * wanted:
        threshold *= 2
    elif pruned > (1 + tolerance) * wanted:
        threshold /= 2
    return Rewiring(found, np.concatenate(sources), threshold, pruned)


def shared_out(total: int, weights: Sequence[int], room: Sequence[int]) -> list[int]:
    """``total`` in whole parts, in proportion to ``weights`` by largest remainders, none above its
    ``room``; together these have it.

    Examples
    --------
    >>> shared_out(10, [3, 1, 1], [100, 100, 100])
    [6, 2, 2]
    >>> shared_out(10, [3, 1, 1], [4, 100, 100])
    [4, 3, 3]
    """
    parts = np.zeros(len(weights), int)
    rest = total
    while rest:
        free = np.asarray(room) - parts
        share = np.where(free > 0, np.asarray(weights, float), 0.0)
        exact = rest * share / share.sum()
        part = np.floor(exact).astype(int)
        order = np.argsort(-(exact - part), kind="stable")
        part[order[: rest - part.sum()]] += 1
        part = np.minimum(part, free)
        parts += part
        rest -= int(part.sum())
    return [int(part) for part in parts]
