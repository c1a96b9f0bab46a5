"""Make TensorFlow follow a schedule: clones, re-pointed inputs, gates.

The executor runs an op as soon as its inputs are there, so a clone alone would run during the
forward pass and save nothing. A run of clones is the clones that the schedule puts between two
backward ops. A run waits, through one gate, for every backward op before it in the schedule that no
other op waits for, except for stragglers (:mod:`memsaving_gradients.rewriting.stragglers`). Only
the *roots* of the run (clones that read no other clone of it) need the gate, and each gate waits
for the one before it.

A stored value is encoded right after it is made. The roots that replace it decode it
(:mod:`memsaving_gradients.rewriting.stored_values`).

An op may have several clones, but two with the same inputs in one run would be merged. So the
second one begins a run of its own, which waits for the clones before it. A clone that reads clones
of an earlier run, or kept values, is a root of its run and reads them through its gate
(:mod:`memsaving_gradients.rewriting.clone_groups`).

:mod:`memsaving_gradients.rewriting.gates` gates the roots;
:mod:`memsaving_gradients.rewriting.ordering` holds back originals that could run too early. Forward
ops do not change, but some wait until values have been stored.

The runtime must merge originals and clones with other ops alike, or last bits differ
(:mod:`memsaving_gradients.rewriting.fusion`). So gates are in front of ops instead of on them. An
original that has lost its backward reader gets an idle one. A clone that would be merged, while its
original is not, is kept apart from its reader. An op and its only reader are merged in every copy
if each copy of the op is read by one copy of the reader, as schedules ensure.

A sum of many addends becomes a chain of additions in the order of TensorFlow's kernel (first the
remainder of a division by eight, then groups of eight). So the chain gives the same bits, and holds
only a few addends.

XLA needs only the runs. Each run, with the backward ops up to the next one, becomes a conditional
(:mod:`memsaving_gradients.rewriting.regions`).

The cost is one op creation for each clone, about 0.1 ms. This module knows nothing of budgets, or
of how the schedule was found.
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
    """The changes that a rewrite made.

    Attributes
    ----------
    rewiring
        The edges that were re-pointed.
    built
        The ops that were created.
    clones
        The clones, by the position of their original and their number.
    replaced
        By reference, the tensors that replace others: sums (now chains), gradients (in regions).
    readers_of
        For each reference variable (op), the clones that read it. A read of a reference variable is
        the variable itself: ops that update it must wait for them.
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
    xla: bool,
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
        The order of executions. Forward ops run first, as they are.
    simulation
        Bytes alive over the schedule: ops that are small relative to the peak may run late.
    xla
        Whether XLA compiles the graph: runs become conditionals, not gates.
    updates
        By name of a gradient's op, the use of the gradient, if it is built already.
    host
        The device that values are offloaded to.
    grads
        The gradients; the ops that read them do not exist yet.
    """
    writer = _Writer(step, schedule, simulation, xla, updates or {}, host)
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

    ``window``: backward ops since the last run of clones; ``runs``: the clones, and their order.
    ``gate``: the gate of the current run; ``gates``: the gate of each clone. ``unmerged``: ops that
    the runtime does not merge because they have several readers, each with its clone (or itself).
    ``two_readers``: tensors that were given an idle reader. ``updates``: by the position of a
    gradient's op, the use of the gradient.
    """

    def __init__(
        self,
        step: CapturedStep,
        schedule: Schedule,
        simulation: Simulation,
        xla: bool,
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
        if xla:
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
        # No gate may come between an op and the op that it is merged with.
        tied = [self.gates[maker] for maker in reads if self.merging.merges(maker[0])]
        if tied:
            # If it may be merged with either of two ops, both have to be there.
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
        # All clones of the run read the same held tensor: by that, grappler finds and fuses
        # patterns such as x * sigmoid(x).
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
        """Return the tensor that remains of ``tensor`` when grappler has removed multiplications by
        one and the like."""
        while (source := unchanged_input(tensor.op)) is not None:
            tensor = tensor.op.inputs[source]
        return tensor

    def _behind(self, gate: Gate, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor that replaces ``tensor`` behind ``gate``; if x is held there, ``x * 1``
        is recomputed from it, since grappler merges both."""
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
        """Store the values that the schedule stores. The forward pass must not run ahead of this,
        or all of these values would be alive at once."""
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
            # The load gets a gate of its own, but the run goes on: else clones would not be merged
            # as their originals are.
            gate = self._behind_run(op)
        parts = self.loads.parts(entry.op)
        for part in parts:
            gate.hold(op.name, [part], [False])
        held = [gate.held.get(part.ref(), part) for part in parts]
        if self.loads.stored[entry.op].means == OFFLOAD:
            # A transfer begins when its source is there: so the source has to wait, elsewhere, and
            # not the copy that arrives.
            held = [stays_elsewhere(part) for part in held]
        self.result.clones[key] = self.loads.load(key, held).op
        self.gates[key] = gate
        self.runs.add(key, (), here=gate is self.gate)

    def leave_two_readers(self, tensor: tf.Tensor) -> None:
        """Add an idle reader in place of the backward op that will read a clone.

        With two readers the original was not merged with either. With one reader it would be
        merged, and its clone would not.
        """
        if self.gate and self.gate.opens and tensor.ref() not in self.two_readers:
            self.two_readers.add(tensor.ref())
            graphs.add_control_inputs(self.gate.opens, [gated(tensor, [], tensor.op.name).op])

    def finish(self) -> None:
        """Keep ops from being merged with their only reader if the ops that they replace were not
        merged."""
        for op, copy in self.unmerged:
            readers = [(reader, out) for out in copy.outputs for reader in out.consumers()]
            # The other readers of an original may lead nowhere, and be pruned.
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
        since that decides it."""
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
        """Return the op that runs ``entry``: a clone, an original, or the end of a chain."""
        if entry.copy:
            return self.result.clones[entry.op, entry.copy]
        return self._original(entry.op)

    def _original(self, position: int) -> tf.Operation:
        """Return the op at ``position``, or the end of the chain that replaces it."""
        op = self.ops.ops[position]
        replaced = self.result.replaced.get(op.outputs[0].ref()) if op.outputs else None
        return op if replaced is None else replaced.op

    def _copy_of(self, value: int, copy: int) -> tf.Tensor:
        op = int(self.ops.producer[value])
        if (loaded := self.loads.loaded.get((op, copy))) is not None:
            return loaded
        return self.result.clones[op, copy].outputs[value - int(self.ops.first_value[op])]

    def _open_gate(self, first: tuple[int, int]) -> None:
        """Begin a run, whose first clone is ``first``, behind the backward ops of the window."""
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
        """Return a gate behind the clones of the current run."""
        if self.regions is not None:
            return self._next_region()
        sinks = self.runs.sinks()
        clones = [self.result.clones[key] for key in sinks]
        # A control edge from a clone would keep it from being fused as its original is; one from a
        # reader of its result does not.
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
        """Note the ops of an entry: its original, and the ops that were built since the graph had
        ``begun`` ops."""
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
        """Turn the backward pass into conditionals."""
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
        """Return the backward ops of the window whose results no other op of it reads; before the
        first gate, also the ends of the forward pass.

        No device waits for another one except for the values that it reads.
        """
        read = {int(self.ops.producer[v]) for i in self.window for v in self.ops.inputs[i]}
        forward = self.graph.ends if self.gate is None else ()
        ends = [i for i in forward if self.ops.here[i] and i not in self.ops.conditional]
        return ends + [i for i in self.window if i not in read]
