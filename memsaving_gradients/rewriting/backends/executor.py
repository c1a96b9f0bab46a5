"""Make TensorFlow's executor follow a schedule: gates hold runs of clones back, and some originals
wait, too.

The executor runs an op as soon as its inputs are there, so a clone alone would run during the
forward pass and save nothing. A run of clones is the clones that the schedule puts between two
backward ops. A run waits, through one gate, for every backward op before it in the schedule that no
other op waits for, except for stragglers
(:mod:`memsaving_gradients.rewriting.backends.stragglers`). Only the *roots* of the run (clones that
read no other clone of it) need the gate, and each gate waits for the one before it. A clone that
reads clones of an earlier run, or kept values, is a root of its run and reads them through its gate
(:mod:`memsaving_gradients.rewriting.gates`).

:mod:`memsaving_gradients.rewriting.ordering` holds back originals that could run too early. Forward
ops do not change, but some wait until values have been stored.

The runtime must merge originals and clones with other ops alike, or last bits differ
(:mod:`memsaving_gradients.rewriting.fusion`). So gates are in front of ops instead of on them. An
original that has lost its backward reader gets an idle one. A clone that would be merged, while its
original is not, is kept apart from its reader. An op and its only reader are merged in every copy
if each copy of the op is read by one copy of the reader, as schedules ensure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat

import tensorflow as tf

from graph_tools.editing.rewiring import clone
from graph_tools.ops import op_types
from graph_tools.ops.views import unchanged_input
from graph_tools.tf_private import graphs
from memsaving_gradients.rewriting.backends.back_end import BackEnd, PassState
from memsaving_gradients.rewriting.backends.stragglers import Stragglers
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.rewriting.gates import Gate, begun_when_complete, fixed_inputs, gated
from memsaving_gradients.rewriting.ordering import HUGE_SHARE, Holds
from memsaving_gradients.schedules.schedule import Step
from memsaving_gradients.schedules.transfers import waits

__all__ = ["ForExecutor"]


class ForExecutor(BackEnd):
    """The gates and the holds of one pass.

    Attributes
    ----------
    gates
        The gates by their numbers.
    window
        Backward ops since the last run of clones.
    run_by
        For each backward op that gates may wait for, the op that runs it (for a sum, the end of its
        chain).
    unmerged
        Ops that the runtime does not merge because they have several readers, each with its clone
        (or itself).
    two_readers
        Tensors that were given an idle reader.
    updates
        By the position of a gradient's op, the use of the gradient.
    waits
        For forward ops that wait until values are stored, the ops that made these values.
    """

    in_order = True

    def __init__(self, state: PassState) -> None:
        self.state, self.graph, self.ops = state, state.step.graph, state.step.source
        self.merging, self.run, self.rewiring = state.merging, state.run, state.rewiring
        position = self.ops.position
        self.updates = {position[n]: u for n, u in state.updates.items() if n in position}
        self.holds = Holds(
            state.step,
            state.simulation,
            self.rewiring,
            self.merging,
            state.sums,
            self.updates,
        )
        self.stragglers = Stragglers(self.graph, state.schedule, state.simulation, self.updates)
        self.waits = waits(self.graph, state.schedule)
        self.gates: list[Gate] = []
        self.window: list[int] = []
        self.run_by: dict[int, tf.Operation] = {}
        self.unmerged: list[tuple[tf.Operation, tf.Operation]] = []
        self.two_readers: set[object] = set()

    def before(self, entry: Step) -> None:
        if entry.copy or entry.op in self.state.schedule.chained:
            return
        if entry.op >= self.graph.first_backward:
            self._keep_merges(entry)
        elif entry.op in self.waits:
            self._wait_until_stored(entry.op)

    def gate_behind_backward(self, first: Key) -> int:
        sinks = self.stragglers.waited_for(self._sinks(), first)
        self.window.clear()
        if not sinks:
            return self.gate_behind_clones(first)
        return self._add_gate([op for i in sinks for op in self._ends_of(i)], first)

    def gate_behind_clones(self, first: Key) -> int:
        # A control edge from a clone would keep it from being fused as its original is; one from a
        # reader of its result does not.
        triggers = [
            gated(copy.outputs[0], [], self.ops.ops[key[0]].name).op
            if (copy := self.state.clones[key]).type in op_types.FUSED
            else copy
            for key in self.run.sinks()
        ]
        return self._add_gate(triggers, first)

    def hold_clone(
        self, entry: Step, inputs: Sequence[tf.Tensor], reads: Collection[Key], gate: int
    ) -> Sequence[tf.Tensor]:
        op = self.ops.ops[entry.op]
        # No gate may come between an op and the op that it is merged with.
        if self.run.tied_to(reads) is None:
            self._hold_root(entry, inputs, reads, self.gates[gate])
        if self.merging.meets_constant(entry.op):
            self._hold_factors(entry, inputs, self.gates[gate])
        # All clones of the run read the same held tensor: by that, grappler finds and fuses
        # patterns such as x * sigmoid(x).
        inputs = [self._behind(self.gates[gate], tensor) for tensor in inputs]
        if op.type not in op_types.FUNCTIONAL:
            return inputs
        made = [copy > 0 for copy in entry.reads or repeat(0, len(inputs))]
        return begun_when_complete(op, inputs, self.ops.constants(entry.op), made)

    def hold_load(self, entry: Step, parts: Sequence[tf.Tensor], gate: int) -> Sequence[tf.Tensor]:
        behind = self.gates[gate]
        for part in parts:
            behind.hold(self.ops.ops[entry.op].name, [part], [False])
        return [behind.held[part.ref()] for part in parts]

    def after(self, entry: Step, op: tf.Operation) -> None:
        position = entry.op
        is_clone = entry.copy and position not in self.state.schedule.stored
        if is_clone and self.graph.fuses[position] and not self.merging.merges(position):
            self.unmerged.append((self.ops.ops[position], op))
        self.holds.place(entry, op)
        # The place of an op in the order decides whether others may wait for it.
        if (
            not entry.copy
            and position >= self.graph.first_backward
            and self.graph.live[position]
            and self.ops.here[position]
            and self.merging.may_be_waited_for(position)
        ):
            self.window.append(position)
            self.run_by[position] = op

    def finish(self, wanted: Collection[tf.Tensor]) -> Mapping[object, tf.Tensor]:
        """Keep ops from being merged with their only reader if the ops that they replace were not
        merged."""
        for op, copy in self.unmerged:
            readers = [(reader, out) for out in copy.outputs for reader in out.consumers()]
            # TensorFlow lists them in any order, which must not decide the names of gates.
            readers.sort(key=lambda pair: graphs.creation_index(pair[0]))
            # The other readers of an original may lead nowhere, and be pruned.
            if len(readers) == 1 or copy is op:
                for reader, out in readers:
                    k = next(k for k, tensor in enumerate(reader.inputs) if tensor is out)
                    self.rewiring.point(reader, k, gated(out, [], op.name))
        return {}

    def _wait_until_stored(self, position: int) -> None:
        """Let a forward op wait until values have been stored. The forward pass must not run ahead
        of this, or all of these values would be alive at once."""
        stored = [m for m in self.waits[position] if self.merging.has_run(m, position)]
        if stored:
            triggers = [self.state.loads.parts(maker)[0].op for maker in stored]
            self.holds.hold_back(position, triggers)

    def _keep_merges(self, entry: Step) -> None:
        """Prepare for a backward op to read clones, and keep the merges of the ops that it no
        longer reads."""
        op, values = self.ops.ops[entry.op], self.ops.inputs[entry.op]
        for tensor, value, copy in zip(op.inputs, values, entry.reads, strict=False):
            if copy and self.graph.fuses[self.ops.producer[value]]:
                self._leave_two_readers(tensor)
        for parted in self.merging.pass_backward(entry):
            if self.graph.fuses[parted] and len(self.ops.readers[parted]) < 2:
                self.unmerged.append((self.ops.ops[parted], self.ops.ops[parted]))

    def _leave_two_readers(self, tensor: tf.Tensor) -> None:
        """Add an idle reader in place of the backward op that will read a clone.

        With two readers the original was not merged with either. With one reader it would be
        merged, and its clone would not.
        """
        if self.run.gate is not None and tensor.ref() not in self.two_readers:
            self.two_readers.add(tensor.ref())
            opens = self.gates[self.run.gate].opens
            graphs.add_control_inputs(opens, [gated(tensor, [], tensor.op.name).op])

    def _add_gate(self, triggers: Sequence[tf.Operation], first: Key) -> int:
        before = None if self.run.gate is None else self.gates[self.run.gate]
        self.gates.append(Gate.after(triggers, self.ops.ops[first[0]], before))
        return len(self.gates) - 1

    def _sinks(self) -> list[int]:
        """Return the backward ops of the window whose results no other op of it reads; before the
        first gate, also the ends of the forward pass.

        No device waits for another one except for the values that it reads.
        """
        read = {int(self.ops.producer[v]) for i in self.window for v in self.ops.inputs[i]}
        forward = self.graph.ends if self.run.gate is None else ()
        ends = [i for i in forward if self.ops.here[i] and i not in self.ops.conditional]
        return ends + [i for i in self.window if i not in read]

    def _ends_of(self, position: int) -> Sequence[tf.Operation]:
        """Return the ops after which the memory of a backward op is free: those that use a large
        gradient, or the op itself."""
        update = self.updates.get(position)
        if update is not None and update.takes >= self.state.simulation.peak * HUGE_SHARE:
            return update.ends
        return [self.merging.trigger(self.run_by.get(position, self.ops.ops[position]))]

    def _hold_root(
        self, entry: Step, inputs: Sequence[tf.Tensor], reads: Collection[Key], gate: Gate
    ) -> None:
        """Hold back an input of a clone, unless it waits because it reads a clone of the run."""
        op = self.ops.ops[entry.op]
        fixed = fixed_inputs(op, self.ops.constants(entry.op))
        inside = self.run.inside(reads)
        if inside and op.type in op_types.MERGES_AT_RUN_TIME:
            # Through the gate, or it might be merged with an original that reads the same.
            fixed = [held or bool(copy) for held, copy in zip(fixed, entry.reads, strict=True)]
            inside = all(fixed)
        if not inside:
            gate.hold(
                op.name,
                [_unfolded(tensor) for tensor in inputs],
                fixed,
                op.device,
                copied=self.ops.reads_from_elsewhere(entry.op),
                matched=op.type in op_types.FUSED_WITH_SIBLING,
            )

    def _hold_factors(self, entry: Step, inputs: Sequence[tf.Tensor], gate: Gate) -> None:
        """Hold back the factors of a clone that are no clones, since a constant may meet them.

        Names decide which factor it meets, so each held factor keeps its name.
        """
        device, copied = self.ops.ops[entry.op].device, self.ops.reads_from_elsewhere(entry.op)
        values = self.ops.inputs[entry.op]
        for tensor, value, copy in zip(inputs, values, entry.reads or repeat(0), strict=False):
            factor = _unfolded(tensor)
            merges = self.merging.merges(int(self.ops.producer[value]))
            if not (copy or merges or factor.op.type in op_types.SOURCES):
                gate.hold(factor.op.name, [factor], [False], device, copied=copied)

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
            self.rewiring.forbid_feeding([made])
        return held


def _unfolded(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that remains of ``tensor`` when grappler has removed multiplications by one
    and similar ops."""
    while (source := unchanged_input(tensor.op)) is not None:
        tensor = tensor.op.inputs[source]
    return tensor
