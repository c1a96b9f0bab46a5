"""A loop that keeps its state at some steps only, and a gradient that recomputes the steps between.

TensorFlow has already differentiated the loop. The loop appends every value that its gradient reads
to accumulators of T elements each. The gradient, also a loop, takes them from the end. A replay
changes both:

- *The loop* keeps its place, inputs, outputs and condition. One of its steps becomes a segment: it
  appends the state to lists, which take the place of accumulators. Then an inner loop runs the
  body's ops up to the end of the segment.
- *The gradient* becomes a loop over segments, from the last one on. It takes the state from the
  lists. An inner loop runs the part of the body that the gradient needs and fills accumulators
  (:meth:`graph_tools.ops.while_loops.Loop.part`). A copy of TensorFlow's gradient loop consumes
  them. With several levels, each segment is first divided in the same way.

The replay differentiates no op, so it works for all that TensorFlow can differentiate. Every sum
has the same terms in the same order, and TensorFlow handles custom gradients, nested loops and
lists. If an op must run only once, its value of each step is kept. A segment waits for the
gradients of the segment after it; otherwise all segments would be replayed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.ops import op_types
from graph_tools.ops.trip_counts import UNKNOWN_STEPS, behind_identities, note_steps, noted_steps
from graph_tools.ops.while_loops import Loop, Part
from graph_tools.tf_private import graphs, loops
from memsaving_gradients.transforms.loops.body_copies import Tensors, behind, transplant, wanted
from memsaving_gradients.transforms.loops.checkpoint_positions import Division, Replayed
from memsaving_gradients.transforms.loops.loop_gradient import Gradient
from memsaving_gradients.transforms.loops.segment_loops import backwards, loop_of
from memsaving_gradients.transforms.loops.tensor_lists import (
    empty_list,
    pushed,
    static_shape,
    untyped,
)

__all__ = ["Replay"]


@dataclass(eq=False)
class Replay:
    """The replay of a loop and of all its gradients.

    Attributes
    ----------
    loop
        The loop.
    gradients
        All of its gradients.
    how
        The name of the loop, and the division of its steps.
    inside
        Whether the loop is inside of a function, a branch or another loop, whose gradients are
        already functions.
    slots
        For each state (number of a loop variable), the accumulator whose place it takes.
    slots_of_once
        The same for tensors of the body whose ops must not run again.
    rewiring
        The edits made so far.
    """

    loop: Loop
    gradients: list[Gradient]
    how: Replayed
    inside: bool = False
    slots: dict[int, int] = field(default_factory=dict)
    slots_of_once: dict[object, int] = field(default_factory=dict)
    rewiring: Rewiring = field(default_factory=Rewiring)
    _built: list[tf.Operation] = field(default_factory=list)

    @property
    def division(self) -> Division:
        """The division of the loop's steps, which decides where its state is kept."""
        return self.how.division

    @cached_property
    def part(self) -> Part:
        """The part of the body that the gradients recompute."""
        numbers = sorted({n for gradient in self.gradients for n in gradient.taken.values()})
        return self.loop.part(self.loop.accumulated[n] for n in numbers)

    @property
    def _idle(self) -> frozenset[tf.Operation]:
        """The ops that fill accumulators which no gradient needs. In plain training, grappler
        removes them unless an op waits for the loop to have run."""
        if op_types.is_stateful(self.loop.op):
            return frozenset()
        read = frozenset[int]().union(*(gradient.read for gradient in self.gradients))
        outputs = self.loop.body.outputs
        return frozenset(
            behind_identities(outputs[n]).op for n in self.loop.accumulated if n not in read
        )

    @tf.autograph.experimental.do_not_convert
    def apply(self) -> None:
        """Make the loop keep its state, and its gradients replay it.

        Raises
        ------
        GraphError
            If the loop cannot be replayed; nothing is changed then.
        """
        if not self.loop.condition_is_pure:
            raise GraphError(f"the condition of {self.loop.op.name!r} has side effects")
        self._apply(self.gradients)

    @tf.autograph.experimental.do_not_convert
    def extend(self, gradient: Gradient) -> None:
        """Replay one more gradient, which was built while the edits were undone; TensorFlow may
        have changed the loop for it.

        Raises
        ------
        GraphError
            If it cannot be replayed.
        """
        self.loop = gradient.loop
        self.gradients.append(gradient)
        self.__dict__.pop("part", None)
        self.rewiring.attributes[:] = [
            edit for edit in self.rewiring.attributes if edit[0] is not self.loop.op
        ]
        self.rewiring.redo()
        self._apply([gradient])

    @property
    def _counts(self) -> list[int]:
        """The estimated numbers of segments at each level, and of steps of an innermost one."""
        return self.division.counts(UNKNOWN_STEPS)

    def _steps(self, level: int) -> int:
        """Estimate the number of steps of a segment of ``level`` (0: the whole loop)."""
        return math.prod(self._counts[level:])

    def abandon(self) -> None:
        """Undo all edits for good, and make the loops that were built for the replay idle."""
        self.rewiring.undo()
        self.rewiring.drop()
        for op in self._built:
            last = Rewiring()
            _idle(op, last)
            # The idle loop must not read accumulators: the loop does not fill accumulators without
            # readers, and grappler may then rewrite the ops that fill them.
            for number, tensor in enumerate(op.inputs):
                source = behind_identities(tensor)
                if source.op is self.loop.op:
                    last.point(op, number, source.op.inputs[source.value_index])

    def _apply(self, gradients: Sequence[Gradient]) -> None:
        loop = self.loop
        added = self._assign()
        built: list[tuple[Gradient, Mapping[int, tf.Tensor]]] = []
        with graphs.outside_scopes(loop.op.graph), graphs.unrecorded():
            lists = {n: self._list_for(t, n) for n, t in added}
            function = loops.traced_like(loop.op, loop.own, "replayed", self._forward)
        for gradient in gradients:
            with graphs.outside_scopes(gradient.op.graph), graphs.unrecorded():
                built.append((gradient, self._backward(gradient)))
        for number, (shape, most, dtype) in lists.items():
            # TensorFlow cannot re-point inputs that were added to a loop later. These lists belong
            # to the loop alone, so their own inputs are re-pointed.
            op = loop.op.inputs[number].op
            self.rewiring.point(op, 0, shape)
            self.rewiring.point(op, 1, most)
            self.rewiring.set(op, "element_dtype", dtype)
        self.rewiring.set(loop.op, "body", function)
        self.rewiring.set(loop.op, *noted_steps(self._counts[0]))
        for gradient, outputs in built:
            self._replace(gradient, outputs)

    def _assign(self) -> list[tuple[int, tf.Tensor]]:
        """Assign an accumulator to each state and tensor that must be kept and has none yet. Return
        the accumulators' numbers, each with the tensor that is kept there."""
        used = {*self.slots.values(), *self.slots_of_once.values()}
        free = [n for n in sorted(self.loop.accumulated) if n not in used]
        states = [state for state in self.part.states if state not in self.slots]
        once = [t for t in self.part.once if t.ref() not in self.slots_of_once]
        if len(free) < len(states) + len(once):
            raise GraphError(
                f"{self.loop.op.name!r} has {len(states) + len(once)} values to keep, but"
                f" only {len(free)} accumulators for them"
            )
        kept = []
        for state in states:
            self.slots[state] = free.pop(0)
            kept.append((self.slots[state], self.loop.body.inputs[state]))
        for tensor in once:
            self.slots_of_once[tensor.ref()] = free.pop(0)
            kept.append((self.slots_of_once[tensor.ref()], tensor))
        return kept

    def _list_for(
        self, tensor: tf.Tensor, number: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.compat.v1.AttrValue]:
        """Return the shape, the maximum length and the dtype with which the empty list of an
        accumulator (number) can hold ``tensor``."""
        kept_once = number in self.slots_of_once.values()
        most = self.division.steps if kept_once else self.division.most_states
        dtype = tf.compat.v1.AttrValue(type=tensor.dtype.as_datatype_enum)
        # Its own shape is unknown, so that TensorFlow lets it replace a shape of another rank.
        shape = tf.compat.v1.placeholder_with_default(static_shape(tensor), shape=None)
        return shape, tf.constant(-1 if most is None else most), dtype

    # The loop.

    def _forward(self, *args: tf.Tensor) -> list[tf.Tensor]:
        """Run one segment, as the body of the replayed loop."""
        loop, body = self.loop, self.loop.body
        counter, bound = args[0], args[1]
        stop = self.division.cut(bound).after(counter)
        stop = tf.where(bound >= 0, tf.minimum(stop, bound), stop)
        own = [i for i in range(2, loop.own) if i not in loop.invariants]
        gathers = [self.slots_of_once[t.ref()] for t in self.part.once]
        ops = wanted(body, [body.outputs[i] for i in range(loop.own)])
        condition = wanted(loop.condition, loop.condition.outputs)

        def arguments(graph: tf.Graph, now: tf.Tensor, variables: Sequence[tf.Tensor]) -> Tensors:
            stands = {arg.ref(): given for arg, given in zip(graph.inputs, args, strict=True)}
            stands[graph.inputs[0].ref()] = now
            stands |= {graph.inputs[i].ref(): t for i, t in zip(own, variables, strict=False)}
            return stands

        def goes_on(now: tf.Tensor, *variables: tf.Tensor) -> tf.Tensor:
            stands = arguments(loop.condition, now, variables)
            transplant(condition, stands, loop.condition)
            return tf.logical_and(now < stop, stands[loop.condition.outputs[0].ref()])

        def step(now: tf.Tensor, *variables: tf.Tensor) -> list[tf.Tensor]:
            stands = arguments(body, now, variables)
            transplant(ops, stands, body, self._idle, waits=True)
            gathered = [
                tf.raw_ops.TensorListPushBack(input_handle=so_far, tensor=stands[t.ref()])
                for so_far, t in zip(variables[len(own) :], self.part.once, strict=True)
            ]
            return [now + 1, *(stands[body.outputs[i].ref()] for i in own), *gathered]

        outputs = list(args)
        outputs[0], *variables = loop_of(
            goes_on,
            step,
            [counter, *(args[i] for i in (*own, *gathers))],
            steps=self._steps(1),
            parallel=loop.op.get_attr("parallel_iterations"),
        )
        for i, tensor in zip((*own, *gathers), variables, strict=True):
            outputs[i] = tensor
        for state, number in self.slots.items():
            outputs[number] = tf.raw_ops.TensorListPushBack(
                input_handle=args[number], tensor=args[state]
            )
        return outputs

    # Its gradients.

    def _backward(self, gradient: Gradient) -> dict[int, tf.Tensor]:
        """Build the replayed gradient, and return its outputs that change, by number."""
        source, loop = gradient.op, self.loop.op
        total = source.inputs[2]
        cut = self.division.cut(loop.inputs[1])
        held = untyped([loop.outputs[self.slots[state]] for state in self.part.states])

        def segment(
            stop: tf.Tensor, start: tf.Tensor, states: list[tf.Tensor], carried: list[tf.Tensor]
        ) -> list[tf.Tensor]:
            return self._reverse(gradient, 1, start, stop, states, carried)

        carried = backwards(
            segment,
            cut,
            tf.zeros([], total.dtype),
            total,
            held,
            [self.loop.body.inputs[state] for state in self.part.states],
            [source.inputs[i] for i in gradient.carried],
            [source.outputs[i].shape for i in gradient.carried],
            self._counts[0],
            f"{source.name}_replayed",
        )
        self._built.append(behind_identities(carried[0]).op)
        return dict(zip(gradient.carried, carried, strict=True))

    def _reverse(
        self,
        gradient: Gradient,
        level: int,
        start: tf.Tensor,
        stop: tf.Tensor,
        states: list[tf.Tensor],
        carried: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the gradients at ``start``, given ``carried``, the gradients at ``stop``."""
        if level == self.division.repeats:
            return self._reverse_leaf(gradient, start, stop, states, carried)
        cut = self.division.inner(start, stop, level)
        arguments = [self.loop.body.inputs[state] for state in self.part.states]
        lists = [empty_list(t, self.division.most_states, "kept") for t in arguments]

        def goes_on(now: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return cut.after(now) < stop

        def keep(now: tf.Tensor, *variables: tf.Tensor) -> list[tf.Tensor]:
            count = len(arguments)
            at, so_far = list(variables[:count]), variables[count:]
            end = cut.after(now)
            ends = self._run_again(now, end, at, (), (), steps=self._steps(level + 1))
            return [end, *ends, *pushed(so_far, at)]

        segments = self._counts[level]
        _, *variables = loop_of(goes_on, keep, [start, *states, *lists], steps=segments - 1)
        count = len(arguments)
        lists = pushed(variables[count:], variables[:count])

        def segment(
            end: tf.Tensor, begin: tf.Tensor, at: list[tf.Tensor], grads: list[tf.Tensor]
        ) -> list[tf.Tensor]:
            return self._reverse(gradient, level + 1, begin, end, at, grads)

        shapes = [gradient.op.outputs[i].shape for i in gradient.carried]
        return backwards(
            segment, cut, start, stop, lists, arguments, carried, shapes, segments, "reversed"
        )

    def _run_again(
        self,
        start: tf.Tensor,
        stop: tf.Tensor,
        states: Sequence[tf.Tensor],
        gathered: Sequence[tf.Tensor],
        lists: Sequence[tf.Tensor],
        steps: int,
        parallel: int = 10,
    ) -> list[tf.Tensor]:
        """Run the part from ``states`` at ``start`` on; return the states at ``stop``, and the
        ``lists``, to which each step appends its values of ``gathered``."""
        body = self.loop.body
        nexts = [body.outputs[state] for state in self.part.states]
        ops = self._again([*gathered, *nexts])

        def step(now: tf.Tensor, *variables: tf.Tensor) -> list[tf.Tensor]:
            stands = self._stands(now, variables[: len(nexts)])
            transplant(ops, stands, body, self._idle)
            filled = pushed(variables[len(nexts) :], [stands[t.ref()] for t in gathered])
            return [now + 1, *(stands[t.ref()] for t in nexts), *filled]

        _, *ends = loop_of(
            lambda now, *_: now < stop,
            step,
            [start, *states, *lists],
            steps=steps,
            parallel=parallel,
        )
        return ends

    def _reverse_leaf(
        self,
        gradient: Gradient,
        start: tf.Tensor,
        stop: tf.Tensor,
        states: list[tf.Tensor],
        carried: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        loop, source = self.loop, gradient.op
        numbers = sorted(set(gradient.taken.values()))
        gathered = [loop.accumulated[n] for n in numbers]
        lists = [empty_list(t, self.division.most_leaf, "accumulator") for t in gathered]
        variables = self._run_again(
            start,
            stop,
            states,
            gathered,
            lists,
            steps=self._counts[-1],
            parallel=loop.op.get_attr("parallel_iterations"),
        )
        filled = dict(zip(numbers, variables[len(states) :], strict=True))
        given = dict(zip(gradient.carried, carried, strict=True))
        inputs = list(source.inputs)
        inputs[0], inputs[2] = tf.zeros_like(source.inputs[0]), stop - start
        for i in range(3, len(inputs)):
            if i in gradient.taken:
                inputs[i] = filled[gradient.taken[i]]
            elif i in given:
                inputs[i] = given[i]
        # One step after the other: otherwise the weight gradients of several steps would be alive
        # together.
        copy = loops.copy_op(source, inputs, parallel_iterations=tf.compat.v1.AttrValue(i=1))
        note_steps(copy, self._counts[-1])
        return [copy.outputs[i] for i in gradient.carried]

    def _again(self, tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Return the ops of the part that ``tensors`` need."""
        wanted = {id(op) for op in behind(tensors, {t.ref() for t in self.part.once})}
        return [op for op in self.part.ops if id(op) in wanted]

    def _stands(self, now: tf.Tensor, states: Sequence[tf.Tensor]) -> Tensors:
        """Return replacements at step ``now`` for arguments of the body, and for tensors that must
        not be recomputed."""
        loop, body = self.loop, self.loop.body
        stands: Tensors = {body.inputs[0].ref(): now}
        stands |= {body.inputs[i].ref(): loop.op.inputs[i] for i in self.part.invariants}
        stands |= {body.inputs[i].ref(): t for i, t in zip(self.part.states, states, strict=True)}
        kept = [loop.op.outputs[self.slots_of_once[t.ref()]] for t in self.part.once]
        for tensor, values in zip(self.part.once, untyped(kept), strict=True):
            stands[tensor.ref()] = tf.raw_ops.TensorListGetItem(
                input_handle=values,
                index=now,
                element_shape=static_shape(tensor),
                element_dtype=tensor.dtype,
            )
        return stands

    def _replace(self, gradient: Gradient, outputs: Mapping[int, tf.Tensor]) -> None:
        """Point the readers of TensorFlow's gradient to ``outputs``, and make that gradient do
        nothing where it still runs."""
        op = gradient.op
        new = {t.ref(): outputs.get(i, op.inputs[i]) for i, t in enumerate(op.outputs)}
        for output in op.outputs:
            for reader in list(output.consumers()):
                for k, tensor in enumerate(reader.inputs):
                    if tensor is output:
                        self.rewiring.point(reader, k, new[output.ref()])
        _idle(op, self.rewiring)


def _idle(op: tf.Operation, rewiring: Rewiring) -> None:
    """Make a loop run for no steps, with a body that does nothing.

    A function runs a loop that reads variables even if nothing reads the loop. The body must not
    take elements from lists that no longer hold them, since XLA compiles ops without readers, too.
    Grappler infers no shapes at all if the shapes of one op contradict each other, and would fold
    fewer constants than in TensorFlow's own graph. The condition is false for all inputs, since
    another rewrite that is undone and redone may point these to held tensors.
    """
    with graphs.outside_scopes(op.graph), graphs.unrecorded():
        never = loops.traced_like(op, len(op.inputs), "over", lambda *args: [tf.constant(False)])
        nothing = loops.traced_like(op, len(op.inputs), "replaced", lambda *args: args)
    rewiring.set(op, "cond", never)
    rewiring.set(op, "body", nothing)
    rewiring.set(op, *noted_steps(0))
