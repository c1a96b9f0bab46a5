"""Making TensorFlow follow a schedule: clones, re-pointed inputs, gates.

The executor runs an op as soon as its inputs are there, so a clone alone would run during the forward pass and save
nothing. Clones come in runs: those that the schedule puts between two backward ops. A run waits, through one gate, for
every backward op before it in the schedule that nothing else waits for; only the *roots* of the run (clones that read no
other clone of it) need the gate, and each gate waits for the one before it.

Originals can be early as well: a backward op that reads forward values alone is ready during the forward pass, the
input projections of an unrolled recurrence are ready at the first step. Where such an op would hold much memory long before
its turn, it waits for an op shortly before it in the schedule. And where single buffers are a large part of the peak, the
order of the few ops that make and read them decides it: in the backward pass those run strictly one after the other.

Under XLA a control edge means nothing. There the roots of a run read their inputs through an addition of a zero that
depends on a gradient computed just before the run (`graph_tools.edit.opaque_zero`).

A sum of many addends becomes a chain of additions in the order in which TensorFlow's kernel adds them (the
remainder of a division by eight first, then groups of eight), so that it gives the same bits and holds a few addends only.

Cost: one op creation for each clone, about 0.1 ms. No knowledge of budgets or of how the schedule was found.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat

import tensorflow as tf

from graph_tools import _tf, edit, optypes
from memsaving_gradients.roles import CapturedStep
from memsaving_gradients.schedule import Schedule, Step

__all__ = ["Rewrite", "rewrite"]

#: An op that is ready too early is held back if it makes at least this share of the peak …
EARLY_SHARE = 1 / 512
#: … and if other ops write this share of the peak before its turn.
SLACK_SHARE = 1 / 8
#: Ops of the backward pass that make or read a buffer of at least this share of the peak run one after the other.
HUGE_SHARE = 1 / 16

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


def rewrite(step: CapturedStep, schedule: Schedule, *, peak: int, data_gates: bool) -> Rewrite:
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
    """
    writer = _Writer(step, peak, data_gates)
    with _tf.outside_scopes(step.source.ops[0].graph), _tf.unrecorded():
        for entry in schedule.steps:
            writer.hold_if_early(entry)
            if entry.copy:
                writer.add_clone(entry)
            elif entry.op in schedule.chained:
                writer.chain(entry.op)
                continue
            elif entry.op >= step.graph.first_backward:
                writer.pass_backward(entry)
            writer.line_up(entry)
    return writer.result


class _Writer:
    """The state of one pass over a schedule.

    ``window``: backward ops since the last run of clones. ``open_gate``: the gate of the current run, made when its
    first root needs it and given up when the next backward op comes; ``run``: the originals of its clones.
    ``written``: bytes that the schedule has written so far; ``turn``: for each execution, what ``written`` is when it
    really runs; ``on_time``: ops that run when they are due, as things to wait for. ``last_huge``: the last op of the
    line of those that touch huge buffers.
    """

    _originals = repeat(0)

    def __init__(self, step: CapturedStep, peak: int, data_gates: bool) -> None:
        self.graph, self.ops = step.graph, step.source
        self.data_gates = data_gates
        self.result = Rewrite()
        self.window: list[int] = []
        self.open_gate: _Gate | None = None
        self.run: set[int] = set()
        self.last_gate: tf.Operation | None = None
        self.written = 0
        self.turn: dict[tuple[int, int], int] = {}
        self.on_time: deque[tuple[int, tf.Operation]] = deque()
        self.last_huge: tf.Operation | None = None
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
        controls: list[tf.Operation] = []
        if not inside:
            if self.open_gate is None:
                self.open_gate = self._new_gate(op)
            controls = self.open_gate.controls
            if self.data_gates:
                self.open_gate.hold_by_data(op, inputs)
        copy = self.result.clones[entry.op] = edit.clone(op, inputs, controls)
        for value in self.ops.inputs[entry.op]:
            maker = self.ops.ops[int(self.ops.producer[self.ops.storage[value]])]
            if maker.type in optypes.REFERENCE_VARIABLES:
                self.result.readers_of.setdefault(maker, []).append(copy)

    def pass_backward(self, entry: Step) -> None:
        position, op = entry.op, self.ops.ops[entry.op]
        for k, copy in enumerate(entry.reads):
            if copy:
                self.result.rewiring.point(op, k, self._copy_of(self.ops.inputs[position][k]))
        self._close_run()
        if op.type not in optypes.MERGED_AT_RUN_TIME:
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
        if self.last_huge is not None:
            _tf.add_control_inputs(op, [self.last_huge])
        self.last_huge = op

    def _close_run(self) -> None:
        self.open_gate = None
        self.run.clear()

    def _copy_of(self, value: int) -> tf.Tensor:
        op = int(self.ops.producer[value])
        return self.result.clones[op].outputs[value - int(self.ops.first_value[op])]

    def _new_gate(self, root: tf.Operation) -> _Gate:
        sinks = self._sinks()
        if self.data_gates:
            return _Gate.by_data([self.ops.ops[i] for i in sinks], root)
        controls = [self.ops.ops[i] for i in sinks]
        if self.last_gate is not None:
            controls.append(self.last_gate)
        with tf.control_dependencies(controls):
            self.last_gate = tf.no_op(name=root.name + "_gate")
        self.window = []
        return _Gate([self.last_gate])

    def _sinks(self) -> list[int]:
        """Backward ops of the window whose results no other op of it reads; before the first one, the ends of forward."""
        if not self.window:
            return [] if self.last_gate is not None else list(self.graph.ends)
        read = {int(self.ops.producer[v]) for i in self.window for v in self.ops.inputs[i]}
        return [i for i in self.window if i not in read]

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
            if self.ops.ops[position].type not in optypes.MERGED_AT_RUN_TIME and not entry.copy:
                self.on_time.append((due, self.ops.ops[position]))
            return
        self.turn[key] = ready
        if entry.copy or made < self.large or self.data_gates or not self.on_time:
            return
        if self.ops.ops[position].type in optypes.MERGES_AT_RUN_TIME:
            return
        while len(self.on_time) > 1 and self.on_time[1][0] <= due - self.slack:
            self.on_time.popleft()
        _tf.add_control_inputs(self.ops.ops[position], [self.on_time[0][1]])
        self.turn[key] = due


@dataclass(eq=False)
class _Gate:
    """What the roots of one run of clones wait for."""

    controls: list[tf.Operation]
    zero: tf.Tensor | None = None
    held: dict[object, tf.Tensor] = field(default_factory=dict)

    @classmethod
    def by_data(cls, triggers: list[tf.Operation], root: tf.Operation) -> _Gate:
        floats = [
            out
            for op in triggers
            for out in op.outputs
            if out.dtype.is_floating and out.shape.rank is not None
        ]
        with tf.name_scope(root.name + "_gate/"):
            # One trigger, the last: XLA keeps no closer order for more of them (measured on its CPU compiler).
            return cls([], edit.opaque_zero(floats[-1]) if floats else None)

    def hold_by_data(self, op: tf.Operation, inputs: list[tf.Tensor]) -> None:
        """Make one input of a root depend on the gate; shape-like inputs must stay constants and are left alone."""
        if self.zero is None:
            return
        fits = [k for k, t in enumerate(inputs) if edit.can_add_opaque(t)]
        floating = [k for k in fits if inputs[k].dtype.is_floating or inputs[k].dtype.is_complex]
        # Integers of a random op: its key and counter, never its shape; others: only what has a real buffer.
        integers = [k for k in fits if k not in floating and _tf.constant_value(inputs[k]) is None]
        if not (choice := floating or integers):
            return
        index = choice[0]
        key = inputs[index].ref()
        if key not in self.held:
            self.held[key] = edit.add_opaque(inputs[index], self.zero)
        inputs[index] = self.held[key]


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
