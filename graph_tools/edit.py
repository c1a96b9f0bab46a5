"""Copying ops, re-pointing inputs and holding ops back: what rewriting a graph comes down to.

``tf.contrib.graph_editor`` did this in TensorFlow 1 and has no successor. Edits that would change what a later
differentiation of the graph sees are recorded, so that they can be taken back and made again (`Rewiring`).

Two forms of gate exist. A control edge orders TensorFlow's executor and survives grappler, since an op that waits for
something differs from one that does not. XLA drops control edges between pure ops and then merges the copy with its
original: there, a data edge is needed that no compiler can see through (`opaque_zero`, `add_opaque`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools import _tf

__all__ = ["CLONE_SUFFIX", "Rewiring", "add_opaque", "can_add_opaque", "clone", "opaque_zero"]

CLONE_SUFFIX = "_recomputed"


@dataclass(eq=False)
class Rewiring:
    """Input edges that were re-pointed, in order; can be undone and redone."""

    edges: list[tuple[tf.Operation, int, tf.Tensor, tf.Tensor]] = field(default_factory=list)

    def point(self, op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
        """Make input ``index`` of ``op`` read ``tensor``."""
        self.edges.append((op, index, op.inputs[index], tensor))
        _tf.update_input(op, index, tensor)

    def undo(self) -> None:
        """Restore every edge."""
        for op, index, old, _ in reversed(self.edges):
            _tf.update_input(op, index, old)

    def redo(self) -> None:
        """Make every edit again."""
        for op, index, _, new in self.edges:
            _tf.update_input(op, index, new)


def clone(
    op: tf.Operation, inputs: Sequence[tf.Tensor], wait_for: Sequence[tf.Operation] = ()
) -> tf.Operation:
    """A copy of ``op`` that reads ``inputs`` and runs after ``wait_for``; call within `_tf.outside_scopes`."""
    copy = _tf.create_op(op, inputs, op.name + CLONE_SUFFIX)
    if wait_for:
        _tf.add_control_inputs(copy, wait_for)
    return copy


def opaque_zero(trigger: tf.Tensor) -> tf.Tensor:
    """A float32 zero that depends on ``trigger`` in a way that compilers do not see through.

    One element is compared with itself: 0 if equal, NaN otherwise. The cast to bool keeps a NaN in the trigger
    from spreading (the form that ``tf.recompute_grad`` uses).
    """
    element = tf.reduce_max(tf.reshape(trigger, [-1])[:1])
    truth = tf.cast(element, tf.bool)
    return tf.where(tf.equal(truth, truth), 0.0, float("nan"))


def can_add_opaque(tensor: tf.Tensor) -> bool:
    """Whether `add_opaque` works on tensors of this dtype."""
    dtype = tensor.dtype
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype == tf.bool)


def add_opaque(tensor: tf.Tensor, zero: tf.Tensor) -> tf.Tensor:
    """``tensor``, made to depend on an opaque ``zero`` (−0.0 becomes +0.0)."""
    if tensor.dtype == tf.bool:
        return tf.logical_or(tensor, tf.math.is_nan(zero))
    if tensor.dtype.is_integer:
        return tensor + tf.cast(tf.math.is_nan(zero), tensor.dtype)
    return tensor + tf.cast(zero, tensor.dtype)
