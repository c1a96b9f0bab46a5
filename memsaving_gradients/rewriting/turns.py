"""Let calls for gradients that are independent of one another take turns.

The executor runs every op that is ready. In a step that differentiates several microbatches, in
program order, it runs all their forward passes at once, and the residuals of all are alive
together. So the ops of each forward pass that read the rest of the step wait for the gradients of
the call before. They read it through identities, as the roots of clones do
(:mod:`memsaving_gradients.rewriting.gates`). No value changes. The cost is the work that two calls
could have done at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.topology import Edges, ancestors, ordered
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs

__all__ = ["Pass", "take_turns"]


@dataclass(frozen=True, eq=False)
class Pass:
    """A call's forward pass and gradients.

    Attributes
    ----------
    ends
        The losses.
    grads
        The ops that have run when its gradients can be used.
    """

    ends: Sequence[tf.Tensor]
    grads: Sequence[tf.Operation]


def take_turns(
    passes: Sequence[Pass], edges: Edges, rewiring: Rewiring
) -> list[dict[tf.Operation, list[tf.Operation]]]:
    """Let each pass begin when the gradients of the pass before are there; return, for each pass,
    the identities in front of its inputs, with the ops that these wait for.

    Parameters
    ----------
    passes
        The passes, in the order of the step.
    edges
        The edges that ops need to compute their results. Other edges may already make the passes
        run one after the other.
    rewiring
        The record of edits.
    """
    known: set[tf.Operation] = set()
    before: Pass | None = None
    found = []
    for one in passes:
        roots = [end.op for end in one.ends]
        needed = ancestors(roots, edges, known)
        gates: dict[tf.Operation, list[tf.Operation]] = {}
        if before is not None:
            inside = needed - known
            # Ops that the gradients before need, if only to run in the order of the program, cannot
            # wait for them.
            free = inside - ancestors(before.grads, Edges()) - _following(roots, before)
            gates = _behind(sorted(free, key=graphs.creation_index), inside, before, rewiring)
        found.append(gates)
        known |= needed
        before = one
    return found


def _following(roots: Sequence[tf.Operation], before: Pass) -> set[tf.Operation]:
    """Return the ops that ``roots`` need and that wait for gradients of the pass ``before`` anyway,
    such as for an update of variables."""
    edges, found = Edges(), set(before.grads)
    for op in ordered(sorted(ancestors(roots, edges), key=graphs.creation_index), edges):
        if not found.isdisjoint(edges.before(op)):
            found.add(op)
    return found


def _behind(
    early: Sequence[tf.Operation],
    inside: Collection[tf.Operation],
    before: Pass,
    rewiring: Rewiring,
) -> dict[tf.Operation, list[tf.Operation]]:
    """Let the tensors that ``early`` ops read from outside of their pass wait for the gradients of
    the pass ``before``; ``inside``: all ops of their pass."""
    held: dict[object, tf.Tensor] = {}
    gates: dict[tf.Operation, list[tf.Operation]] = {}
    for op in early:
        for k, tensor in enumerate(op.inputs):
            if tensor.op in inside or not _may_wait(tensor):
                continue
            if tensor.ref() not in held:
                waits = list(before.grads)
                name = f"{tensor.op.name}_in_turn"
                stands = graphs.create_held(tensor, name, waits, tensor.device)
                held[tensor.ref()], gates[stands.op] = stands, waits
            rewiring.point(op, k, held[tensor.ref()])
    return gates


def _may_wait(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is a computed or fed number; constants and variables stay where
    kernels and compilers look for them."""
    kind = tensor.op.type
    plain = tensor.dtype == tensor.dtype.base_dtype
    handle = tensor.dtype in (tf.resource, tf.variant)
    return plain and not handle and kind != "Const" and kind not in op_types.READS
