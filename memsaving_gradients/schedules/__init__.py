"""The planners' language: training graphs, schedules, and the simulation of one.

No module here uses TensorFlow. A `Schedule` lists which op runs when and which copy of each input
it reads.
"""

from __future__ import annotations

from memsaving_gradients.schedules.schedule import Schedule as Schedule
from memsaving_gradients.schedules.schedule import Step as Step
from memsaving_gradients.schedules.schedule import ordered as ordered
from memsaving_gradients.schedules.schedule import plain as plain
from memsaving_gradients.schedules.schedule import recompute_lazily as recompute_lazily
from memsaving_gradients.schedules.simulate import Simulation as Simulation
from memsaving_gradients.schedules.simulate import simulate as simulate
from memsaving_gradients.schedules.storage import Stored as Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph as TrainingGraph

__all__ = [
    "Schedule",
    "Simulation",
    "Step",
    "Stored",
    "TrainingGraph",
    "ordered",
    "plain",
    "recompute_lazily",
    "simulate",
]
