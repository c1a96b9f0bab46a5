"""For how many bytes the next plan is asked, when plans are tried one after the other.

The executor, the rest of the step and holes between chunks add to what a plan is made for: by a
per cent or by a third, but by about the same share to the next plan. So the next one is asked for
what would just do, and what kept the budget and what broke it close in on it from both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsaving_gradients.planners.meter import EXECUTOR_ADDS

__all__ = ["Window"]


@dataclass
class Window:
    """Peaks of plans, in bytes asked for, that may be worth trying.

    Attributes
    ----------
    low
        The largest that kept the budget, or that is of no use.
    high
        The least that broke it.
    broken
        How many did.
    asked
        What the next plan is asked for; ``None``: nothing is left to try.

    Examples
    --------
    >>> window = Window()
    >>> window.broke(1000, 1.25)
    >>> window.asked
    788
    >>> window.kept(780, 0.5)
    >>> window.asked
    894
    >>> window.broke(800, 1.01)
    >>> window.asked is None
    True

    A step that allocates nothing has nothing to gain:

    >>> window = Window()
    >>> window.kept(100, 0.0)
    >>> window.asked is None
    True
    """

    low: int = 0
    high: float = math.inf
    broken: int = 0
    asked: int | None = None

    def kept(self, peak: int, used: float) -> None:
        """Ask for more: a plan of this peak kept the budget, and used this share of it, which is
        nothing where a step allocates nothing."""
        self.low = max(self.low, self.asked or 0, peak)
        self.asked = self._near(peak / used * (1 - EXECUTOR_ADDS) if used else math.inf)

    def broke(self, peak: int, used: float) -> None:
        """Ask for less: a plan of this peak used more than all of the budget.

        Each step down is larger than the last one: the rest of a step grows as the plan shrinks.
        """
        is_least = self.asked is not None and peak > self.asked
        self.high = min(self.high, peak)
        self.broken += 1
        aimed = peak / used * (1 - EXECUTOR_ADDS) ** self.broken
        self.asked = None if is_least else self._near(aimed)

    def of_no_use(self, peak: int) -> None:
        """Ask for more: a plan of this peak takes longer than another one that keeps the budget."""
        self.low = max(self.low, self.asked or 0, peak)
        self.asked = self._near(math.inf)

    def _near(self, aimed: float) -> int | None:
        """So many bytes or, where it is known what comes of these, the middle of the window;
        ``None`` where plans hardly differ in it, or it has no middle."""
        if self.low * (1 + EXECUTOR_ADDS) ** 2 >= self.high:
            return None
        if not self.low < aimed < self.high:
            aimed = (self.low + self.high) / 2
        return None if math.isinf(aimed) else int(aimed)
