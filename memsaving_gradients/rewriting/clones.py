"""Making TensorFlow follow a schedule: clones, re-pointed inputs, gates.

The executor runs an op as soon as its inputs are there, so a clone alone would run during the
forward pass and save nothing. Clones come in runs: those that the schedule puts between two
backward ops. A run waits, through one gate, for every backward op before it in the schedule that
nothing else waits for, but for those that may finish beside it
(:mod:`memsaving_gradients.rewriting.stragglers`); only the *roots* of the run (clones that read no
other clone of it) need the gate, and each gate waits for the one before it.

What the schedule stores is encoded right after it is made, and the roots that stand for it decode
(:mod:`memsaving_gradients.rewriting.stored_values`).

An op may have several clones. What they read tells them apart: two clones in one run would be
merged, so the second one begins a run of its own, which waits for the clones before it; a clone
that reads clones of an earlier run, or what was kept, is a root of its run and reads through its
gate (:mod:`memsaving_gradients.rewriting.clone_groups`).

How a root is gated is the business of :mod:`memsaving_gradients.rewriting.gates`; originals that
could run too early are that of :mod:`memsaving_gradients.rewriting.ordering`. Forward ops are left
as they are, but wait now and then for what has to be stored.

Originals and clones must be merged with others alike, or not at all, or last bits differ
(:mod:`memsaving_gradients.rewriting.fusion`): gates stand in front of ops instead of on them, an
original that has lost its backward reader is given an idle one, and a clone that would be merged,
while its original is not, is kept apart from its reader. An op and the only one that reads it are
merged in every copy, if each copy of the one is read by one copy of the other: schedules see to
that.

A sum of many addends becomes a chain of additions in the order in which TensorFlow's kernel adds
them (the remainder of a division by eight first, then groups of eight), so that it gives the same
bits and holds a few addends only.

XLA needs none of that but the runs. Each of them, with the backward ops up to the next one, becomes
a conditional (:mod:`memsaving_gradients.rewriting.regions`).

Cost: one op creation for each clone, about 0.1 ms. No knowledge of budgets or of how the schedule
was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring, clone
from graph_tools.ops import op_types
from graph_tools.ops.device_copies import stays_elsewhere
from graph_tools.ops.views import unchanged_input
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.capture.sums import Sums
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.clone_groups import Runs
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.rewriting.gates import Gate, begun_when_complete, fixed_inputs, gated
from memsaving_gradients.rewriting.ordering import HUGE_SHARE, Holds
from memsaving_gradients.rewriting.regions import Regions
from memsaving_gradients.rewriting.stored_values import Loads
from memsaving_gradients.rewriting.stragglers import Stragglers
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.storage import OFFLOAD
from memsaving_gradients.schedules.transfers import waits

__all__ = ["Rewrite", "rewrite"]


@dataclass(eq=False)
class Rewrite:
    """What was changed.

    Attributes
    ----------
    rewiring
        The edges that were re-pointed.
    built
        The ops that were made.
    clones
        The clones, by the position of their original and their number.
    replaced
        Tensors that others now stand for, by reference: the results of sums that became chains.
    readers_of
        For each reference variable (op), the clones that read it. A read of a reference variable is
        the variable itself: whoever updates it must wait for them.
    """

    rewiring: Rewiring = field(default_factory=Rewiring)
    built: list[tf.Operation] = field(default_factory=list)
    clones: dict[tuple[int, int], tf.Operation] = field(default_factory=dict)
    replaced: dict[object, tf.Tensor] = field(default_factory=dict)
    readers_of: dict[tf.Operation, list[tf.Operation]] = field(default_factory=dict)


def rewrite(
    step: CapturedStep,
    schedule: Schedule,
    simulation: Simulation,
    *,
    data_gates: bool,
    updates: Mapping[str, Update] | None = None,
    host: str = "",
    grads: Sequence[tf.Tensor] = (),
) -> Rewrite:
    """Rewire the graph behind ``step`` so that it follows ``schedule``.

    Parameters
    ----------
    step
        The captured training step; its backward ops are edited in place.
    schedule
        What to run when. Forward ops run first, as they are.
    simulation
        Bytes alive over the schedule: what is small beside the peak need not be on time.
    data_gates
        Gate by data edges (XLA) instead of control edges.
    updates
        By name of a gradient's op, what is done with the gradient, where that is built already.
    host
        The device that values are offloaded to.
    grads
        The gradients, which are read by ops that are not there yet.
    """
    writer = _Writer(step, schedule, simulation, data_gates, updates or {}, host)
    graph = step.source.ops[0].graph
    known = len(graph.get_operations())
    with graphs.outside_scopes(graph), graphs.unrecorded():
        writer.store()
        for entry in schedule.steps:
            begun = graph.version
            if entry.copy and entry.op in schedule.stored:
                writer.add_load(entry)
            elif entry.copy:
                writer.add_clone(entry)
            elif entry.op in schedule.chained:
                writer.chain(entry.op)
            elif entry.op >= step.graph.first_backward:
                writer.pass_backward(entry)
            if writer.holds is not None:
                writer.holds.place(entry, writer.op_of(entry))
            writer.add_to_window(entry)
            if writer.regions is not None:
                writer.note(entry, begun)
        if writer.regions is None:
            writer.finish()
        else:
            writer.enclose(grads)
    writer.result.built += graph.get_operations()[known:]
    return writer.result


class _Writer:
    """The state of one pass over a schedule.

    ``window``: backward ops since the last run of clones; ``runs``: the clones, and what waits for
    what among them. ``gate``: that of the current run; ``gates``: that of each clone. ``unmerged``:
    ops that the runtime merges with nobody, for they have several readers, and what stands for
    them. ``two_readers``: originals that were given an idle one. ``updates``: by the position of
    a gradient's op, what is done with the gradient.
    """

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        simulation: Simulation,
        data_gates: bool,
        updates: Mapping[str, Update],
        host: str,
    ) -> None:
        self.step, self.graph, self.ops = step, step.graph, step.source
        self.schedule, self.simulation = schedule, simulation
        position = self.ops.position
        self.updates = {position[name]: u for name, u in updates.items() if name in position}
        self.result = Rewrite()
        self.merging = Merging(step, schedule.steps)
        self.sums = Sums(step.graph, step.source.ops, schedule.chained)
        # XLA orders by data alone.
        self.holds: Holds | None = None
        self.stragglers: Stragglers | None = None
        self.regions: Regions | None = None
        if data_gates:
            self.regions = Regions(step.source, self.result.rewiring)
        else:
            self.holds = Holds(
                step, simulation, self.result.rewiring, self.merging, self.sums, self.updates
            )
            self.stragglers = Stragglers(step.graph, schedule, simulation, self.updates)
        self.window: list[int] = []
        self.runs = Runs(step.graph, self.merging, simulation.peak)
        self.gate: Any = None
        self.gates: dict[tuple[int, int], Gate] = {}
        self.noted: list[tuple[int, int, list[tf.Operation], int, bool]] = []
        self.parts = False
        self.loads = Loads(step, schedule.stored, host)
        self.unmerged: list[tuple[tf.Operation, tf.Operation]] = []
        self.two_readers: set[object] = set()

    def add_clone(self, entry: Step) -> None:
        op, key = self.ops.ops[entry.op], (entry.op, entry.copy)
        values = self.ops.inputs[entry.op]
        copies = entry.reads or (0,) * len(values)
        inputs = [
            self._copy_of(value, copy) if copy else op.inputs[k]
            for k, (value, copy) in enumerate(zip(values, copies, strict=True))
        ]
        reads = [
            (int(self.ops.producer[v]), copy)
            for v, copy in zip(values, copies, strict=True)
            if copy
        ]
        # Nothing may come between an op and the one that it is merged with.
        tied = [self.gates[maker] for maker in reads if self.merging.merges(maker[0])]
        if tied:
            # Of two that it may be merged with, both have to be there.
            gate = self.gate if self.gate in tied else tied[0]
        else:
            if not self.runs.open:
                self._open_gate(key)
            elif self.runs.must_part(key, reads, in_order=self.regions is None):
                self._part_run(op)
            gate = self.gate
            fixed = fixed_inputs(op, self.ops.constants(entry.op))
            inside = self.runs.inside(reads)
            if inside and self.regions is None and op.type in op_types.MERGES_AT_RUN_TIME:
                # Through the gate, or it might be merged with an original that reads the same.
                fixed = [held or bool(copy) for held, copy in zip(fixed, copies, strict=True)]
                inside = all(fixed)
            if not inside:
                gate.hold(
                    op.name,
                    [self._unfolded(tensor) for tensor in inputs],
                    fixed,
                    op.device,
                    copied=self.ops.reads_from_elsewhere(entry.op),
                    matched=op.type in op_types.FUSED_WITH_SIBLING,
                )
        # All of the run read the same tensor: patterns such as x * sigmoid(x) are found, and fused,
        # by that.
        inputs = [self._behind(gate, tensor) for tensor in inputs]
        if self.regions is None and op.type in op_types.FUNCTIONAL:
            constants = self.ops.constants(entry.op)
            inputs = [*begun_when_complete(op, inputs, constants, [c > 0 for c in copies])]
        copy = self.result.clones[key] = clone(op, inputs)
        self.result.rewiring.forbid_feeding(op.outputs)
        self.gates[key] = gate
        self.runs.add(key, reads, here=gate is self.gate)
        if self.graph.fuses[entry.op] and not self.merging.merges(entry.op):
            self.unmerged.append((op, copy))
        for value in values:
            maker = self.ops.ops[int(self.ops.producer[self.ops.storage[value]])]
            if maker.type in op_types.REFERENCE_VARIABLES:
                self.result.readers_of.setdefault(maker, []).append(copy)

    def _unfolded(self, tensor: tf.Tensor) -> tf.Tensor:
        """What ``tensor`` becomes when grappler has taken out multiplications by one and the
        like."""
        while (source := unchanged_input(tensor.op)) is not None:
            tensor = tensor.op.inputs[source]
        return tensor

    def _behind(self, gate: Gate, tensor: tf.Tensor) -> tf.Tensor:
        """What stands for ``tensor`` behind ``gate``; ``x * 1`` is recomputed there if x is held,
        for grappler makes one of both."""
        again: list[tuple[tf.Tensor, int]] = []
        source = tensor
        while source.ref() not in gate.held:
            if (k := unchanged_input(source.op)) is None:
                return tensor
            again.append((source, k))
            source = source.op.inputs[k]
        held = gate.held[source.ref()]
        for made, k in reversed(again):
            inputs = [held if i == k else other for i, other in enumerate(made.op.inputs)]
            held = gate.held[made.ref()] = clone(made.op, inputs).outputs[0]
            self.result.rewiring.forbid_feeding([made])
        return held

    def store(self) -> None:
        """Store what the schedule stores; the forward pass must not run ahead of that, or all of it
        would be there at once."""
        for op in sorted(self.loads.stored):
            self.loads.parts(op)
        if self.holds is not None:
            for op, makers in waits(self.graph, self.schedule).items():
                stored = [maker for maker in makers if self.merging.has_run(maker, op)]
                if stored:
                    self.holds.hold_back(op, [self.loads.parts(maker)[0].op for maker in stored])

    def add_load(self, entry: Step) -> None:
        op, key = self.ops.ops[entry.op], (entry.op, entry.copy)
        if not self.runs.open:
            self._open_gate(key)
        gate = self.gate
        if self.runs.must_part(key, (), in_order=self.regions is None):
            # A gate of its own: the run goes on, or clones would not be merged as their originals
            # are.
            gate = self._behind_run(op)
        parts = self.loads.parts(entry.op)
        for part in parts:
            gate.hold(op.name, [part], [False])
        held = [gate.held.get(part.ref(), part) for part in parts]
        if self.loads.stored[entry.op].means == OFFLOAD:
            # A transfer begins when its source is there: that has to wait, elsewhere, and not the
            # arrival.
            held = [stays_elsewhere(part) for part in held]
        self.result.clones[key] = self.loads.load(key, held).op
        self.gates[key] = gate
        self.runs.add(key, (), here=gate is self.gate)

    def leave_two_readers(self, tensor: tf.Tensor) -> None:
        """Put an idle reader in the place of the backward op that will read a clone.

        The original had two readers and was not merged with the other; with one it would be, and
        its clone would not.
        """
        if self.gate and self.gate.opens and tensor.ref() not in self.two_readers:
            self.two_readers.add(tensor.ref())
            graphs.add_control_inputs(self.gate.opens, [gated(tensor, [], tensor.op.name).op])

    def finish(self) -> None:
        """Keep ops with a single reader from being merged with it where those that they stand for
        were not."""
        for op, copy in self.unmerged:
            readers = [(reader, out) for out in copy.outputs for reader in out.consumers()]
            # The readers of an op as built may lead nowhere, and be pruned.
            if len(readers) == 1 or copy is op:
                for reader, out in readers:
                    k = next(k for k, tensor in enumerate(reader.inputs) if tensor is out)
                    self.result.rewiring.point(reader, k, gated(out, [], op.name))

    def pass_backward(self, entry: Step) -> None:
        position, op = entry.op, self.ops.ops[entry.op]
        for k, copy in enumerate(entry.reads):
            if copy:
                value = self.ops.inputs[position][k]
                if self.graph.fuses[self.ops.producer[value]]:
                    self.leave_two_readers(op.inputs[k])
                self.result.rewiring.point(op, k, self._copy_of(value, copy))
        for parted in self.merging.pass_backward(entry):
            if self.graph.fuses[parted] and len(self.ops.readers[parted]) < 2:
                self.unmerged.append((self.ops.ops[parted], self.ops.ops[parted]))
        self.runs.close()

    def chain(self, position: int) -> None:
        """Replace a sum by a chain of additions."""
        op = self.ops.ops[position]
        readers = [
            (reader, k)
            for reader in op.outputs[0].consumers()
            for k, read in enumerate(reader.inputs)
            if read is op.outputs[0]
        ]
        total = self.sums.total(position)
        for reader, k in readers:
            self.result.rewiring.point(reader, k, total)
        self.result.replaced[op.outputs[0].ref()] = total
        self.result.rewiring.forbid_feeding(op.outputs)
        self.runs.close()

    def add_to_window(self, entry: Step) -> None:
        """Let the next gate wait for a backward op, if it may; call when the op has its place,
        which decides that."""
        position = entry.op
        if (
            not entry.copy
            and position >= self.graph.first_backward
            and self.graph.live[position]
            and self.ops.here[position]
            and self.merging.may_be_waited_for(position)
        ):
            self.window.append(position)

    def op_of(self, entry: Step) -> tf.Operation:
        """The op that runs ``entry``: a clone, an original, the end of a chain."""
        if entry.copy:
            return self.result.clones[entry.op, entry.copy]
        return self._original(entry.op)

    def _original(self, position: int) -> tf.Operation:
        """The op at ``position``, or the end of the chain that stands for it."""
        op = self.ops.ops[position]
        replaced = self.result.replaced.get(op.outputs[0].ref()) if op.outputs else None
        return op if replaced is None else replaced.op

    def _copy_of(self, value: int, copy: int) -> tf.Tensor:
        op = int(self.ops.producer[value])
        if (loaded := self.loads.loaded.get((op, copy))) is not None:
            return loaded
        return self.result.clones[op, copy].outputs[value - int(self.ops.first_value[op])]

    def _open_gate(self, first: tuple[int, int]) -> None:
        """Begin a run, of which this is the first clone, behind the backward ops of the window."""
        if self.regions is not None:
            self.gate = self._next_region()
            self.runs.begin()
            return
        root, sinks = self.ops.ops[first[0]], self._sinks()
        if self.stragglers is not None:
            sinks = self.stragglers.waited_for(sinks, first)
        self.window = []
        if not sinks:
            self._part_run(root)
            return
        waits_for = [op for i in sinks for op in self._ends_of(i)]
        self.gate = Gate.after(waits_for, root, self.gate)
        self.runs.begin()

    def _ends_of(self, position: int) -> Sequence[tf.Operation]:
        """Return the ops after which the memory of a backward op is free: those that use a large
        gradient, or the op itself."""
        update = self.updates.get(position)
        if update is not None and update.takes >= self.simulation.peak * HUGE_SHARE:
            return update.ends
        return [self.merging.trigger(self._original(position))]

    def _part_run(self, root: tf.Operation) -> None:
        """Begin a run behind the clones of the current one."""
        self.gate = self._behind_run(root)
        self.runs.begin()

    def _behind_run(self, root: tf.Operation) -> Gate:
        """A gate behind the clones of the current run."""
        if self.regions is not None:
            return self._next_region()
        sinks = self.runs.sinks()
        clones = [self.result.clones[key] for key in sinks]
        # A control edge would keep a clone from being fused as its original is; the reader of a
        # result does not.
        triggers = [
            gated(copy.outputs[0], [], self.ops.ops[op].name).op
            if copy.type in op_types.FUSED
            else copy
            for (op, _), copy in zip(sinks, clones, strict=True)
        ]
        return Gate.after(triggers, root, self.gate)

    def _next_region(self) -> Gate:
        """Begin a region: its conditional is the gate."""
        self.window = []
        self.parts = True
        return Gate()

    def note(self, entry: Step, begun: int) -> None:
        """Note which ops stand for an entry: those that were built since the graph had ``begun``
        ops, and the original."""
        if entry.op < self.graph.first_backward and not entry.copy:
            return
        position, graph = entry.op, self.ops.ops[0].graph
        original = [] if entry.copy or position in self.sums.chained else [self.ops.ops[position]]
        middle = graph.version
        if not entry.copy:
            self.sums.add(position, self._original(position))
        self.noted.append((begun, middle, original, graph.version, self.parts))
        self.parts = False

    def enclose(self, grads: Sequence[tf.Tensor]) -> None:
        """Make conditionals of the backward pass."""
        assert self.regions is not None
        built = self.ops.ops[0].graph.get_operations()
        for begun, middle, original, ended, parts in self.noted:
            if parts:
                self.regions.part()
            self.regions.add([*built[begun:middle], *original, *built[middle:ended]])
        ends = [out for end in self.graph.ends for out in self.ops.ops[end].outputs]
        replaced = self.result.replaced
        wanted = [replaced.get(t.ref(), t) for t in grads]
        self.regions.enclose(
            next((t for t in ends if t.dtype.is_floating or t.dtype.is_complex), None),
            wanted,
            set(self.result.clones.values()),
        )
        stands = self.regions.replaced
        for key, tensor in replaced.items():
            replaced[key] = stands.get(tensor.ref(), tensor)
        for t in grads:
            if t.ref() in stands and t.ref() not in replaced:
                replaced[t.ref()] = stands[t.ref()]

    def _sinks(self) -> list[int]:
        """Backward ops of the window whose results no other op of it reads; at first, the ends of
        forward as well.

        No device waits for another one but for what it reads.
        """
        read = {int(self.ops.producer[v]) for i in self.window for v in self.ops.inputs[i]}
        forward = self.graph.ends if self.gate is None else ()
        ends = [i for i in forward if self.ops.here[i] and i not in self.ops.conditional]
        return ends + [i for i in self.window if i not in read]
