"""Plans and explanations made by hand, for tests of reports."""

from __future__ import annotations

from typing import Any

import numpy as np

import memsaving_gradients as ms
from graph_tools.memory.timeline import Alive
from memsaving_gradients.reports.explanation import Explanation, Layer, Parts, Point
from memsaving_gradients.schedules.simulate import Simulation

MIB = 1 << 20


def decision(tensor: str, size: int = 4096, **fields: Any) -> ms.Decision:
    known = {"fate": "keep", "reason": "checkpoint 1", "op_type": "Tanh", "source": ""}
    return ms.Decision(tensor, size, **{**known, **fields})


def simulation(*mebibytes: int, largest: tuple[Alive, ...] = ()) -> Simulation:
    """Return the simulation of a step with these mebibytes alive at each op."""
    alive = np.array(mebibytes, np.int64) * MIB
    peak = int(alive.max(initial=0))
    lives = np.zeros(1, np.int64), np.ones(1, np.int64), np.array([peak])
    return Simulation(alive, peak, lives, largest=largest)


def plan(**fields: Any) -> ms.Plan:
    known: dict[str, Any] = {
        "mode": "budget",
        "decisions": (),
        "peak_plain": 8 * MIB,
        "peak": 4 * MIB,
        "extra_time": 0.125,
        "clones": 26,
        "checkpoints": (),
        "gating": "control",
        "planner": "auto",
        "budget": 5 * MIB,
        "simulation_plain": simulation(1, 8, 3),
        "simulation": simulation(
            1, 4, 2, 3, largest=(Alive("net/a/Tanh:0", 3 * MIB, "forward", 0, 2),)
        ),
    }
    return ms.Plan(**{**known, **fields})


def explanation(**fields: Any) -> Explanation:
    known: dict[str, Any] = {
        "parts": Parts(2 * MIB, 4 * MIB, 0, 6 * MIB, MIB),
        "allocated_plain": 8 * MIB,
        "layers": tuple(
            Layer(f"net/block_{k}", size * MIB, f"model.py:{k + 1}")
            for k, size in enumerate((3, 2, 1))
        ),
        "curve": (
            Point(8 * MIB, 1.0, 0.0, 0.0, 0),
            Point(6 * MIB, 0.75, 0.1, 0.05, 4),
            Point(3 * MIB, 0.375, 0.5, 0.2, 20),
        ),
        "seconds": 0.01,
    }
    return Explanation(**{**known, **fields})
