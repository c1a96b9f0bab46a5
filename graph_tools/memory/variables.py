"""Variables and constants in an executed step: buffers from before it, some replaced or copied.

An assignment makes the buffer of its value the variable's buffer, and releases the old one. An
update in place (``assign_add``, the kernels of TF1's optimizers) copies the variable's buffer first
if an op still uses the value read from it. For example, the gradient with respect to a layer's
input needs the weights. Either way the variable has moved among the transient buffers of the step,
and leaves a hole at its old place.

A variable of which an op reads or changes a part, such as an embedding that ``tf.gather`` reads, is
changed without a copy there. For this, each read of the whole variable copies it from then on, and
each change of the whole makes a new buffer. (``training_ops.cc``, ``training_op_helpers.h``,
``resource_variable_ops.cc``, TensorFlow 2.16 to 2.21.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.memory.bfc_allocator import GRAIN
from graph_tools.ops import op_types
from graph_tools.ops.sizes import tensor_bytes
from graph_tools.tf_private import graphs

__all__ = [
    "Updated",
    "constant_bytes",
    "copied_on_read",
    "copies_read",
    "persistent_bytes",
    "updated_variables",
]


@dataclass(frozen=True, eq=False)
class Updated:
    """A variable that a step updates.

    Attributes
    ----------
    updates
        The ops that update it, each with the storage that it gives to the variable; -1: in place.
    reads
        The ops that read the variable, each with the ops that use the value read. That value is the
        variable's buffer itself.
    number
        The variable's place among the persistent buffers; -1: unknown.
    size
        Its bytes.
    copied
        Whether each read gets a copy, and each update a new buffer (`copied_on_read`).
    """

    updates: Sequence[tuple[int, int]]
    reads: Sequence[tuple[int, Sequence[int]]]
    number: int
    size: int
    copied: bool


def persistent_bytes(ops: OpGraph, batch: int, copied: Collection[int]) -> dict[object, int]:
    """Return the bytes of the variables and fed inputs that a graph reads, by a reference to the
    variable's handle or to the input."""
    found: dict[object, int] = {}
    for op, here in zip(ops.ops, ops.here, strict=True):
        if here and op.type in op_types.SOURCES and op.type != "Const" and op.outputs:
            # Reads of one variable are one buffer.
            owner = op.inputs[0].ref() if op.inputs else op.outputs[0].ref()
            found[owner] = tensor_bytes(op.outputs[0]).at(batch)
    for value in copied:
        handle = ops.tensor(value)
        found[handle.ref()] = graphs.variable_bytes(handle)
    return {owner: size for owner, size in found.items() if size}


def constant_bytes(
    ops: OpGraph, folded: Sequence[bool], one: Mapping[int, int], batch: int
) -> dict[object, int]:
    """Return the bytes of the constants of more than `GRAIN` that ops read in a step, by value.

    They are made when the graph first runs, after variables and inputs, and stay: a folded mask
    takes a place in which a buffer would fit. Smaller constants, of which there are hundreds, fit
    into the holes of a process that has allocated before.

    Parameters
    ----------
    ops
        The graph of a step.
    folded
        For each op, whether it runs before the step.
    one
        For each value that equals another, that other value.
    batch
        The size to assume for an unknown batch dimension.
    """
    return {
        one.get(value, value): size
        for i, values in enumerate(ops.inputs)
        if ops.here[i] and not folded[i]
        for value in values
        if ops.constant[value] and (size := tensor_bytes(ops.tensor(value)).at(batch)) > GRAIN
    }


def copied_on_read(ops: OpGraph) -> set[int]:
    """Return the handles of the variables that a graph reads or changes in part, so that each read
    of the whole copies them."""
    return {
        value
        for i, op in enumerate(ops.ops)
        if op.type in op_types.READS_PARTS and ops.here[i]
        for value in ops.inputs[i]
        if ops.tensor(value).dtype == tf.resource
    }


def copies_read(ops: OpGraph, batch: int, copied: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the values that are copies of variables, with their bytes.

    ``batch``: the size to assume for an unknown batch dimension. ``copied``: the result of
    `copied_on_read`.
    """
    for i, op in enumerate(ops.ops):
        if copied and op.type in op_types.READS and ops.inputs[i][0] in copied:
            yield int(ops.first_value[i]), tensor_bytes(op.outputs[0]).at(batch)


def updated_variables(
    ops: OpGraph,
    reads: Sequence[Sequence[int]],
    storage: Sequence[int],
    persistent: Mapping[object, int],
    copied: Collection[int],
) -> list[Updated]:
    """Return the variables that a graph updates.

    Parameters
    ----------
    ops
        The graph of a step.
    reads, storage
        The values that each op reads, and the value whose buffer each value uses, in the executor.
    persistent
        The bytes of persistent buffers, the variables as `persistent_bytes` returns them.
    copied
        The result of `copied_on_read`.
    """
    updates: dict[int, list[tuple[int, int]]] = {}
    for i, op in enumerate(ops.ops):
        # A change of a part makes no buffer.
        if not ops.here[i] or op.type in op_types.READS_PARTS:
            continue
        if op.type in op_types.ASSIGNS:
            updates.setdefault(ops.inputs[i][0], []).append((i, storage[ops.inputs[i][-1]]))
        elif op.type in op_types.UPDATES_IN_PLACE:
            updates.setdefault(ops.inputs[i][0], []).append((i, -1))
    if not updates:
        return []
    first = ops.first_value.tolist()
    users: dict[int, list[int]] = {}
    of_variable: dict[int, list[int]] = {handle: [] for handle in updates}
    for i, op in enumerate(ops.ops):
        if op.type in op_types.READS and ops.inputs[i][0] in of_variable:
            of_variable[ops.inputs[i][0]].append(i)
            users[first[i]] = []
    for i, values in enumerate(reads):
        for value in values:
            if storage[value] in users:
                users[storage[value]].append(i)
    numbers = {owner: k for k, owner in enumerate(persistent)}
    found = []
    for handle, readers in of_variable.items():
        owner = ops.tensor(handle).ref()
        found.append(
            Updated(
                updates[handle],
                [(i, users[first[i]]) for i in readers],
                numbers.get(owner, -1),
                persistent.get(owner, 0),
                handle in copied,
            )
        )
    return found
