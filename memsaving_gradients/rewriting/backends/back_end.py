"""The interface between the pass over a schedule and a back end.

The pass (:mod:`memsaving_gradients.rewriting.clones`) makes clones and re-points inputs. When an op
runs is the task of the back end, which knows what the runtime obeys. It sees each entry of the
schedule twice: before the pass builds ops for it, and after. In between, the pass asks it for
gates. A *gate* is what holds a run of clones back, and has a number. It is an op, or all of a
conditional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.capture.sums import Sums
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.clone_groups import CloneRun
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.rewriting.stored_values import Loads
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["BackEnd", "PassState"]


@dataclass(frozen=True, eq=False)
class PassState:
    """The state that a pass over a schedule shares with its back end.

    Attributes
    ----------
    step
        The captured training step.
    schedule, simulation
        The schedule that the step will follow, and bytes alive over it.
    updates
        By name of a gradient's op, the use of the gradient.
    merging
        The merges that the runtime makes.
    sums
        The sums that become chains.
    run
        The clones of the current run, and the gates of all clones so far.
    loads
        The values stored and loaded so far.
    rewiring
        The record of edits.
    clones
        The clones and loads so far.
    """

    step: CapturedStep
    schedule: Schedule
    simulation: Simulation
    updates: Mapping[str, Update]
    merging: Merging
    sums: Sums
    run: CloneRun
    loads: Loads
    rewiring: Rewiring
    clones: Mapping[Key, tf.Operation]


class BackEnd(ABC):
    """The edits that make a runtime run ops in the order of one schedule.

    Attributes
    ----------
    in_order
        Whether a run ends before a clone that could run too early. If not, a run ends only where it
        must.
    """

    in_order: ClassVar[bool]

    @abstractmethod
    def before(self, entry: Step) -> None:
        """Prepare for an entry; called before ops are built for it, or its inputs re-pointed."""

    @abstractmethod
    def gate_behind_backward(self, first: Key) -> int:
        """Make a gate in front of the clone ``first``, behind the backward ops since the last run
        of clones; return its number."""

    @abstractmethod
    def gate_behind_clones(self, first: Key) -> int:
        """Make a gate in front of the clone ``first``, behind the clones of the current run; return
        its number."""

    @abstractmethod
    def hold_clone(
        self, entry: Step, inputs: Sequence[tf.Tensor], reads: Collection[Key], gate: int
    ) -> Sequence[tf.Tensor]:
        """Return the tensors that a clone behind a gate reads instead of ``inputs``; ``reads``: the
        clones that it reads."""

    @abstractmethod
    def hold_load(self, entry: Step, parts: Sequence[tf.Tensor], gate: int) -> Sequence[tf.Tensor]:
        """Return the tensors that a load behind a gate reads instead of ``parts``."""

    @abstractmethod
    def after(self, entry: Step, op: tf.Operation) -> None:
        """Give ``op``, which runs an entry, its place in the order; called when its inputs are
        final."""

    @abstractmethod
    def finish(self, wanted: Collection[tf.Tensor]) -> Mapping[object, tf.Tensor]:
        """Make the last changes, when all entries have their places; return, by reference, the
        tensors that replace others.

        ``wanted``: tensors whose readers do not exist yet (gradients).
        """
