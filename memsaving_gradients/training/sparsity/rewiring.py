"""One step of dynamic sparse reparameterization, on arrays: drop small weights, and begin others
elsewhere.

Mostafa & Wang 2019 (arXiv 1902.05967), algorithm 1: all layers drop their weights below one
threshold, which is doubled or halved if that was much less or much more than wanted. As many
weights begin at zero, at random places, in each layer in proportion to the weights that it kept:
layers whose weights have grown get more. The number of weights stays the same. The cost is a few
passes over all places, without sorting the weights.
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
    """The places of weights after a step.

    Attributes
    ----------
    masks
        For each layer, whether each place has a weight.
    sources
        For each weight, in the order of layers and places, its number before; -1: it is new.
    threshold
        The threshold of the next step.
    """

    masks: list[Array]
    sources: Array
    threshold: float


def rewired(
    masks: Sequence[Array],
    values: Array,
    threshold: float,
    wanted: int,
    draw: np.random.Generator,
    tolerance: float = 0.1,
) -> Rewiring:
    """Drop weights below a threshold, and begin as many elsewhere.

    Parameters
    ----------
    masks
        For each layer, whether each place has a weight (flat, bool). Every layer has at least one
        weight, and keeps one.
    values
        The weights, in the order of layers and places.
    threshold
        Weights with an absolute value below it are dropped.
    wanted
        How many weights should be dropped.
    draw
        The generator that draws new places.
    tolerance
        The share of ``wanted`` by which dropped weights may miss it before the threshold changes.
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
    return Rewiring(found, np.concatenate(sources), threshold)


def shared_out(total: int, weights: Sequence[int], room: Sequence[int]) -> list[int]:
    """Split ``total`` into whole parts in proportion to ``weights``, by largest remainders; no part
    is above its ``room``, and all rooms together hold ``total``.

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
