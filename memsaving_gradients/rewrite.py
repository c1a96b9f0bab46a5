"""Making TensorFlow follow a schedule: clones, re-pointed inputs, gates.

The executor runs an op as soon as its inputs are there, so a clone alone would run during the forward pass and save
nothing. Clones come in runs: those that the schedule puts between two backward ops. A run waits, through one gate, for
every backward op before it in the schedule that nothing else waits for; only the *roots* of the run (clones that read no
other clone of it) need the gate, and each gate waits for the one before it.

Originals can be early as well: a backward op that reads forward values alone is ready during the forward pass. Where such
an op would hold much memory long before its turn, it waits for an op shortly before it in the schedule. Forward ops are left
as they are. And where single buffers are a large part of the peak, the
order of the few ops that make and read them decides it: in the backward pass those run strictly one after the other.

How a root is gated is the business of :mod:`memsaving_gradients.gates`.

Grappler's remapper and oneDNN fuse a product, the addition behind it and an activation where nothing else reads the
values between, constant folding moves a constant factor past the op before it, and the results have other last bits.
Originals and clones must be fused alike, or not at all: gates stand in front of ops instead of on them, and an original
that has lost its backward reader is given an idle one, and nothing is put between two ops that may be merged.

A sum of many addends becomes a chain of additions in the order in which TensorFlow's kernel adds them (the
remainder of a division by eight first, then groups of eight), so that it gives the same bits and holds a few addends only.

Cost: one op creation for each clone, about 0.1 ms. No knowledge of budgets or of how the schedule was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools import _tf, edit, optypes
from memsaving_gradients.gates import ControlGate, DataGate, Gate, gated, widest_input
from memsaving_gradients.roles import CapturedStep
from memsaving_gradients.schedule import Schedule, Step

__all__ = ["Rewrite", "rewrite"]

#: An op that is ready too early is held back if it makes at least this share of the peak …
EARLY_SHARE = 1 / 512
#: … and if other ops write this share of the peak before its turn.
SLACK_SHARE = 1 / 8
#: Ops of the backward pass that make or read a buffer of at least this share of the peak run one after the other.
HUGE_SHARE = 1 / 48
#: Of those that cannot be made to wait, so many of the latest are waited for together.
MOST_TRIGGERS = 8

_UNORDERED = optypes.MERGES_AT_RUN_TIME | optypes.VIEWS


@dataclass(eq=False)
class Rewrite:
    """What was changed.

    Attributes
    ----------
    rewiring
        The edges that were re-pointed.
    clones
        The clones, by the position of their original.
    replaced
        Tensors that others now stand for, by reference: the results of sums that became chains.
    readers_of
        For each reference variable (op), the clones that read it. A read of a reference variable is the variable
        itself: whoever updates it must wait for them.
    """

    rewiring: edit.Rewiring = field(default_factory=edit.Rewiring)
    clones: dict[int, tf.Operation] = field(default_factory=dict)
    replaced: dict[object, tf.Tensor] = field(default_factory=dict)
    readers_of: dict[tf.Operation, list[tf.Operation]] = field(default_factory=dict)


def rewrite(
    step: CapturedStep,
    schedule: Schedule,
    *,
    peak: int,
    data_gates: bool,
    idle: Collection[int] = (),
) -> Rewrite:
    """Rewire the graph behind ``step`` so that it follows ``schedule``.

    Parameters
    ----------
    step
        The captured training step; its backward ops are edited in place.
    schedule
        What to run when. Forward ops run as they are; each op has at most one clone.
    peak
        The simulated peak of the schedule: what is small beside it need not be on time.
    data_gates
        Gate by data edges (XLA) instead of control edges.
    idle
        Creation indices of ops that will be pruned when the graph runs.
    """
    writer = _Writer(step, peak, data_gates, idle)
    with _tf.outside_scopes(step.source.ops[0].graph), _tf.unrecorded():
        for entry in schedule.steps:
            if entry.copy:
                writer.add_clone(entry)
            elif entry.op in schedule.chained:
                writer.chain(entry.op)
            elif entry.op >= step.graph.first_backward:
                writer.pass_backward(entry)
            writer.hold_if_early(entry)
            if entry.op not in schedule.chained:
                writer.line_up(entry)
    writer.finish()
    return writer.result


class _Writer:
    """The state of one pass over a schedule.

    ``window``: backward ops since the last run of clones. ``open_gate``: the gate of the current run, made when its
    first root needs it and given up when the next backward op comes; ``run``: the originals of its clones.
    ``written``: bytes that the schedule has written so far; ``turn``: for each execution, what ``written`` is when it
    really runs; ``on_time``: ops that run when they are due, as things to wait for. ``last_huge``: the end of the
    line of those that touch huge buffers. ``unmerged``: ops that the runtime merges with nobody, and their clones, for they
    have several readers. ``two_readers``: originals that were given an idle one.
    """

    _originals = repeat(0)

    def __init__(
        self, step: CapturedStep, peak: int, data_gates: bool, idle: Collection[int]
    ) -> None:
        self.step, self.graph, self.ops = step, step.graph, step.source
        self.data_gates, self.idle = data_gates, idle
        self.result = Rewrite()
        self.window: list[int] = []
        self.open_gate: Gate | None = None
        self.run: set[int] = set()
        self.last_gate: Any = None
        self.live = _depends_on_data(step)
        self.written = 0
        self.turn: dict[tuple[int, int], int] = {}
        self.on_time: deque[tuple[int, tf.Operation]] = deque()
        self.last_huge: list[tf.Operation] = []
        self.unmerged: list[tuple[tf.Operation, tf.Operation]] = []
        self.two_readers: set[object] = set()
        self.twin_of = _twins(step)
        self.readers = np.bincount(
            self.ops.producer[np.array([v for reads in self.ops.inputs for v in reads], np.int64)],
            minlength=self.graph.length,
        )
        self.slack, self.large = peak * SLACK_SHARE, peak * EARLY_SHARE
        self.huge = peak * HUGE_SHARE

    def add_clone(self, entry: Step) -> None:
        op = self.ops.ops[entry.op]
        inputs = [
            self._copy_of(value) if copy else op.inputs[k]
            for k, (value, copy) in enumerate(
                zip(self.ops.inputs[entry.op], entry.reads or (0,) * len(op.inputs), strict=True)
            )
        ]
        makers = (int(self.ops.producer[v]) for v in self.ops.inputs[entry.op])
        inside = any(c and m in self.run for m, c in zip(makers, entry.reads, strict=False))
        self.run.add(entry.op)
        if not inside:
            if self.open_gate is None:
                self.open_gate = self._new_gate(op)
            self.open_gate.hold(op.name, inputs, self._constant(entry.op))
        if self.open_gate is not None:
            # All of the run read the same tensor: patterns such as x * sigmoid(x) are found, and fused, by that.
            inputs = [self.open_gate.held.get(tensor.ref(), tensor) for tensor in inputs]
        copy = self.result.clones[entry.op] = edit.clone(op, inputs)
        if self.graph.fuses[entry.op] and not self._merges(entry.op):
            self.unmerged.append((op, copy))
        for value in self.ops.inputs[entry.op]:
            maker = self.ops.ops[int(self.ops.producer[self.ops.storage[value]])]
            if maker.type in optypes.REFERENCE_VARIABLES:
                self.result.readers_of.setdefault(maker, []).append(copy)

    def leave_two_readers(self, tensor: tf.Tensor) -> None:
        """Put an idle reader in the place of the backward op that will read a clone.

        The original had two readers and was not merged with the other; with one it would be, and its clone would not.
        """
        if isinstance(self.last_gate, ControlGate) and tensor.ref() not in self.two_readers:
            self.two_readers.add(tensor.ref())
            _tf.add_control_inputs(self.last_gate.opens, [gated(tensor, [], tensor.op.name).op])

    def finish(self) -> None:
        """Keep clones with a single reader from being merged with it where their originals were not."""
        for op, copy in self.unmerged:
            readers = [(reader, out) for out in copy.outputs for reader in out.consumers()]
            if len(readers) == 1:
                ((reader, out),) = readers
                k = next(k for k, tensor in enumerate(reader.inputs) if tensor is out)
                self.result.rewiring.point(reader, k, gated(out, [], op.name))

    def pass_backward(self, entry: Step) -> None:
        position, op = entry.op, self.ops.ops[entry.op]
        for k, copy in enumerate(entry.reads):
            if copy:
                value = self.ops.inputs[position][k]
                if self.graph.fuses[self.ops.producer[value]]:
                    self.leave_two_readers(op.inputs[k])
                self.result.rewiring.point(op, k, self._copy_of(value))
        if not self.data_gates:
            self.hold_factor(entry)
        self._close_run()
        if op.type not in optypes.MERGED_AT_RUN_TIME and self.live[position]:
            self.window.append(position)

    def chain(self, position: int) -> None:
        """Replace a sum by additions in the order of TensorFlow's `AddN` kernel."""
        op = self.ops.ops[position]
        readers = [
            (reader, k)
            for reader in op.outputs[0].consumers()
            for k, read in enumerate(reader.inputs)
            if read is op.outputs[0]
        ]
        addends = list(op.inputs)
        head = len(addends) % 8
        head += 8 if head < 2 else 0
        total = _add_up(addends[:head])
        for k in range(head, len(addends), 8):
            total = _add(total, _add_up(addends[k : k + 8]))
        for reader, k in readers:
            self.result.rewiring.point(reader, k, total)
        self.result.replaced[op.outputs[0].ref()] = total
        self._close_run()

    def line_up(self, entry: Step) -> None:
        """Order the backward ops that touch huge buffers as the schedule does."""
        graph, position = self.graph, entry.op
        if self.data_gates or (position < graph.first_backward and not entry.copy):
            return
        sizes = (
            int(graph.size[graph.storage[v]])
            for v in (*graph.reads[position], *graph.writes[position])
        )
        op = self.result.clones[position] if entry.copy else self.ops.ops[position]
        if max(sizes, default=0) < self.huge or op.type in _UNORDERED:
            return
        held = bool(self.last_huge) and not entry.copy
        held = held and self._hold_back(position, self.last_huge)
        if self._may_trigger(entry):
            # What could not be made to wait takes its place beside those that it should have waited for.
            self.last_huge = [op] if held else [*self.last_huge[-MOST_TRIGGERS:], op]

    def _may_trigger(self, entry: Step) -> bool:
        """Whether a control edge from an execution leaves the kernels that it may be fused into as they are."""
        kind = self.ops.ops[entry.op].type
        forward = entry.op < self.graph.first_backward
        return kind not in (optypes.FUSED if forward else optypes.MERGED_AT_RUN_TIME)

    def _close_run(self) -> None:
        self.open_gate = None
        self.run.clear()

    def _merges(self, position: int) -> bool:
        """Whether the runtime may merge an op with the only one that reads it.

        Backward ops that were not captured lead nowhere and are pruned; forward ones may serve anything.
        """
        if not self.graph.fuses[position] or self.readers[position] > 1:
            return False
        others = (c for out in self.ops.ops[position].outputs for c in out.consumers())
        return self.readers[position] + sum(map(self._is_elsewhere, others)) < 2

    def _is_elsewhere(self, op: tf.Operation) -> bool:
        index = _tf.creation_index(op)
        early = index < self.step.created and index not in self.idle
        return early and op.name not in self.ops.position

    def hold_factor(self, entry: Step) -> None:
        """Let the second input of an op wait for the first where folding combines it with a constant of the op's reader.

        That makes an op of its own, which would run, and hold its result, as soon as the second input is there.
        """
        position, op = entry.op, self.ops.ops[entry.op]
        if not self.step.takes[position] or self.ops.reads_constant(position):
            return
        if position in self.twin_of:
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
            or waits_for.type in optypes.MERGED_AT_RUN_TIME
            or self._merges(int(self.ops.producer[second]))
        ):
            return
        self.result.rewiring.point(op, 1, gated(op.inputs[1], [waits_for], op.name))

    def _constant(self, position: int) -> list[bool]:
        return [bool(self.ops.constant[v]) for v in self.ops.inputs[position]]

    def _copy_of(self, value: int) -> tf.Tensor:
        op = int(self.ops.producer[value])
        return self.result.clones[op].outputs[value - int(self.ops.first_value[op])]

    def _new_gate(self, root: tf.Operation) -> Gate:
        triggers = [self.ops.ops[i] for i in self._sinks()]
        self.window = []
        if self.data_gates:
            self.last_gate = DataGate.after(triggers, root.name, self.last_gate)
        else:
            self.last_gate = ControlGate.after(triggers, root.name, self.last_gate)
        return self.last_gate

    def _sinks(self) -> list[int]:
        """Backward ops of the window whose results no other op of it reads; at first, the ends of forward as well."""
        read = {int(self.ops.producer[v]) for i in self.window for v in self.ops.inputs[i]}
        ends = list(self.graph.ends) if self.last_gate is None else []
        return ends + [i for i in self.window if i not in read]

    def hold_if_early(self, entry: Step) -> None:
        """Let an original op wait for its turn if it is ready long before and would hold much memory until then.

        ``turn`` of an op is how many bytes the schedule has written when the op is due. An op is on time if one of its
        inputs was made, on time, not long before. What is not on time runs as soon as its inputs are there: its turn
        is theirs.
        """
        graph, position = self.graph, entry.op
        due = self.written
        made = sum(int(graph.size[v]) for v in graph.writes[position])
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
        if due - ready <= self.slack:
            self.turn[key] = due
            if not entry.copy and self.live[position] and self._may_trigger(entry):
                self.on_time.append((due, self.ops.ops[position]))
            return
        self.turn[key] = ready
        if entry.copy or position < graph.first_backward or self.data_gates:
            return
        if made < self.large or not self.on_time:
            return
        while len(self.on_time) > 1 and self.on_time[1][0] <= due - self.slack:
            self.on_time.popleft()
        if self._hold_back(position, [self.on_time[0][1]]):
            self.turn[key] = due

    def _wait_with_twin(self, position: int) -> bool:
        """Let an op wait for what the earlier op that it equals waits for."""
        op = self.ops.ops[position]
        for k, tensor in enumerate(self.ops.ops[self.twin_of[position]].inputs):
            if op.inputs[k] is not tensor:
                self.result.rewiring.point(op, k, tensor)
        return True

    def _hold_back(self, position: int, triggers: Sequence[tf.Operation]) -> bool:
        """Let an original wait for ``triggers``, unless that could change which kernels it is fused into."""
        op = self.ops.ops[position]
        if op.type in _UNORDERED:
            return False
        if position in self.twin_of:
            return self._wait_with_twin(position)
        if op.type == "AddN" and len(op.inputs) > 2:
            # Its kernel begins with the first input whose buffer it can take over.
            return False
        fixed = [
            constant or self._merges(int(self.ops.producer[value]))
            for constant, value in zip(
                self._constant(position), self.ops.inputs[position], strict=True
            )
        ]
        index = widest_input(op.inputs, fixed)
        if index is None:
            return False
        self.result.rewiring.point(op, index, gated(op.inputs[index], triggers, op.name))
        return True


def _depends_on_data(step: CapturedStep) -> list[bool]:
    """For each op, whether it waits for something computed in the step; waiting for another is waiting for nothing."""
    graph = step.graph
    storage, source, producer = (
        graph.storage.tolist(),
        graph.source.tolist(),
        graph.producer.tolist(),
    )
    live: list[bool] = []
    for op in range(graph.length):
        if op < graph.first_backward:
            live.append(any(not source[storage[v]] for v in graph.writes[op]))
        else:
            live.append(any(not source[storage[v]] and live[producer[v]] for v in graph.reads[op]))
    return live


def _twins(step: CapturedStep) -> dict[int, int]:
    """For each backward op that equals an earlier one, that one: grappler makes one op of them if they stay equal."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    found = {}
    for op in range(step.graph.first_backward, step.graph.length):
        twin = first.setdefault((step.source.ops[op].type, step.source.inputs[op]), op)
        if twin != op:
            found[op] = twin
    return found


def _add_up(addends: list[tf.Tensor]) -> tf.Tensor:
    total = addends[0]
    for addend in addends[1:]:
        total = _add(total, addend)
    return total


def _add(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    total = tf.raw_ops.AddV2(x=a, y=b, name="accumulate")
    # Grappler would merge the chain into one AddN again.
    _tf.protect(total.op)
    return total
