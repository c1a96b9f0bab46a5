"""Follow a schedule: make its clones, and let backward ops read them.

One pass over the schedule builds each clone at the clone's place. A clone is a copy of its
original, and reads the copies that the schedule names. Where it has to wait, it reads its inputs
through a gate. Backward ops are re-pointed to the copies that they read.

The pass decides which clones form a run (:mod:`memsaving_gradients.rewriting.clone_groups`). What
makes a run wait depends on the runtime, and is the task of a back end. There is one for
TensorFlow's executor (:mod:`memsaving_gradients.rewriting.backends.executor`), and one for XLA
(:mod:`memsaving_gradients.rewriting.backends.xla`).

A stored value is encoded right after it is made. A load of it stands in for a clone
(:mod:`memsaving_gradients.rewriting.stored_values`).

A sum of many addends becomes a chain of additions in the order of TensorFlow's kernel. So it gives
the same bits, and holds only a few addends (:mod:`memsaving_gradients.capture.sums`).

The cost is one op creation for each clone, about 0.1 ms. This module knows nothing of budgets, or
of how the schedule was found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring, clone
from graph_tools.ops import op_types
from graph_tools.ops.device_copies import stays_elsewhere
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.rest_of_step import Update
from memsaving_gradients.capture.sums import Sums
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.backends.back_end import BackEnd, PassState
from memsaving_gradients.rewriting.backends.executor import ForExecutor
from memsaving_gradients.rewriting.backends.xla import ForXla
from memsaving_gradients.rewriting.clone_groups import CloneRun
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.rewriting.fusion import Merging
from memsaving_gradients.rewriting.stored_values import Loads
from memsaving_gradients.schedules.schedule import Schedule, Step
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.storage import OFFLOAD

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
    clones: dict[Key, tf.Operation] = field(default_factory=dict)
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
    result = Rewrite()
    merging = Merging(step, schedule.steps)
    state = PassState(
        step,
        schedule,
        simulation,
        updates=updates or {},
        merging=merging,
        sums=Sums(step.graph, step.source.ops, schedule.chained),
        run=CloneRun(step.graph, merging, simulation.peak),
        loads=Loads(step, schedule.stored, host),
        rewiring=result.rewiring,
        clones=result.clones,
    )
    back_end = ForXla(state) if xla else ForExecutor(state)
    graph = step.source.ops[0].graph
    known = len(graph.get_operations())
    with graphs.outside_scopes(graph), graphs.unrecorded():
        _Pass(state, back_end, result).follow(grads)
    result.built += graph.get_operations()[known:]
    return result


class _Pass:
    """One pass over a schedule, which adds to ``result``."""

    def __init__(self, state: PassState, back_end: BackEnd, result: Rewrite) -> None:
        self.back_end, self.result = back_end, result
        self.schedule, self.graph, self.ops = state.schedule, state.step.graph, state.step.source
        self.sums, self.run, self.loads = state.sums, state.run, state.loads

    def follow(self, grads: Sequence[tf.Tensor]) -> None:
        """Edit the graph; ``grads``: the gradients, whose readers do not exist yet."""
        for op in sorted(self.loads.stored):
            self.loads.parts(op)
        for entry in self.schedule.steps:
            self.back_end.before(entry)
            if entry.copy and entry.op in self.loads.stored:
                self._add_load(entry)
            elif entry.copy:
                self._add_clone(entry)
            elif entry.op in self.schedule.chained:
                self._chain(entry.op)
            elif entry.op >= self.graph.first_backward:
                self._pass_backward(entry)
            self.back_end.after(entry, self._op_of(entry))
        self._finish(grads)

    def _add_clone(self, entry: Step) -> None:
        op, key = self.ops.ops[entry.op], (entry.op, entry.copy)
        values = self.ops.inputs[entry.op]
        copies = entry.reads or (0,) * len(values)
        inputs: Sequence[tf.Tensor] = [
            self._copy_of(value, copy) if copy else op.inputs[k]
            for k, (value, copy) in enumerate(zip(values, copies, strict=True))
        ]
        reads = [
            (int(self.ops.producer[v]), copy)
            for v, copy in zip(values, copies, strict=True)
            if copy
        ]
        gate = self.run.tied_to(reads)
        if gate is None:
            gate = self._gate_for(entry, reads)
        inputs = self.back_end.hold_clone(entry, inputs, reads, gate)
        copy = self.result.clones[key] = clone(op, inputs)
        self.result.rewiring.forbid_feeding(op.outputs)
        self.run.add(key, reads, gate)
        for value in values:
            maker = self.ops.ops[int(self.ops.producer[self.ops.storage[value]])]
            if maker.type in op_types.REFERENCE_VARIABLES:
                self.result.readers_of.setdefault(maker, []).append(copy)

    def _add_load(self, entry: Step) -> None:
        key = entry.op, entry.copy
        gate = self._gate_for(entry, ())
        parts = self.back_end.hold_load(entry, self.loads.parts(entry.op), gate)
        if self.loads.stored[entry.op].means == OFFLOAD:
            # A transfer begins when its source is there: so the source has to wait, elsewhere, and
            # not the copy that arrives.
            parts = [stays_elsewhere(part) for part in parts]
        self.result.clones[key] = self.loads.load(key, parts).op
        self.run.add(key, (), gate)

    def _gate_for(self, entry: Step, reads: Collection[Key]) -> int:
        """Return the gate for a clone or a load: the run's gate, or a new one."""
        key, gate = (entry.op, entry.copy), self.run.gate
        if gate is None or not self.run.open:
            gate = self.back_end.gate_behind_backward(key)
            self.run.begin(gate)
        elif self.run.must_part(key, reads, in_order=self.back_end.in_order):
            gate = self.back_end.gate_behind_clones(key)
            # A load gets a gate of its own, but the run goes on: else clones would not be merged as
            # their originals are.
            if entry.op not in self.loads.stored:
                self.run.begin(gate)
        return gate

    def _pass_backward(self, entry: Step) -> None:
        for k, copy in enumerate(entry.reads):
            if copy:
                tensor = self._copy_of(self.ops.inputs[entry.op][k], copy)
                self.result.rewiring.point(self.ops.ops[entry.op], k, tensor)
        self.run.close()

    def _chain(self, position: int) -> None:
        """Replace a sum by a chain of additions."""
        op = self.ops.ops[position]
        total = self.sums.total(position)
        self.result.rewiring.point_readers(op.outputs[0], total)
        self.result.replaced[op.outputs[0].ref()] = total
        self.result.rewiring.forbid_feeding(op.outputs)
        self.run.close()

    def _op_of(self, entry: Step) -> tf.Operation:
        """Return the op that runs ``entry``: a clone, an original, or the end of a chain."""
        if entry.copy:
            return self.result.clones[entry.op, entry.copy]
        op = self.ops.ops[entry.op]
        replaced = self.result.replaced.get(op.outputs[0].ref()) if op.outputs else None
        return op if replaced is None else replaced.op

    def _copy_of(self, value: int, copy: int) -> tf.Tensor:
        op = int(self.ops.producer[value])
        if (loaded := self.loads.loaded.get((op, copy))) is not None:
            return loaded
        return self.result.clones[op, copy].outputs[value - int(self.ops.first_value[op])]

    def _finish(self, grads: Sequence[tf.Tensor]) -> None:
        """Let the back end finish, and note what it replaced."""
        replaced = self.result.replaced
        stands = self.back_end.finish([replaced.get(t.ref(), t) for t in grads])
        for key, tensor in replaced.items():
            replaced[key] = stands.get(tensor.ref(), tensor)
        for t in grads:
            if t.ref() in stands and t.ref() not in replaced:
                replaced[t.ref()] = stands[t.ref()]
