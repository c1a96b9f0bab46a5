"""Make original backward ops run when they are due, not as soon as they could.

The executor runs an op as soon as its inputs are there. A backward op that reads only forward
values is ready during the forward pass. If it would hold much memory long before its turn, it waits
for an op shortly before it in the schedule. Near the peak, the order of the ops that make and read
large buffers decides how high it is. So these run strictly one after the other, as do other ops
that could make a peak of their own if they ran together. Folding may combine the second factor of a
product with a constant of the product's reader. The combination is an op of its own, which waits
for the first factor.

An op waits by reading one input through an identity with control edges
(:func:`memsaving_gradients.rewriting.gates.gated`). Forward ops do not change, nor do edges whose
ends may be merged, or whose readers may be merged with each other. So a filter gradient waits with
the images that it reads, not with the gradient (:mod:`memsaving_gradients.rewriting.fusion`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.capture.sums import Sums
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.rewriting.gates import fixed_inputs, gated, widest_input
from memsaving_gradients.schedules.schedule import Step
from memsaving_gradients.schedules.simulate import Simulation

__all__ = ["EARLY_SHARE", "HUGE_SHARE", "MOST_TRIGGERS", "SLACK_SHARE", "Holds"]

#: An op that is ready too early is held back if it makes at least this share of the peak …
EARLY_SHARE = 1 / 512
#: … and if other ops write this share of the peak before its turn. Addends that together take this
#: share are made one by one, each when the last one has been added. Both by judgement: a smaller
#: share costs control edges, a larger one breaks budgets more often.
SLACK_SHARE = 1 / 8
#: Ops of the backward pass that make or read a buffer of at least this share of the peak, or take
#: as much scratch space, run one after the other, …
HUGE_SHARE = 1 / 48
#: … where at least this share of the peak is alive, or where they could take more than the peak
#: together with unordered ops before them.
CLOSE_SHARE = 1 / 2
#: Of the ops that cannot be made to wait, at most this many of the latest are waited for together.
MOST_TRIGGERS = 8


class Holds:
    """The state of one pass over a schedule.

    Attributes
    ----------
    written
        Bytes that the schedule has written so far.
    turn
        For each execution, the value of ``written`` when it has really run.
    on_time
        Ops that run when they are due, for others to wait for.
    alive
        Bytes alive at the executions to come.
    last_huge
        The latest ops that touch huge buffers; near the peak, the end of their line.
    most
        The most bytes alive since the last op that waited for the line.
    loose
        Bytes of the huge ops since then.
    """

    _originals = repeat(0)

    def __init__(
        self,
        step: CapturedStep,
        simulation: Simulation,
        rewiring: Rewiring,
        merging: Merging,
        sums: Sums,
        updates: Mapping[int, Update],
    ) -> None:
        self.updates = updates
        self.graph, self.ops = step.graph, step.source
        self.rewiring, self.merging, self.sums = rewiring, merging, sums
        self.written = self.most = self.loose = 0
        self.turn: dict[Key, int] = {}
        self.on_time: deque[tuple[int, tf.Operation]] = deque()
        self.last_huge: list[tf.Operation] = []
        #: For each sum, the place at which all its addends so far have run (`Merging.until`).
        self._added_until: dict[int, int] = {}
        merged = op_types.MERGED_AT_RUN_TIME if graphs.has_onednn() else set()
        self._unordered = op_types.VIEWS | merged
        peak = simulation.peak
        self.slack, self.large = peak * SLACK_SHARE, peak * EARLY_SHARE
        self.huge, self.close, self.peak = peak * HUGE_SHARE, peak * CLOSE_SHARE, peak
        self.alive = iter(simulation.bytes_alive.tolist())

    def place(self, entry: Step, op: tf.Operation) -> None:
        """Give ``op``, which runs ``entry``, its place in the order; call for all executions, in
        order."""
        backward = not entry.copy and entry.op >= self.graph.first_backward
        if backward:
            self._hold_factor(entry)
        self._hold_if_early(entry, op)
        # A huge op far from the peak does not wait, but the first one close to the peak waits for
        # it: it may still hold its inputs.
        huge, update = self._is_huge(entry, op), self.updates.get(entry.op)
        takes = max(self.graph.written[entry.op], 0 if update is None else update.takes)
        lined_up = self._lines_up(huge, takes)
        held = backward and self._hold_in_line(entry.op, lined_up)
        if backward:
            # An addend of a sum is alive until it is added.
            added = self.sums.add(entry.op, op)
            until = self.merging.until(entry.op)
            for total in self.sums.of(entry.op):
                self._added_until[total] = max(until, self._added_until.get(total, until))
            if added is not None and self._have_run(self.sums.of(entry.op), entry.op):
                op = added
        if huge and self._may_trigger(entry, op):
            # A gradient is alive until it has been used, where the use is known.
            ends = [op] if update is None else update.ends
            # An op that could not be made to wait joins the ops that it should have waited for:
            # until it has run, it holds its inputs, and the next op must not add to these.
            self.last_huge = [*ends] if held else [*self.last_huge[-MOST_TRIGGERS:], *ends]

    def _lines_up(self, huge: bool, takes: int) -> bool:
        """Return whether the present execution waits for the line. ``takes``: the bytes of its
        results, or of the use of its result if that takes more."""
        alive = next(self.alive)
        self.most = max(self.most, alive)
        if not huge:
            return False
        if alive >= self.close or self.most + self.loose + takes > self.peak:
            self.most, self.loose = alive, 0
            return True
        self.loose += takes
        return False

    def _hold_in_line(self, position: int, lined_up: bool) -> bool:
        """Let an original wait for the end of the line, and for the last additions of the large
        sums for which it makes an addend; return whether it waits."""
        line = self.last_huge if lined_up else []
        if self._have_run(self.sums.of(position), position):
            line = [*line, *self.sums.last_of(position, self.slack)]
        waits_for = dict.fromkeys(line)
        return bool(waits_for) and self.hold_back(position, list(waits_for))

    def _have_run(self, sums: Sequence[int], position: int) -> bool:
        """Return whether all addends of ``sums`` so far have run when the op at ``position``
        comes in the schedule: none of them is merged with later ops."""
        place = self.merging.place(position)
        return all(self._added_until.get(total, place) <= place for total in sums)

    def _hold_factor(self, entry: Step) -> None:
        """Let the second input of an op wait for the first where folding combines it with a
        constant of the op's reader.

        The combination is an op of its own, which would run, and hold its result, as soon as the
        second input is there.
        """
        position, op = entry.op, self.ops.ops[entry.op]
        if not self.merging.meets_constant(position):
            return
        if position in self.merging.twin_of:
            self._wait_with_twin(position)
            return
        first, second = self.ops.inputs[position]
        turns = [
            self.turn.get((int(self.ops.producer[value]), copy), 0)
            for value, copy in zip((first, second), entry.reads or (0, 0), strict=True)
        ]
        waits_for = op.inputs[0].op
        if (
            turns[1] >= turns[0]
            or self.graph.size[self.graph.storage[second]] < self.large
            or self.graph.source[self.graph.storage[second]]
            or self.ops.producer[first] < self.graph.first_backward
            or not self.merging.may_be_waited_for(int(self.ops.producer[first]))
            or not (self.ops.here[position] and self.ops.here[self.ops.producer[first]])
            or self.merging.merges(int(self.ops.producer[second]))
        ):
            return
        self.rewiring.point(op, 1, self._gated(position, 1, [waits_for]))

    def _hold_if_early(self, entry: Step, op: tf.Operation) -> None:
        """Let an original op wait for its turn if it is ready long before and would hold much
        memory until then.

        The ``turn`` of an op is the number of bytes that the schedule has written when the op has
        run. An op is on time if one of its inputs was made, on time, not long before. An op that is
        not on time runs as soon as its inputs are there: its turn comes right after theirs.
        """
        graph, position = self.graph, entry.op
        due = self.written
        made = self.graph.written[position]
        self.written += made
        ready = max(
            (
                self.turn[(int(graph.producer[v]), copy)]
                for v, copy in zip(
                    graph.reads[position], entry.reads or self._originals, strict=False
                )
            ),
            default=0,
        )
        key = (position, entry.copy)
        if not self.ops.here[position]:
            # Another device runs it when it is ready.
            self.turn[key] = ready + made
            return
        if due - ready <= self.slack:
            self.turn[key] = due + made
            if not entry.copy and self.graph.live[position] and self._may_trigger(entry, op):
                self.on_time.append((due, op))
            return
        self.turn[key] = ready + made
        if entry.copy or position < graph.first_backward:
            return
        if made < self.large or not self.on_time:
            return
        while len(self.on_time) > 1 and self.on_time[1][0] <= due - self.slack:
            self.on_time.popleft()
        if self.hold_back(position, [self.on_time[0][1]]):
            self.turn[key] = due + made

    def _is_huge(self, entry: Step, op: tf.Operation) -> bool:
        """Return whether an execution touches a huge buffer, or takes as much scratch space, and
        can be ordered."""
        graph, position = self.graph, entry.op
        if (position < graph.first_backward and not entry.copy) or not self.ops.here[position]:
            return False
        touched = (*graph.reads[position], *graph.writes[position])
        sizes = [int(graph.size[graph.storage[v]]) for v in touched]
        scratch = 0 if graph.workspace is None else int(graph.workspace[position])
        return max([scratch, *sizes]) >= self.huge and op.type not in self._unordered

    def _may_trigger(self, entry: Step, op: tf.Operation) -> bool:
        """Return whether a control edge from ``op``, which ends an execution, leaves the kernels
        that it may be fused into as they are."""
        if not self.merging.may_be_waited_for(entry.op, entry.copy):
            return False
        return entry.op >= self.graph.first_backward or op.type not in op_types.FUSED

    def _wait_with_twin(self, position: int) -> bool:
        """Let an op wait for the same ops as the earlier op that it equals."""
        op = self.ops.ops[position]
        for k, tensor in enumerate(self.ops.ops[self.merging.twin_of[position]].inputs):
            if op.inputs[k] is not tensor:
                self.rewiring.point(op, k, tensor)
        return True

    def hold_back(self, position: int, triggers: Sequence[tf.Operation]) -> bool:
        """Let an original wait for ``triggers``, unless that could change the kernels that it is
        fused into; return whether it waits."""
        op = self.ops.ops[position]
        if op.type in self._unordered or not self.ops.here[position]:
            return False
        if position in self.merging.twin_of:
            return self._wait_with_twin(position)
        if op_types.adds_as_buffers_come(op):
            return False
        fixed = [
            constant
            or self.merging.merges(int(self.ops.producer[value]))
            or self.merging.shares(position, value)
            for constant, value in zip(
                self.ops.constants(position), self.ops.inputs[position], strict=True
            )
        ]
        fixed = [*fixed_inputs(op, fixed)]
        index = widest_input(op.inputs, fixed)
        if index is None:
            return False
        indices = [index]
        if self.merging.loses(position) and not any(fixed):
            indices = [*range(len(fixed))]
            self.merging.note_held(position)
        for k in indices:
            self.rewiring.point(op, k, self._gated(position, k, triggers))
        return True

    def _gated(self, position: int, index: int, triggers: Sequence[tf.Operation]) -> tf.Tensor:
        """Return an input of an original behind ``triggers``, held on the original's device, so
        that no other device waits for it."""
        op = self.ops.ops[position]
        copied = self.ops.reads_from_elsewhere(position)
        waits_for = [self.merging.trigger(other) for other in triggers]
        name = op.name
        if self.merging.loses(position):
            # Grappler sorts factors by name, and the names of gates end in a running number.
            name = f"{name}_{index}"
        return gated(op.inputs[index], waits_for, name, op.device, copied=copied)
