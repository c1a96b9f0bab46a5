"""Copying ops and re-pointing inputs: the two edits that rewrite a graph.

``tf.contrib.graph_editor`` did this in TensorFlow 1 and has no successor. A `Rewiring` records the
edits that a later differentiation of the graph would see, so that they can be undone and redone.

A clone must also be held back, or it runs at once: by control edges for TensorFlow's executor, by
:mod:`graph_tools.editing.opaque` for XLA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = ["CLONE_SUFFIX", "Rewiring", "clone"]

CLONE_SUFFIX = "_recomputed"


@dataclass(eq=False)
class Rewiring:
    """The re-pointed input edges and the attributes set on ops, in order; can be undone and redone.

    ``unfed``: tensors that sessions refuse to feed until the edits are undone.
    """

    edges: list[tuple[tf.Operation, int, tf.Tensor, tf.Tensor]] = field(default_factory=list)
    attributes: list[tuple[tf.Operation, str, Any, Any]] = field(default_factory=list)
    unfed: list[tf.Tensor] = field(default_factory=list)
    _contexts: int = field(default=0, init=False)

    def point(self, op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
        """Make input ``index`` of ``op`` read ``tensor``."""
        self.edges.append((op, index, op.inputs[index], tensor))
        graphs.update_input(op, index, tensor)

    def point_readers(self, tensor: tf.Tensor, other: tf.Tensor) -> None:
        """Make all ops that read ``tensor`` now read ``other``."""
        for op in dict.fromkeys(tensor.consumers()):
            for index, read in enumerate(op.inputs):
                if read is tensor:
                    self.point(op, index, other)

    def set(self, op: tf.Operation, attribute: str, value: Any) -> None:
        """Set an attribute of ``op`` to ``value``, a proto."""
        before = op.node_def.attr.get(attribute)
        self.attributes.append((op, attribute, before, value))
        graphs.set_attribute(op, attribute, value)

    def forbid_feeding(self, tensors: Iterable[tf.Tensor]) -> None:
        """Make sessions refuse to feed ``tensors``, by name: clones recompute these, and would not
        see the fed values."""
        for tensor in tensors:
            if graphs.may_be_fed(tensor):
                self.unfed.append(tensor)
                tensor.graph.prevent_feeding(tensor)

    def undo(self) -> None:
        """Restore every edge and attribute, and allow feeding again."""
        graphs.let_feed(self.unfed)
        for holder, attribute, value, _ in reversed(self.attributes):
            if value is None:
                # TensorFlow runs no function with an attribute that has no value.
                graphs.clear_attribute(holder, attribute)
            else:
                graphs.set_attribute(holder, attribute, value)
        for op, index, old, _ in reversed(self.edges):
            graphs.update_input(op, index, old)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo every edit for the duration of the outermost of nested contexts."""
        if not self._contexts:
            self.undo()
        self._contexts += 1
        try:
            yield
        finally:
            self._contexts -= 1
            if not self._contexts:
                self.redo()

    def drop(self) -> None:
        """Forget every edit: nothing is undone or redone any more."""
        self.edges.clear()
        self.attributes.clear()
        self.unfed.clear()

    def redo(self) -> None:
        """Redo every edit."""
        for tensor in self.unfed:
            tensor.graph.prevent_feeding(tensor)
        for op, index, _, new in self.edges:
            graphs.update_input(op, index, new)
        for holder, attribute, _, value in self.attributes:
            graphs.set_attribute(holder, attribute, value)


def clone(
    op: tf.Operation, inputs: Sequence[tf.Tensor], wait_for: Sequence[tf.Operation] = ()
) -> tf.Operation:
    """Return a copy of ``op`` that reads ``inputs`` and runs after ``wait_for``; call it within
    `graphs.outside_scopes`."""
    copy = graphs.create_op(op, inputs, op.name + CLONE_SUFFIX)
    if wait_for:
        graphs.add_control_inputs(copy, wait_for)
    return copy
