"""Calls for gradients that need nothing of one another take turns.

The executor runs whatever is ready. In a step that differentiates several microbatches, written one
after the other, it runs the forward passes of all of them at once, and what they keep is there
together. So what the forward pass of a call alone reads of the rest of the step waits for the
gradients of the call before: it stands behind an identity, as what is recomputed does
(:mod:`memsaving_gradients.rewriting.gates`). No value changes. It costs what two calls could have
computed at the same time.
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
        Its losses.
    grads
        The ops that are done when its gradients are used.
    """

    ends: Sequence[tf.Tensor]
    grads: Sequence[tf.Operation]


def take_turns(
    passes: Sequence[Pass], edges: Edges, rewiring: Rewiring
) -> list[dict[tf.Operation, list[tf.Operation]]]:
    """Let each pass begin when the gradients of the one before are there; for each, the identities
    that its inputs stand behind, with what these wait for.

    Parameters
    ----------
    passes
        In the order of the step.
    edges
        What ops need to compute what they do. What else they wait for may have the passes run one
        after the other already.
    rewiring
        Notes the edits.
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
            # What the gradients before need, be it only to run in the order of the program, cannot
            # wait for them.
            free = inside - ancestors(before.grads, Edges(())) - _following(roots, before)
            gates = _behind(sorted(free, key=graphs.creation_index), inside, before, rewiring)
        found.append(gates)
        known |= needed
        before = one
    return found


def _following(roots: Sequence[tf.Operation], before: Pass) -> set[tf.Operation]:
    """Of what ``roots`` need, the ops that wait for gradients of the pass ``before`` as it is, such
    as for an update of variables."""
    edges, found = Edges(()), set(before.grads)
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
    """Let what ``early`` ops read from outside of their pass wait for the gradients of the pass
    ``before``; ``inside``: all ops of their pass."""
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
    """Whether a tensor is a number that is computed or fed: constants and variables stay where
    kernels and compilers look for them."""
    kind = tensor.op.type
    plain = tensor.dtype == tensor.dtype.base_dtype
    handle = tensor.dtype in (tf.resource, tf.variant)
    return plain and not handle and kind != "Const" and kind not in op_types.READS
