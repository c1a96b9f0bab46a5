"""The share of simulated bytes to plan for, where the bytes that XLA assigns are to be a certain
number.

XLA assigns some bytes whatever the plan is, such as copies of weights in another layout, and some
in proportion to what is simulated. A line through what plain training and the last plan take knows
of both.
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
        The bytes that it is to assign at most.

    Examples
    --------
    Half of what depends on the plan was saved, and a fifth is there whatever the plan is:

    >>> round(next_share(100, 0.5, 60, 40), 3)
    0.25

    Nothing was saved: the plan is to be smaller in proportion.

    >>> round(next_share(100, 0.5, 100, 80), 3)
    0.4
    """
    in_proportion = share * target / assigned
    if assigned >= plain or share >= 1:
        return in_proportion
    slope = (plain - assigned) / (1 - share)
    return min(share - (assigned - target) / slope, in_proportion)
