"""Gates: what the roots of a run of clones wait for, in the two forms that survive compilation.

For TensorFlow's executor a gate is an identity in front of the root, which waits for its triggers
by control edges and is exempt from grappler. A control edge on the root itself would order as well,
but keeps grappler from fusing the root into kernels that its original is fused into, and fused
kernels give other last bits.

XLA drops control edges and merges equal ops. There the run is part of a region, which waits as a
whole (:mod:`memsaving_gradients.rewriting.regions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.ops import op_types
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs, loops

__all__ = ["Gate", "begun_when_complete", "fixed_inputs", "gated", "widest_input"]


def widest_input(inputs: Sequence[tf.Tensor], constant: Sequence[bool]) -> int | None:
    """The input to hold back: the largest that is no constant, or ``None``.

    Shapes, axes and the like are constants where compilers need them to be, and are left alone. So
    are references and handles of variables: when a trace ends, TensorFlow lets each op that reads
    a handle wait for those that were created before, and an identity in front of one of them is
    created after it.
    """
    fits = [
        k
        for k, t in enumerate(inputs)
        if not constant[k] and t.dtype == t.dtype.base_dtype and t.dtype != tf.resource
    ]
    return max(fits, key=lambda k: (_rank(inputs[k]), -k), default=None)


def fixed_inputs(op: tf.Operation, constant: Sequence[bool]) -> Sequence[bool]:
    """Which inputs of ``op`` are not to be held back: constants, and those that would not hold all
    of it back.

    The executor knows no branches and no loops, only the ops in them. Those of a branch run when
    its predicate is known, and those of a loop's first step when its condition is, each as soon as
    what itself reads is there.
    """
    if op.type in loops.BRANCHES:
        decides = [k == 0 for k in range(len(op.inputs))]
    elif op.type in loops.LOOPS:
        condition = loops.function_graph(op, "cond")
        if condition is None:
            return constant
        decides = [bool(t.consumers()) for t in condition.inputs]
    else:
        return constant
    fixed = [held or not does for held, does in zip(constant, decides, strict=True)]
    if all(fixed) and op.type in loops.LOOPS:
        # A loop that counts from zero: no compiler needs to know that here.
        fixed = [not does for does in decides]
    return constant if all(fixed) else fixed


def begun_when_complete(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    constant: Sequence[bool],
    made: Sequence[bool],
) -> Sequence[tf.Tensor]:
    """Inputs for a clone of a loop or branch ``op``, such that none of its ops runs before all of
    them are there.

    The first step of a loop runs what reads only the state that the loop begins with, and holds it
    until the rest is there. So what decides whether the loop goes on waits for what other clones
    have ``made``.
    """
    fixed = fixed_inputs(op, constant)
    if fixed is constant:
        return inputs
    index = widest_input(inputs, fixed) or 0
    # Identities are waited for, since grappler does not fuse what is waited for.
    late = [
        gated(tensor, [], op.name).op for k, tensor in enumerate(inputs) if made[k] and k != index
    ]
    if not late:
        return inputs
    return [gated(t, late, op.name) if k == index else t for k, t in enumerate(inputs)]


def _rank(tensor: tf.Tensor) -> tuple[bool, bool, int]:
    """Computed values before variables and fed inputs (whose address others may hold), floats
    before the rest."""
    size = tensor_bytes(tensor)
    computed = tensor.op.type not in op_types.SOURCES
    return computed, tensor.dtype.is_floating, size.fixed + size.per_example


def gated(
    tensor: tf.Tensor,
    triggers: Sequence[tf.Operation],
    name: str,
    reader: str = "",
    *,
    copied: bool = False,
) -> tf.Tensor:
    """``tensor``, available only when ``triggers`` have run; the same buffer.

    ``reader``: the device of the op that reads it. If it is ``copied`` there, the copy is held
    back, so that no device waits for another one.
    """
    device = reader if copied or not tensor.device else tensor.device
    return graphs.create_held(tensor, name + "_held", triggers, device)


@dataclass(eq=False)
class Gate:
    """Holds back the roots of one run.

    Attributes
    ----------
    opens
        The op that opens the gate. ``None``: the gate holds nothing back, since the run begins a
        region, and the region waits (:mod:`memsaving_gradients.rewriting.regions`).
    held
        What stands for tensors that were held back, by reference.
    """

    opens: tf.Operation | None = None
    held: dict[object, tf.Tensor] = field(default_factory=dict)

    @classmethod
    def after(
        cls, triggers: Sequence[tf.Operation], root: tf.Operation, before: Gate | None
    ) -> Gate:
        """Return a gate before ``root``, on its device, that opens when ``triggers`` have run, and
        not before the gate before it."""
        waits_for = [*triggers, *([before.opens] if before else [])]
        return cls(graphs.create_gate(root.graph, root.name + "_gate", waits_for, root.device))

    def hold(
        self,
        name: str,
        inputs: Sequence[tf.Tensor],
        constant: Sequence[bool],
        reader: str = "",
        *,
        copied: bool = False,
        matched: bool = False,
    ) -> None:
        """Hold back one of ``inputs`` until the gate opens, none that is ``constant``; ``reader``,
        ``copied``: see `gated`.

        ``matched``: what stands for it must have no control edges, or its readers are not fused.
        """
        if self.opens is None:
            return
        index = widest_input(inputs, constant) or 0
        key = inputs[index].ref()
        if key not in self.held:
            held = gated(inputs[index], [self.opens], name, reader, copied=copied)
            self.held[key] = gated(held, [], name) if matched else held
