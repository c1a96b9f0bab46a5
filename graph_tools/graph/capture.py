"""The part of a TensorFlow graph that computes given tensors, as arrays and as a networkx DAG.

The ops have a topological order that follows creation wherever creation was topological. Values
(tensors) are numbered consecutively, the outputs of op 0 first. A view (reshape, identity) has the
*storage* of the value whose buffer it uses, so that each buffer is counted once.

The working form is arrays, not a networkx graph with attributes: a 1001-layer network has a hundred
thousand ops, and a plan reads each of them many times. ``OpGraph.dag`` is the networkx graph, built
once if its algorithms are needed. Capture is linear in ops and edges, about 25 µs an op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.graph.topology import (
    Edges,
    ancestors,
    by_creation,
    conditional,
    keep_order_of_collectives,
    ordered,
)
from graph_tools.ops import op_types
from graph_tools.ops.device_copies import is_elsewhere
from graph_tools.ops.devices import Home
from graph_tools.ops.sizes import Bytes, is_guess, tensor_bytes
from graph_tools.ops.variant_bytes import buffer_bytes
from graph_tools.ops.views import viewed_input
from graph_tools.tf_private import graphs

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["LARGEST_FOLDED_BY_GRAPPLER", "OpGraph", "capture"]

#: Fact: bytes. TensorFlow computes larger results of constants at each step
#: (``constant_folding.h``, TensorFlow 2.16 to 2.21).
LARGEST_FOLDED = 10 << 20
#: Fact: bytes. Grappler makes no constant that is larger than this and than its inputs
#: (``kMaxConstantSize`` in ``constant_folding.cc``, TensorFlow 2.16 to 2.21), and none from such a
#: result. Whether anything else folds more depends on the session.
LARGEST_FOLDED_BY_GRAPPLER = 100 << 10


@dataclass(frozen=True, eq=False)
class OpGraph:
    """Ops, values and storages of a captured graph.

    Attributes
    ----------
    ops
        The operations, in topological order.
    inputs
        For each op, the values that it reads, in input order.
    controls
        For each op, the ops (positions) that it waits for without reading them.
    producer
        For each value, the op (position) that computes it.
    first_value
        For each op, its first output value; ``first_value[i] + k`` is output ``k``.
    storage
        For each value, the value whose buffer it uses (itself, unless it is a view).
    fixed_bytes, bytes_per_example
        For each value, the bytes of its buffer: ``fixed + per_example × batch`` (0 for a view).
    source
        For each value, whether its buffer lives outside the step: a variable, a fed input, a
        constant, or a value that TensorFlow folds into a constant.
    constant
        For each value, whether it is or may become a constant: grappler and XLA fold values that
        depend on constants and shapes alone. Shapes that are unknown now may be known when the
        graph is inlined.
    clonable
        For each op, whether a copy of it gives the same outputs
        (`graph_tools.ops.op_types.is_clonable`).
    optional
        For each op, whether only tensors that may never be fetched need it: it may be pruned.
    here
        For each op, whether it runs on the device of the capture. Of an op elsewhere, only its
        edges count: it takes no time, and its outputs take memory only if an op here reads them,
        because they are then copied here.
    conditional
        The ops that may be dead: the ops in a branch of control flow v1. An op that waits for a
        dead op is dead, too.
    """

    ops: tuple[tf.Operation, ...]
    inputs: tuple[tuple[int, ...], ...]
    controls: tuple[tuple[int, ...], ...]
    producer: npt.NDArray[np.int64]
    first_value: npt.NDArray[np.int64]
    storage: npt.NDArray[np.int64]
    fixed_bytes: npt.NDArray[np.int64]
    bytes_per_example: npt.NDArray[np.int64]
    source: npt.NDArray[np.bool_]
    constant: npt.NDArray[np.bool_]
    clonable: npt.NDArray[np.bool_]
    optional: npt.NDArray[np.bool_]
    here: npt.NDArray[np.bool_]
    conditional: frozenset[int] = frozenset()

    @cached_property
    def dag(self) -> nx.DiGraph:
        """The ops as a networkx DAG: nodes are positions with ``name`` and ``type``, edges carry
        ``control``."""
        import networkx as nx

        dag = nx.DiGraph()
        dag.add_nodes_from((i, {"name": op.name, "type": op.type}) for i, op in enumerate(self.ops))
        dag.add_edges_from(
            (wait, i, {"control": True}) for i, waits in enumerate(self.controls) for wait in waits
        )
        dag.add_edges_from(
            (int(self.producer[v]), i, {"control": False})
            for i, values in enumerate(self.inputs)
            for v in values
        )
        return dag

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each op, the ops that read it whenever the graph runs, once for each read; reading a
        known shape does not count."""
        found: list[list[int]] = [[] for _ in self.ops]
        producer = self.producer.tolist()
        for i, values in enumerate(self.inputs):
            if not self.optional[i] and not op_types.reads_known_shapes(self.ops[i]):
                for value in values:
                    found[producer[value]].append(i)
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        """Position of each op by its name (unique in a TensorFlow graph)."""
        return {op.name: i for i, op in enumerate(self.ops)}

    def value(self, tensor: tf.Tensor) -> int:
        """Return the number of ``tensor``; raise `KeyError` if its op was not captured."""
        return int(self.first_value[self.position[tensor.op.name]]) + tensor.value_index

    def tensor(self, value: int) -> tf.Tensor:
        """Return the tensor with number ``value``."""
        op = int(self.producer[value])
        return self.ops[op].outputs[value - int(self.first_value[op])]

    def constants(self, op: int) -> list[bool]:
        """Return, for each input of an op, whether it is or may become a constant."""
        return [bool(self.constant[value]) for value in self.inputs[op]]

    def reads_from_elsewhere(self, op: int) -> bool:
        """Return whether an op reads a value that another device makes."""
        return not all(self.here[self.producer[value]] for value in self.inputs[op])

    def reads_constant(self, op: int) -> bool:
        """Return whether an op combines a value with a constant number, which folding may move past
        the op before it."""
        return any(
            self.constant[value] and (tensor.dtype.is_floating or tensor.dtype.is_complex)
            for value, tensor in zip(self.inputs[op], self.ops[op].inputs, strict=True)
        )

    def value_bytes(self, batch: int) -> npt.NDArray[np.int64]:
        """Return the bytes of each value's own buffer at a batch of ``batch`` examples."""
        return self.fixed_bytes + self.bytes_per_example * batch


def capture(
    targets: Iterable[tf.Tensor | tf.Operation],
    *,
    stop: Iterable[tf.Tensor] = (),
    unfetched: Iterable[tf.Tensor] = (),
    late: int | None = None,
    early: Collection[tf.Operation] = (),
    without: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
    home: Home | None = None,
) -> OpGraph:
    """Capture every op that ``targets`` need, back to ``stop`` or to the sources of the graph.

    Parameters
    ----------
    targets
        Tensors or operations of one graph (a ``tf.Graph``, or the ``FuncGraph`` of a function being
        traced or already traced).
    stop
        Tensors at which the capture ends; their ops are captured without inputs.
    unfetched
        Tensors that are captured as well, but may never be fetched (losses: gradients seldom need
        them).
    late
        Ops created from this number on come after all others, except ops that an earlier op needs:
        the gradient of a loop gives new inputs to the loop.
    early
        Ops that come right after the last op that they read, whenever they were created; they are
        not late.
    without
        Control edges to ignore: for an op, some of the ops that it waits for.
    home
        The device to capture for, if several compute; ``None``: all devices, as one.

    Raises
    ------
    GraphError
        If targets belong to different graphs, or the ops form a cycle (TF1 ``while`` frames do).

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.compat.v1.placeholder(tf.float32, [4], name="x")
    ...     y = tf.reshape(tf.tanh(x), [2, 2], name="y")
    ...     graph = capture([y])
    >>> [op.type for op in graph.ops]
    ['Placeholder', 'Tanh', 'Const', 'Reshape']
    >>> graph.storage[graph.value(y)] == graph.first_value[1]
    np.True_
    """
    cut = {t.op for t in stop}
    roots = [t if isinstance(t, tf.Operation) else t.op for t in targets]
    others = [t.op for t in unfetched]
    homes = {id(op.graph) for op in (*roots, *others)}
    if len(homes) > 1:
        raise GraphError(f"targets belong to {len(homes)} different graphs")
    edges = Edges(cut, without)
    asked = ancestors(roots, edges)
    found = ancestors(others, edges, asked)
    keep_order_of_collectives(found, edges)
    ops = ordered(sorted(found, key=by_creation(early, edges)), edges)
    if late is not None:
        before = [op for op in ops if graphs.creation_index(op) < late or op in early]
        needed = ancestors(before, edges)
        ops.sort(key=lambda op: op not in needed)
    return _describe(ops, edges, asked, late, early, home)


def _describe(
    ops: list[tf.Operation],
    edges: Edges,
    asked: set[tf.Operation],
    late: int | None,
    early: Collection[tf.Operation],
    home: Home | None,
) -> OpGraph:
    inputs: list[tuple[int, ...]] = []
    controls: list[tuple[int, ...]] = []
    first_value: list[int] = []
    clonable: list[bool] = []
    here: list[bool] = []
    values = _Values()
    place: dict[tf.Operation, int] = {op: i for i, op in enumerate(ops)}
    may_be_dead = conditional(ops, edges, place)
    assigned = _assigned(ops)
    for i, op in enumerate(ops):
        before, waits = edges[op]
        reads = tuple(first_value[place[maker]] + k for maker, k in before)
        inputs.append(reads)
        controls.append(tuple(place[c] for c in waits))
        here.append(home is None or home.has(op))
        copies = here[i] and op not in edges.cut and i not in may_be_dead
        copies = copies and op_types.is_clonable(op)
        if assigned:
            # A copy would run after the assignment, and read the new value.
            copies = copies and not any(ops[values.maker(v)] in assigned for v in reads)
        clonable.append(copies)
        first_value.append(len(values.producer))
        # The output of a late op must not count as a part of an early buffer, which may be dropped
        # before, and recomputed.
        is_early = late is None or graphs.creation_index(op) < late or op in early
        # A variable of another device is copied here when it is read.
        is_source = values.fold(op, reads, copies) or (op.type in op_types.SOURCES and here[i])
        values.add(i, op, reads, is_source, is_early)
    if not all(here):
        values.leave_out(here, inputs)
    return OpGraph(
        ops=tuple(ops),
        inputs=tuple(inputs),
        controls=tuple(controls),
        producer=np.array(values.producer, np.int64),
        first_value=np.array(first_value, np.int64),
        storage=np.array(values.storage, np.int64),
        fixed_bytes=np.array(values.fixed, np.int64),
        bytes_per_example=np.array(values.rate, np.int64),
        source=np.array(values.source, np.bool_),
        constant=np.array(values.constant, np.bool_),
        clonable=np.array(clonable, np.bool_),
        optional=np.array([op not in asked for op in ops], np.bool_),
        here=np.array(here, np.bool_),
        conditional=may_be_dead,
    )


class _Values:
    """The properties of each value, added op by op.

    Attributes
    ----------
    producer, storage, fixed, rate, source, constant
        As in `OpGraph`, where ``fixed`` and ``rate`` are the bytes.
    folds_on
        For each value, whether a value computed from it may become a constant.
    folded
        For each value, whether it is known to become a constant.
    """

    def __init__(self) -> None:
        self.producer: list[int] = []
        self.storage: list[int] = []
        self.fixed: list[int] = []
        self.rate: list[int] = []
        self.source: list[bool] = []
        self.constant: list[bool] = []
        self.folds_on: list[bool] = []
        self.folded: list[bool] = []

    def maker(self, value: int) -> int:
        """Return the op (position) whose buffer a value uses."""
        return self.producer[self.storage[value]]

    def fold(self, op: tf.Operation, reads: tuple[int, ...], copies: bool) -> bool:
        """Note which outputs of ``op`` may become constants, and return whether they all do."""
        # Stateless random draws with a constant seed are folded like everything else.
        is_constant = op.type == "Const"
        is_shape = op.type in op_types.SHAPES and bool(reads)
        static = is_shape and op_types.reads_known_shapes(op)
        may_fold = copies and all(self.folds_on[v] for v in reads) and _is_small(op.outputs)
        is_folded = is_constant or static or (may_fold and all(self.folded[v] for v in reads))
        may_fold |= is_constant or is_shape
        many = len(op.outputs)
        self.constant += [may_fold] * many
        self.folds_on += [may_fold and _folds_on(op)] * many
        self.folded += [is_folded] * many
        return is_folded

    def add(
        self, position: int, op: tf.Operation, reads: tuple[int, ...], is_source: bool, early: bool
    ) -> None:
        """Give each output of ``op`` its own buffer, or the buffer of the input that it views."""
        looks = reads and (early or op.type in op_types.VIEWS)
        for k, out in enumerate(op.outputs):
            viewed = viewed_input(op, k) if looks else None
            if viewed is not None:
                root = self.storage[reads[viewed]]
                size, outside = Bytes(0, 0), self.source[root]
            else:
                root = len(self.producer)
                size, outside = self._bytes(op, out, reads), is_source
            self.producer.append(position)
            self.storage.append(root)
            self.fixed.append(0 if outside else size.fixed)
            self.rate.append(0 if outside else size.per_example)
            self.source.append(outside)

    def _bytes(self, op: tf.Operation, out: tf.Tensor, reads: tuple[int, ...]) -> Bytes:
        size = buffer_bytes(out)
        if op.type in op_types.ELEMENTS or is_elsewhere(op):
            size = Bytes(0, 0)
        if op.type in op_types.SIZED_BY_INPUTS and is_guess(out):
            known = [Bytes(self.fixed[self.storage[v]], self.rate[self.storage[v]]) for v in reads]
            size = max(known, key=sum) if any(map(any, known)) else size
        return size

    def leave_out(self, here: Sequence[bool], inputs: Sequence[tuple[int, ...]]) -> None:
        """Count no bytes for values that are neither made nor read here."""
        touched = {self.storage[v] for i, read in enumerate(inputs) if here[i] for v in read}
        for value, i in enumerate(self.producer):
            if here[i]:
                touched.add(self.storage[value])
        for value in range(len(self.producer)):
            if value not in touched:
                self.fixed[value] = self.rate[value] = 0


def _assigned(ops: Sequence[tf.Operation]) -> frozenset[tf.Operation]:
    """Return the reference variables that one of ``ops`` assigns."""
    if not any(op.type in op_types.REFERENCE_VARIABLES for op in ops):
        return frozenset()
    return frozenset(variable for op in ops for variable in op_types.assigned_references(op))


def _is_small(outputs: Sequence[tf.Tensor]) -> bool:
    return all(tensor_bytes(out).fixed <= LARGEST_FOLDED for out in outputs)


def _folds_on(op: tf.Operation) -> bool:
    """Return whether values computed from the constants that ``op`` makes are known to fold;
    whether a session folds them is not known yet."""
    made = max(tensor_bytes(out).fixed for out in op.outputs)
    if made <= LARGEST_FOLDED_BY_GRAPPLER or op.type == "Const" or graphs.is_function(op.graph):
        return True
    return made <= sum(tensor_bytes(t).fixed for t in op.inputs)
