"""Gates, which hold back the roots of a run of clones for TensorFlow's executor.

In front of the root is an identity. It waits for the gate's op by a control edge, as this op waits
for its triggers, and is exempt from grappler. A control edge on the root itself would also order
it. But grappler would not fuse the root into the kernels that its original is fused into, and fused
kernels give other last bits.

XLA drops control edges and merges equal ops: there, no gate would survive
(:mod:`memsaving_gradients.rewriting.backends.regions`).
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
    """Return the input to hold back: the largest that is not constant; or ``None``.

    Shapes, axes and similar inputs are constants where compilers need them to be. They are left
    alone, as are references and handles of variables. When a trace ends, TensorFlow lets each op
    that reads a handle wait for the ops that read it and were created before; an identity in front
    of one of these is created after it.
    """
    fits = [
        k
        for k, t in enumerate(inputs)
        if not constant[k] and t.dtype == t.dtype.base_dtype and t.dtype != tf.resource
    ]
    return max(fits, key=lambda k: (_rank(inputs[k]), -k), default=None)


def fixed_inputs(op: tf.Operation, constant: Sequence[bool]) -> Sequence[bool]:
    """Return, for each input of ``op``, whether not to hold it back: constants, and inputs that
    would not hold back all of the op.

    The executor knows no branches and no loops, only their ops. An op of a branch waits for the
    predicate and for its own inputs. An op of a loop's first step waits for the condition and for
    its own inputs.
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
        # Only constants decide, as in a loop that counts from zero: no compiler needs them here.
        fixed = [not does for does in decides]
    return constant if all(fixed) else fixed


def begun_when_complete(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    constant: Sequence[bool],
    made: Sequence[bool],
) -> Sequence[tf.Tensor]:
    """Return inputs for a clone of a loop or branch ``op``, such that none of its ops runs before
    all inputs are there.

    In the first step of a loop, ops that read only the initial state run, and hold their results
    until the rest is there. So the input that decides whether the loop goes on waits for the inputs
    that other clones have ``made``.
    """
    fixed = fixed_inputs(op, constant)
    if fixed is constant:
        return inputs
    index = widest_input(inputs, fixed) or 0
    # The triggers are identities, since grappler does not fuse an op that others wait for.
    late = [
        gated(tensor, [], op.name).op for k, tensor in enumerate(inputs) if made[k] and k != index
    ]
    if not late:
        return inputs
    return [gated(t, late, op.name) if k == index else t for k, t in enumerate(inputs)]


def _rank(tensor: tf.Tensor) -> tuple[bool, bool, int]:
    """Return a rank: computed values above variables and fed inputs (whose address others may
    hold), floats above other types, then bytes."""
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
    """Return ``tensor`` in the same buffer, but available only when ``triggers`` have run.

    ``reader``: the device of the op that reads it. If it is ``copied`` there, the copy is held
    back, so that no device waits for another one.
    """
    device = reader if copied or not tensor.device else tensor.device
    return graphs.create_held(tensor, name + "_held", triggers, device)


@dataclass(eq=False)
class Gate:
    """A gate that holds back the roots of one run.

    Attributes
    ----------
    opens
        The op that opens the gate.
    held
        For each tensor that was held back, by reference, the tensor that replaces it.
    """

    opens: tf.Operation
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
        """Hold back one of ``inputs``, but none that is ``constant``, until the gate opens;
        ``reader``, ``copied``: see `gated`.

        ``matched``: its replacement must have no control edges, or its readers are not fused.
        """
        index = widest_input(inputs, constant) or 0
        key = inputs[index].ref()
        if key not in self.held:
            held = gated(inputs[index], [self.opens], name, reader, copied=copied)
            self.held[key] = gated(held, [], name) if matched else held
