"""The ops with which a step uses its gradients, and their place in the order of the step.

A budget is planned before the optimizer's ops exist, and gradients are rewired before any op reads
them. But when the function is traced to its end, all ops are there. `Updates` is the graph of the
ops that were created after the gradients.

**Ops that need no gradient wait for one** (`Updates.defer`). An optimizer multiplies momenta, and
decays weights and averages, before it reads a gradient. The executor runs these ops as soon as the
step begins, and each result, as large as a variable, lives through the forward pass. An op *meets*
a gradient at the first later op that needs both. If it works on a variable that is read for it, the
read gets control edges from inputs of the later op: gradients, or values made of them. So kernels
are fused and folded as before. Ops that meet no gradient (metrics), or gradients of several
variables (a learning rate), do not wait. Nor do ops that read activations, which would stay alive,
nor reads whose wait would close a cycle.

**The use of one gradient alone has ends** (`Updates.ends`), for which later ops of the backward
pass can wait. An update takes a few times the bytes of its gradient, and the updates of several
large weights are easily late together.

Control edges change no value: TensorFlow orders reads and updates of a variable by edges of its
own, and these are kept. O(ops after the gradients), except for the search for a cycle, which ends
as soon as all ops that follow the waiting op are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.precedence import Precedence
from graph_tools.memory.bfc_allocator import GRAIN
from graph_tools.ops import op_types
from graph_tools.ops.devices import Home
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs

__all__ = ["CHANGES", "Updates", "bytes_of"]

#: Ops that change variables.
CHANGES = op_types.ASSIGNS | op_types.UPDATES_IN_PLACE

#: An op that waits for one of these prevents, or changes, how that one is merged with others, or
#: waits for nothing.
_NOT_WAITED_FOR = op_types.FUSED | op_types.MERGED_AT_RUN_TIME | op_types.VIEWS


class Updates:
    """The ops that use the gradients of a graph.

    Parameters
    ----------
    operations
        All ops of a graph that were created after its gradients.
    grads
        The ops that make the gradients.
    ends
        The tensors and ops that the graph runs for; ops that none of them needs are ignored.
    first_backward
        The creation index of the first op of the backward pass.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        grads: Collection[tf.Operation],
        ends: Iterable[tf.Tensor | tf.Operation],
        first_backward: int,
    ) -> None:
        self.grads, self.first_backward = set(grads), first_backward
        built = _graph(operations, self.grads, _before)
        run = (getattr(end, "op", end) for end in ends)
        live = self.grads | built.needed(op for op in run if op in built)
        #: The ops that each op needs, as the graph is built.
        self.built = built.within(live)
        self.operations = [op for op in operations if op in live]
        #: The ops that do not run.
        self.dead = {op for op in operations if op not in live}

    @cached_property
    def steps(self) -> Precedence[tf.Operation]:
        """The ops that each op needs when reads skip views of several tensors at once."""
        return _graph(self.operations, self.grads, _before_split)

    @cached_property
    def order(self) -> list[tf.Operation]:
        """All ops, each after the ops that it needs."""
        return self.built.order()

    def defer(self, home: Home | None = None, *, chain: bool = True) -> int:
        """Let ops that need no gradient wait for the gradient that they meet; return the number of
        reads of variables that got control edges.

        ``home``: the device on which to do so, if there are several; no device waits for another.
        ``chain``: whether a read that meets gradients scaled together waits for the one before.
        """
        owner = self._owners()
        free: set[tf.Operation] = set()
        for op in self.order:
            if op not in owner and all(t.op in free or _is_source(t) for t in op.inputs):
                free.add(op)
        meets = self._meetings(owner)
        deferred, last = 0, None
        for op in self.order:
            meeting = meets.get(op) if op in free and self._is_worked_on(op, owner) else None
            if meeting is None or (home is not None and not home.has(op)):
                continue
            triggers = self._triggers(meeting, owner)
            if home is not None:
                triggers = [trigger for trigger in triggers if home.has(trigger)]
            if chain and triggers and owner[meeting] is None:
                # Gradients that are scaled together are there together, so the reads that meet them
                # run one by one.
                triggers += [last] if last is not None else []
                last = self._used_by(meeting)
            if triggers and not any(self.built.leads(op, other) for other in triggers):
                self.let_wait(op, triggers)
                deferred += 1
        return deferred

    def let_wait(self, op: tf.Operation, triggers: Sequence[tf.Operation]) -> None:
        """Let an op wait for others by control edges."""
        graphs.add_control_inputs(op, triggers)
        self.note(op, triggers)

    def note(self, op: tf.Operation, triggers: Iterable[tf.Operation]) -> None:
        """Note that an op waits for others from now on."""
        for graph in (self.built, self.steps):
            for other in triggers:
                graph.add(other, [op])

    def _is_worked_on(
        self, op: tf.Operation, owner: Mapping[tf.Operation, tf.Operation | None]
    ) -> bool:
        """Return whether an op reads a variable of more than a few numbers, and other ops compute
        something from it before a gradient is needed."""
        return (
            op.type in op_types.READS
            and tensor_bytes(op.outputs[0]).at(1) > GRAIN
            and any(
                reader not in owner and reader.type not in op_types.VIEWS
                for reader in self.steps.after(op)
            )
        )

    def _used_by(self, meeting: tf.Operation) -> tf.Operation | None:
        """Return the first op from ``meeting`` on that others may wait for."""
        behind = self.steps.behind(meeting)
        found = (op for op in chain([meeting], behind) if op.type not in _NOT_WAITED_FOR)
        return next(found, None)

    def _triggers(
        self, meeting: tf.Operation, owner: Mapping[tf.Operation, tf.Operation | None]
    ) -> list[tf.Operation]:
        """Return the ops that ``meeting`` needs and that need gradients, as `waitable`."""
        return self.waitable((op for op in self.steps.before(meeting) if op in owner), owner)

    def waitable(
        self, ops: Iterable[tf.Operation], among: Container[tf.Operation]
    ) -> list[tf.Operation]:
        """Return the ops to wait for instead of ``ops``: where a wait would change how an op is
        merged or fused, the ops that it needs ``among`` others, recursively."""
        found: dict[tf.Operation, None] = {}
        stack = [*ops]
        while stack:
            op = stack.pop()
            if op in self.grads:
                # A gradient may be a value of the forward pass, whose ops are fused.
                forward = graphs.creation_index(op) < self.first_backward
                if op.type not in (_NOT_WAITED_FOR if forward else op_types.MERGED_AT_RUN_TIME):
                    found[op] = None
            elif op.type in _NOT_WAITED_FOR:
                stack += [other for other in self.steps.before(op) if other in among]
            else:
                found[op] = None
        return list(found)

    def split(self, rewiring: Rewiring) -> None:
        """Let no op wait for gradients that it does not read: reads skip views of several tensors
        at once.

        Keras passes all gradients through one view, which grappler splits. Until then each update
        needs all gradients, and no backward op can wait for it.
        """
        for op in self.operations:
            for k, tensor in enumerate(op.inputs):
                if (viewed := _past(tensor)) is not tensor:
                    rewiring.point(op, k, viewed)
        self.built = self.steps
        self.dead.update(op for op in self.operations if op_types.is_split(op))

    def ends(self) -> dict[tf.Operation, list[tf.Operation]]:
        """Return, by op that makes gradients, the last ops that use these alone; after `split`.

        An op does not count if it reads other values of the backward pass than gradients: these may
        not be there when its gradient is.
        """
        owner = self._alone
        found: dict[tf.Operation, list[tf.Operation]] = defaultdict(list)
        for op, grad in owner.items():
            # A variable may be read when an op has run, for a later use of the gradient.
            later = (owner.get(other, grad) for other in self.steps.after(op))
            if (
                grad is not None
                and op is not grad
                and op.type not in _NOT_WAITED_FOR
                and all(other is not grad for other in later)
            ):
                found[grad].append(op)
        return dict(found)

    def alone(self) -> dict[tf.Operation, list[tf.Operation]]:
        """Return, for each op that makes gradients, the ops that use these alone, after `split`."""
        found: dict[tf.Operation, list[tf.Operation]] = defaultdict(list)
        for op, grad in self._alone.items():
            if grad is not None and op is not grad:
                found[grad].append(op)
        return dict(found)

    def together(
        self,
    ) -> tuple[dict[tf.Operation, list[tf.Operation]], set[tf.Operation]]:
        """Return, for each op that makes gradients, the ops that use these and values of several
        gradients, such as their norm; and the ops that make such values. Call after `split`.

        The former are in an order in which they can run.
        """
        owner: dict[tf.Operation, tf.Operation | None] = {}
        lines: dict[tf.Operation, list[tf.Operation]] = {}
        common: set[tf.Operation] = set()
        for op in self.steps.order():
            if op not in self._alone:
                continue
            owner[op] = self._alone[op]
            if owner[op] is None and not self._reads_others(op):
                known = [other for other in self.steps.before(op) if other in owner]
                grads = {owner[other] for other in known if owner[other] is not None}
                if len(grads) == 1:
                    owner[op] = grad = grads.pop()
                    lines.setdefault(grad, []).append(op)
                    common.update(other for other in known if owner[other] is None)
        return lines, common

    def without_gradients(self) -> dict[tf.Operation, list[tf.Operation]]:
        """Return, for each update of a variable that needs no gradient, the ops that only it needs,
        by the one of these that makes most bytes; call after `split`."""
        order = self.steps.order()
        # For each op, the update that needs it; `None`: several do.
        owner: dict[tf.Operation, tf.Operation | None] = {}
        for op in reversed(order):
            if op not in self._alone:
                ends = {owner[other] for other in self.steps.after(op) if other in owner}
                if op.type in CHANGES:
                    owner[op] = op
                elif ends:
                    owner[op] = ends.pop() if len(ends) == 1 else None
        lines: dict[tf.Operation, list[tf.Operation]] = defaultdict(list)
        for op in order:
            if (end := owner.get(op)) is not None:
                lines[end].append(op)
        return {max(ops, key=bytes_of): ops for ops in lines.values()}

    @cached_property
    def _alone(self) -> dict[tf.Operation, tf.Operation | None]:
        return self._owners(strictly=True)

    def _owners(self, *, strictly: bool = False) -> dict[tf.Operation, tf.Operation | None]:
        """Return, for each op that needs gradients, the op that makes them; ``None``: several do.

        ``strictly``: also ``None`` if it needs a value of the backward pass that is no gradient.
        """
        found: dict[tf.Operation, tf.Operation | None] = {}
        for op in self.steps.order():
            if op in self.grads:
                found[op] = op
                continue
            owners = {found[other] for other in self.steps.before(op) if other in found}
            if strictly and self._reads_others(op):
                owners.add(None)
            if owners:
                found[op] = owners.pop() if len(owners) == 1 else None
        return found

    def _reads_others(self, op: tf.Operation) -> bool:
        """Return whether an op needs a value of the backward pass that is no gradient."""
        return any(
            other not in self.steps and graphs.creation_index(other) >= self.first_backward
            for other in _before(op)
        )

    def _meetings(
        self, owner: Mapping[tf.Operation, tf.Operation | None]
    ) -> dict[tf.Operation, tf.Operation | None]:
        """Return, for each op that needs no gradient, the first op that needs a gradient and, maybe
        through others, this op.

        ``None``: there are several, and they need different gradients. Ops that need one gradient
        come before ops that need several.
        """
        place = {op: k for k, op in enumerate(self.order)}
        found: dict[tf.Operation, tf.Operation | None] = {}
        for op in reversed(self.order):
            if op in owner:
                continue
            met = {
                reader if reader in owner else found[reader]
                for reader in self.steps.after(op)
                # An op with neither inputs nor outputs only waits, as the end of the function does.
                if (reader in owner or reader in found) and (reader.inputs or reader.outputs)
            }
            known = {meeting for meeting in met if meeting}
            alone = {meeting for meeting in known if owner[meeting]}
            first = min(alone or known, key=place.__getitem__, default=None)
            several = len({owner[meeting] for meeting in alone}) > 1 or (
                not alone and not all(self.steps.leads(first, other) for other in known)
            )
            if met:
                found[op] = None if several or None in met else first
        return found


def bytes_of(op: tf.Operation) -> int:
    """Return the bytes that an op makes, for one example."""
    return sum(tensor_bytes(tensor).at(1) for tensor in op.outputs)


def _graph(
    operations: Iterable[tf.Operation],
    grads: Iterable[tf.Operation],
    before: Callable[[tf.Operation], list[tf.Operation]],
) -> Precedence[tf.Operation]:
    """Return the graph with an edge to each of ``operations`` from each op that it needs."""
    graph = Precedence([*sorted(grads, key=graphs.creation_index), *operations])
    for op in operations:
        for other in before(op):
            if other in graph:
                graph.add(other, [op])
    return graph


def _before(op: tf.Operation) -> list[tf.Operation]:
    """Return the ops that ``op`` needs to have run."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def _before_split(op: tf.Operation) -> list[tf.Operation]:
    """Return the same ops when reads skip views of several tensors at once."""
    return [*(_past(tensor).op for tensor in op.inputs), *op.control_inputs]


def _past(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor before any views of several tensors at once that wait for nothing."""
    while op_types.is_split(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _is_source(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is there before the step, or too small to matter."""
    return tensor.op.type in op_types.SOURCES or tensor_bytes(tensor).at(1) <= GRAIN
