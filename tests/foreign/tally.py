"""What happened during one test: the plans that were used, and what trained models came to.

A patch under which all passes may have done nothing; so the plans are counted that recompute
something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memsaving_gradients.engine.graph_state import Watch
from memsaving_gradients.reports.plan import Plan

__all__ = ["Tally", "alike", "recomputes"]

#: Trained weights differ by what kernels and their order leave open, which steps of training add
#: up.
RELATIVE, ABSOLUTE = 1e-2, 1e-3


def recomputes(plan: Plan) -> bool:
    """Whether some op, or a segment of a loop, runs a second time with ``plan``."""
    return plan.clones > 0 or bool(plan.replayed)


@dataclass
class Tally:
    """Counts of one test.

    Attributes
    ----------
    watch
        Has the plans that were used.
    asked
        How many gradient computations were traced.
    infeasible
        How many gradient computations could not keep their budget, and got the least one that they
        can keep.
    trained
        For each call of ``fit``, the mean of the absolute numbers of each weight afterwards.
    """

    watch: Watch = field(default_factory=Watch)
    asked: int = 0
    infeasible: int = 0
    trained: list[list[float]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Gradient computations: all that were traced, those with a plan, those that recompute, and
        those whose budget was too small."""
        plans = self.watch.plans
        rewired = sum(map(recomputes, plans))
        counts = {"asked": self.asked, "planned": len(plans), "rewired": rewired}
        return {**counts, "infeasible": self.infeasible}


def alike(plain: Sequence[Sequence[float]], patched: Sequence[Sequence[float]]) -> bool:
    """Whether all models of a test were trained to the same weights, as far as numbers are the same
    from run to run.

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
