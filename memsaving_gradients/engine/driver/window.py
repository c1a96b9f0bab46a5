"""For which share of a budget the next plan is made, when plans are tried one after the other.

A plan needs about the bytes it is made for, and a few per cent more or less as it runs. What broke
the budget closes the window of shares from above, what was asked for closes it from below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memsaving_gradients.planners.meter import EXECUTOR_ADDS

__all__ = ["Window"]


@dataclass
class Window:
    """Shares of a budget that plans were made for.

    Attributes
    ----------
    share
        The one that the next plan is made for.
    most_asked
        Of those that plans were asked for when one kept the budget, or none was found, the largest.
    least_broken
        The least with which a plan broke the budget.
    """

    share: float
    most_asked: float = 0.0
    least_broken: float = math.inf

    def narrow(self) -> bool:
        """Go to the middle between what was asked for last and what broke the budget, as far as
        plans can differ there; whether they can.

        Examples
        --------
        >>> window = Window(0.6, least_broken=0.9)
        >>> window.narrow(), window.share
        (True, 0.75)
        >>> Window(0.6, least_broken=0.61).narrow()
        False
        """
        self.most_asked = max(self.most_asked, self.share)
        if not self.most_asked * (1 + EXECUTOR_ADDS) ** 2 < self.least_broken < math.inf:
            return False
        self.share = (self.most_asked + self.least_broken) / 2
        return True

    def step_down(self, made_for: float, need: float, attempt: int) -> None:
        """Ask for less after a plan broke the budget.

        Parameters
        ----------
        made_for, need
            The bytes that the plan was made for, and those that it takes as it runs, as shares of
            the budget.
        attempt
            How many came before. Each step down is larger than the last one: the executor adds
            about as much to the next plan, and the rest of a step grows as the plan shrinks.

        Examples
        --------
        >>> window = Window(1.0)
        >>> window.step_down(0.9, 1.2, 0)
        >>> round(window.share, 2), window.least_broken
        (0.74, 0.9)
        """
        self.least_broken = min(self.least_broken, made_for, self.share)
        self.share = min(made_for / need, self.share) * (1 - EXECUTOR_ADDS) ** (attempt + 1)
        if self.share <= self.most_asked:
            self.narrow()
