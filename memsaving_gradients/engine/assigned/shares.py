"""The share of simulated bytes to plan for, so that XLA assigns a certain number of bytes.

XLA assigns some bytes whatever the plan is, such as copies of weights in another layout, and others
in proportion to the simulated bytes. A line through the bytes of plain training and of the last
plan accounts for both.
"""

from __future__ import annotations

__all__ = ["next_share"]


def next_share(plain: int, share: float, assigned: int, target: int) -> float:
    """Return the simulated share of plain training to plan for next; not positive: there is none.

    Parameters
    ----------
    plain
        The bytes that XLA assigns to plain training.
    share, assigned
        The simulated share of the last plan, and the bytes that XLA assigns to it: too many.
    target
        The most bytes that XLA may assign.

    Examples
    --------
    Half of the bytes that depend on the plan were saved; a fifth of all does not depend on it:

    >>> round(next_share(100, 0.5, 60, 40), 3)
    0.25

    Nothing was saved, so the next share is smaller in proportion:

    >>> round(next_share(100, 0.5, 100, 80), 3)
    0.4
    """
    in_proportion = share * target / assigned
    if assigned >= plain or share >= 1:
        return in_proportion
    slope = (plain - assigned) / (1 - share)
    return min(share - (assigned - target) / slope, in_proportion)
