"""Records of one test: the plans that were used, and the weights of trained models.

All tests would pass under a patch that does nothing, so plans that recompute something are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memsaving_gradients.engine.graph_state import Watch
from memsaving_gradients.reports.plan import Plan

__all__ = ["Tally", "alike", "recomputes"]

#: Tolerances for trained weights: kernels, and their order, do not fix the last bits, and steps of
#: training add up the differences.
RELATIVE, ABSOLUTE = 1e-2, 1e-3


def recomputes(plan: Plan) -> bool:
    """Return whether ``plan`` recomputes an op, or a segment of a loop."""
    return plan.clones > 0 or bool(plan.replayed)


@dataclass
class Tally:
    """Counts of one test.

    Attributes
    ----------
    watch
        Recorder of the plans that were used.
    asked
        Number of traced gradient computations.
    infeasible
        Number of gradient computations whose budget was refused, and that got the least budget or
        none.
    trained
        For each call of ``fit``, the mean of the absolute values of each weight afterwards.
    """

    watch: Watch = field(default_factory=Watch)
    asked: int = 0
    infeasible: int = 0
    trained: list[list[float]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the numbers of gradient computations: all that were traced, with a plan, with
        recomputation, and with too small a budget."""
        plans = self.watch.plans
        rewired = sum(map(recomputes, plans))
        counts = {"asked": self.asked, "planned": len(plans), "rewired": rewired}
        return {**counts, "infeasible": self.infeasible}


def alike(plain: Sequence[Sequence[float]], patched: Sequence[Sequence[float]]) -> bool:
    """Return whether all models of a test were trained to the same weights, up to the differences
    between runs.

    Examples
    --------
    >>> alike([[0.5, 2.0]], [[0.5, 2.001]]), alike([[0.5, 2.0]], [[0.5, 2.3]]), alike([[0.5]], [])
    (True, False, False)
    """
    if [len(weights) for weights in plain] != [len(weights) for weights in patched]:
        return False
    return all(
        np.allclose(new, old, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        for old, new in zip(plain, patched, strict=True)
    )
