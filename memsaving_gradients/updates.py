"""What a step does with its gradients, and its place in the order of the step.

A budget is planned before the optimizer's ops exist, and gradients are rewired before anybody reads them; but when the
function is traced to its end, all ops are there. `Updates` is the graph of those that were created after the gradients.

**What needs no gradient waits for one** (`Updates.defer`). An optimizer multiplies momenta, decays weights and averages before it looks
at a gradient, and the executor runs what needs no gradient as soon as the step begins: each result, as large as a variable,
then lives through the forward pass until its gradient comes. (So do many single numbers, which split holes between chunks.)
An op that needs no gradient and works on variables alone gets control edges from what it meets: the gradients, or what is
made of them, that the first op behind it reads which needs any. What meets no gradient (metrics), or those of several
variables (a learning rate), or reads activations, which it would keep alive, is left alone, and so is an op whose
wait would close a cycle.

**What is done with one gradient alone has an end** (`Updates.ends`), for which what follows in the backward pass can wait. An update
takes a few times what its gradient does, and those of several large weights are easily late together.

Control edges change no value: TensorFlow orders reads and updates of a variable by edges of its own, and these are kept. O(ops after
the gradients), but for the search for a cycle, which ends as soon as what follows the waiting op is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from graph_tools import _tf, optypes
from graph_tools.edit import Rewiring
from graph_tools.sizes import tensor_bytes

__all__ = ["Updates"]

#: Tensors of at most so many bytes may be kept alive: losses, counters.
SMALL = 256


class Updates:
    """What was created after the gradients.

    Parameters
    ----------
    operations
        All ops of a graph that were created after its gradients.
    grads
        The ops that make these.
    """

    def __init__(self, operations: Sequence[tf.Operation], grads: Collection[tf.Operation]) -> None:
        self.grads = set(grads)
        self.operations = operations
        self.steps = nx.DiGraph()
        self.steps.add_nodes_from([*grads, *operations])
        for op in operations:
            self.steps.add_edges_from((other, op) for other in _before(op) if other in self.steps)
        self.order = list(nx.topological_sort(self.steps))

    def defer(self) -> int:
        """Let what needs no gradient wait for the gradient that it meets; how many ops got control edges."""
        steps, owner = self.steps, self._owners(None)
        free: set[tf.Operation] = set()
        for op in self.order:
            if op not in owner and all(t.op in free or _is_source(t) for t in op.inputs):
                free.add(op)
        meets = self._meetings(owner)
        waiting: set[tf.Operation] = set()
        deferred = 0
        for op in self.order:
            meeting = meets.get(op) if op in free else None
            if meeting is None:
                continue
            if not waiting.isdisjoint(steps.predecessors(op)):
                waiting.add(op)
            elif op.type not in optypes.SOURCES and op.type not in optypes.VIEWS:
                others = [other for other in steps.predecessors(meeting) if other in owner]
                if not any(nx.has_path(steps, op, other) for other in others):
                    _tf.add_control_inputs(op, others)
                    steps.add_edges_from((other, op) for other in others)
                    waiting.add(op)
                    deferred += 1
        return deferred

    def take_memory(self, outputs: Sequence[tf.Tensor]) -> bool:
        """Whether there is more to them than reducing gradients to a few numbers.

        They update variables, read what the forward or the backward pass would let go, or return (``outputs``) what is large.
        """
        changes = optypes.ASSIGNS | optypes.UPDATES_IN_PLACE
        if any(op.type in changes for op in self.operations):
            return True
        read = (tensor for op in self.operations for tensor in op.inputs)
        return any(
            not _is_source(tensor) and tensor.op not in self.grads and tensor.op not in self.steps
            for tensor in read
        ) or not all(map(_is_source, outputs))

    def split(self, rewiring: Rewiring) -> None:
        """Let no op wait for gradients that it does not read: views of several tensors at once are read past.

        Keras passes all gradients through one, which grappler splits; but a backward op cannot wait for what comes after it.
        """
        for op in self.operations:
            for k, tensor in enumerate(op.inputs):
                if (viewed := _past(tensor)) is not tensor:
                    rewiring.point(op, k, viewed)

    def ends(self, first_backward: int) -> dict[tf.Operation, list[tf.Operation]]:
        """For each op that makes gradients, the ops that end what is done with these alone; call after `split`.

        ``first_backward``: the creation index of the first op of the backward pass. What reads others of these than gradients is
        not known to be there when its gradient is.
        """
        owner = self._owners(first_backward)
        found: dict[tf.Operation, list[tf.Operation]] = defaultdict(list)
        for op, grad in owner.items():
            later = (owner[other] for other in self.steps.successors(op))
            if grad is not None and op is not grad and all(other is not grad for other in later):
                found[grad].append(op)
        return dict(found)

    def _owners(self, first_backward: int | None) -> dict[tf.Operation, tf.Operation | None]:
        """For each op that needs gradients, the op that makes them; ``None``: several do.

        With ``first_backward`` also where the op needs something of the backward pass that is no gradient.
        """
        found: dict[tf.Operation, tf.Operation | None] = {}
        for op in nx.topological_sort(self.steps):
            if op in self.grads:
                found[op] = op
                continue
            owners = {found[other] for other in self.steps.predecessors(op) if other in found}
            if first_backward is not None and any(
                other not in self.steps and _tf.creation_index(other) >= first_backward
                for other in _before(op)
            ):
                owners.add(None)
            if owners:
                found[op] = owners.pop() if len(owners) == 1 else None
        return found

    def _meetings(
        self, owner: Mapping[tf.Operation, tf.Operation | None]
    ) -> dict[tf.Operation, tf.Operation | None]:
        """For each op that needs no gradient, the first one that needs it, maybe through others, and a gradient.

        ``None``: there are several, and they need different gradients. Of what needs one gradient and what needs several the
        former comes first.
        """
        place = {op: k for k, op in enumerate(self.order)}
        found: dict[tf.Operation, tf.Operation | None] = {}
        for op in reversed(self.order):
            if op in owner:
                continue
            met = {
                reader if reader in owner else found[reader]
                for reader in self.steps.successors(op)
                if reader in owner or reader in found
            }
            known = {meeting for meeting in met if meeting}
            alone = {meeting for meeting in known if owner[meeting]}
            several = len({owner[meeting] for meeting in alone}) > 1 or (
                not alone and len(known) > 1
            )
            if met:
                first = min(alone or known, key=place.__getitem__, default=None)
                found[op] = None if several or None in met else first
        return found


def _before(op: tf.Operation) -> list[tf.Operation]:
    """The ops that ``op`` needs to have run."""
    return [*(_past(tensor).op for tensor in op.inputs), *op.control_inputs]


def _past(tensor: tf.Tensor) -> tf.Tensor:
    """What ``tensor`` is a view of, if together with others."""
    while tensor.op.type in optypes.SPLIT:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _is_source(tensor: tf.Tensor) -> bool:
    """Whether a tensor is there before the step, or too small to matter."""
    return tensor.op.type in optypes.SOURCES or tensor_bytes(tensor).at(1) <= SMALL
