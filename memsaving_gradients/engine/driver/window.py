"""The bytes to ask for in the next plan, when plans are tried one after the other.

The executor, the rest of the step and holes between chunks add a share to a plan's peak: a per cent
or a third, but about the same share for the next plan. So the next plan is asked for the peak that
would just fit. Plans that kept the budget, and plans that broke it, close in on it from both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsaving_gradients.planners.meter import EXECUTOR_ADDS

__all__ = ["Window"]


@dataclass
class Window:
    """A range of plan peaks, in bytes asked for, that may be worth trying.

    Attributes
    ----------
    low
        The largest peak that kept the budget, or was of no use.
    high
        The least peak that broke the budget, or would: chunks are no smaller than buffers.
    broken
        The number of plans that broke the budget.
    asked
        The bytes to ask for in the next plan; ``None``: nothing is left to try.

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

    After a plan that is too slow, the next one may take half of the bytes that are left:

    >>> window = Window(high=1000)
    >>> window.of_no_use(600)
    >>> window.asked
    800

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

    def kept(self, peak: int, used: float, hoped: int = 0) -> None:
        """Ask for more bytes: a plan of this peak kept the budget and used this share of it (0 if
        the step allocates nothing). ``hoped``: bytes to ask for, if that is even more."""
        self.low = max(self.low, self.asked or 0, peak)
        aimed = peak / used * (1 - EXECUTOR_ADDS) if used else math.inf
        self.asked = self._near(max(aimed, hoped))

    def broke(self, peak: int, used: float) -> None:
        """Ask for fewer bytes: a plan of this peak needed ``used`` times the whole budget.

        Each step down is larger than the last one: the rest of a step grows as the plan shrinks.
        """
        is_least = self.asked is not None and peak > self.asked
        self.high = min(self.high, peak)
        self.broken += 1
        aimed = peak / used * (1 - EXECUTOR_ADDS) ** self.broken
        self.asked = None if is_least else self._near(aimed)

    def of_no_use(self, peak: int) -> None:
        """Ask for more bytes: a plan of this peak is slower than one that keeps the budget."""
        self.low = max(self.low, self.asked or 0, peak)
        self.asked = self._near(math.inf)

    def _near(self, aimed: float) -> int | None:
        """Return ``aimed``, or the middle of the window if ``aimed`` is outside of it; ``None`` if
        plans in the window hardly differ, or it has no middle."""
        if self.low * (1 + EXECUTOR_ADDS) ** 2 >= self.high:
            return None
        if not self.low < aimed < self.high:
            aimed = (self.low + self.high) / 2
        return None if math.isinf(aimed) else int(aimed)
