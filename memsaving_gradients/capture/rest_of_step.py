"""The bytes that the rest of a step takes once a gradient exists: mostly optimizer temporaries.

A plan orders a gradient computation, but not the ops that use its gradients. Yet a budget is the
step's, and an optimizer may take several times the bytes of all activations where the largest
weights get their gradients. A planner that does not know of these bytes plans for too many there
and, with a smaller budget, for too few everywhere else. So the op that computes a gradient counts
the bytes of the rest as scratch space.

Where the ops on a gradient run in an order of their own
(:mod:`memsaving_gradients.rewriting.update_order`), these bytes are known. Elsewhere they depend on
the plan: the whole step is simulated once the graph follows one. Until then there are estimates,
from the step as the executor runs it before gradients are rewritten. `late`: all of the rest from
one gradient to the next, including unfinished work on earlier gradients. `prompt`: values made of
the gradient alone, and values that wait for several gradients (clipped by a common norm). The
executor may leave the gradients of the largest weights for last, where a network ends with these.
There, `prompt` or zero is closer than `late`. Linear in ops and buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.memory.liveness import timeline
from graph_tools.memory.timeline import Timeline
from graph_tools.ops import op_types
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["Rest", "Update", "Whole", "with_rest"]


@dataclass(frozen=True, eq=False)
class Update:
    """The ops of a step that use one gradient alone.

    Attributes
    ----------
    ends
        The last of these ops.
    ops
        The names of the ops, if they run one after the other; empty: the executor orders them.
    takes
        The most bytes that the gradient and the outputs of these ops then take.
    """

    ends: Sequence[tf.Operation]
    ops: Collection[str] = ()
    takes: int = 0


@dataclass(frozen=True, eq=False)
class Whole:
    """A step whose function has been traced to its end.

    Attributes
    ----------
    plain
        The step as TensorFlow built it, simulated as it runs.
    updates
        By name of a gradient's op, the ops that use the gradient.
    source, run
        The ops of the step, and their simulation before gradients are rewritten; ``None``: XLA
        orders them.
    share
        The share of the budget for these gradients alone; ``None``: the budget is the whole step's.
    others
        Whether other calls have plans. If none keeps the budget, follow the one of least memory.
    """

    plain: Simulation
    updates: Mapping[str, Update]
    source: OpGraph | None = None
    run: Simulation | None = None
    share: float | None = None
    others: bool = False


@dataclass(frozen=True, eq=False)
class Rest:
    """The bytes that the rest of a step takes in addition to gradients.

    Parameters
    ----------
    grads
        The gradients.
    counted
        Names of the ops that plans themselves count.
    whole, run
        The whole step, and its simulation as the executor runs it before gradients are rewritten.
    hold
        Whether plans count gradients until the end of the step, so that the rest does not.
    updates
        As in `Whole`.
    """

    grads: Sequence[tf.Tensor]
    counted: Collection[str]
    whole: OpGraph
    run: Timeline
    hold: bool
    updates: Mapping[str, Update] = field(default_factory=dict)

    @cached_property
    def estimates(self) -> tuple[list[int], ...]:
        """The estimates in the order in which they are tried, each with the bytes of the rest for
        each gradient: `late`, `prompt` and zero."""
        return self.late, self.prompt, [0] * len(self.grads)

    @cached_property
    def late(self) -> list[int]:
        """For each gradient, the most bytes of the rest from this gradient to the next."""
        rest = {v for v in self.run.owner if not self._is_counted(self.whole.producer[v])}
        # Of these updates, each ends before the next one begins.
        turns = {name for one in self.updates.values() for name in one.ops}
        rest -= {v for v in rest if self.whole.ops[self.whole.producer[v]].name in turns}
        gradients = set() if self.hold else {*self._roots} - self._in_turn.keys()
        at = self._most_from_each(rest | gradients)
        return self._without_own(
            lambda root: at.get(root, 0) + self._in_turn.get(root, 0),
            rest | gradients | self._in_turn.keys(),
        )

    @cached_property
    def prompt(self) -> list[int]:
        """For each gradient, the most bytes of values made of it alone, and of values that wait for
        several gradients."""
        made_of, waiting = self._made_of_gradients
        if self.hold:
            waiting = waiting - set(self._roots)
        alone = defaultdict(list)
        for value, life in self._lives.items():
            if value in made_of and value not in waiting:
                alone[made_of[value]].append(life)
        # Gradients come in the order of the plan, and not in the order of this run.
        at = self._most_from_each(waiting)
        inside = zip(sorted(at), sorted(at, key=lambda root: self._lives[root]), strict=True)
        then = {root: at[other] for root, other in inside}
        return self._without_own(
            lambda root: self._in_turn.get(root, _peak(alone[root])) + then.get(root, 0),
            self._roots,
        )

    def _without_own(self, most: Callable[[int], int], of: Collection[int]) -> list[int]:
        """Return ``most`` for each gradient, less its own bytes if it is among ``of``: plans count
        these bytes themselves."""
        own = ((root, self._lives.get(root, (0, 0, 0))[2]) for root in self._roots)
        return [max(0, most(root) - (size if root in of else 0)) for root, size in own]

    def _is_counted(self, op: int) -> bool:
        return self.whole.ops[op].name in self.counted

    @cached_property
    def _roots(self) -> list[int]:
        """For each gradient, the value whose buffer it uses; -1: the step does not use it."""
        whole = self.whole
        return [
            int(whole.storage[whole.value(grad)]) if grad.op.name in whole.position else -1
            for grad in self.grads
        ]

    @cached_property
    def _in_turn(self) -> dict[int, int]:
        """For each gradient whose ops run in an order of their own, the most bytes of it and of
        their outputs."""
        takes = (
            (root, self.updates.get(g.op.name))
            for g, root in zip(self.grads, self._roots, strict=True)
        )
        return {root: one.takes for root, one in takes if one is not None and one.ops}

    @cached_property
    def _lives(self) -> Mapping[int, tuple[int, int, int]]:
        """For each value with a buffer, its first position, its last one, and its bytes."""
        born, dies, size = (array.tolist() for array in self.run.buffers)
        return {
            value: (max(born[k], 0), max(dies[k], 0), size[k])
            for k, value in enumerate(self.run.owner)
        }

    def _most_from_each(self, values: Collection[int]) -> dict[int, int]:
        """Return, for each gradient, the most bytes of ``values`` from it to the next gradient."""
        ends = len(self.run.bytes_alive)
        found = [self._lives[value] for value in values if value in self._lives]
        first, last, size = np.array(found, np.int64).reshape(-1, 3).T
        alive = timeline(first, last, size, ends)
        begins = {root: self._lives[root][0] for root in self._roots if root in self._lives}
        places = sorted(set(begins.values()))
        most = {a: int(alive[a:b].max(initial=0)) for a, b in pairwise([*places, ends])}
        return {root: most[place] for root, place in begins.items()}

    @cached_property
    def _made_of_gradients(self) -> tuple[dict[int, int | None], set[int]]:
        """For each gradient and each value of the rest computed from gradients: its gradient
        (``None``: several). Also the values that wait for several, or that waiting ops read."""
        whole = self.whole
        storage, first = whole.storage.tolist(), whole.first_value.tolist()
        made_of: dict[int, int | None] = {root: root for root in self._roots}
        waiting: set[int] = set()
        for i, op in enumerate(whole.ops):
            if self._is_counted(i):
                continue
            reads = [storage[value] for value in whole.inputs[i]]
            each = [{made_of[root]} if root in made_of else set() for root in reads]
            if not op_types.is_split(op):
                of = set().union(*each)
                each = [of] * len(op.outputs)
                if len(of) > 1 or None in of:
                    waiting |= made_of.keys() & reads
            for k, of in enumerate(each):
                root, (one, *others) = storage[first[i] + k], of or {-1}
                if of and made_of.setdefault(root, None if others else one) is None:
                    waiting.add(root)
        return made_of, waiting


def _peak(lives: Sequence[tuple[int, int, int]]) -> int:
    """Return the most bytes of buffers that are alive at once."""
    events = [(born, size) for born, _, size in lives]
    events += [(dies + 1, -size) for _, dies, size in lives]
    return max(accumulate(size for _, size in sorted(events)), default=0)


def with_rest(step: CapturedStep, grads: Sequence[tf.Tensor], rest: Sequence[int]) -> CapturedStep:
    """Return the step with ``rest``, the bytes of the rest of the step for each gradient, added to
    the scratch space of the op that computes the gradient."""
    graph = step.graph
    workspace = np.zeros(graph.length, np.int64)
    for grad, taken in zip(grads, rest, strict=True):
        maker = graph.producer[graph.storage[step.source.value(grad)]]
        workspace[maker] = max(workspace[maker], taken)
    if graph.workspace is not None:
        workspace += graph.workspace
    return replace(step, graph=replace(graph, workspace=workspace))
