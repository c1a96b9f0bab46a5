"""Moving ops of a graph into one branch of a conditional.

XLA ignores control edges and merges equal ops anywhere in a computation. The branches of a
conditional are computations of their own. XLA neither merges nor moves ops across their borders,
orders their ops by themselves, and reuses their scratch memory for later ops. The predicate is
false, which no compiler can prove (`graph_tools.editing.opaque`), and the branch that never runs
returns zeros. A conditional only points to its inputs: nothing is copied.

The moved ops stay in the graph, but nothing reads them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graph_tools.ops import op_types
from graph_tools.tf_private import graphs, loops
from graph_tools.xla import convolutions

__all__ = ["can_enclose", "enclose"]


def can_enclose(op: tf.Operation) -> bool:
    """Return whether ``op`` may run in a branch: it is stateless, uses no variable's handle, is no
    input of the function, and XLA has fast code for it there."""
    if op.type in op_types.SOURCES - {"Const"}:
        return False
    if op_types.is_stateful(op) or (_on_cpu() and convolutions.is_slow(op)):
        return False
    return all(
        t.dtype == t.dtype.base_dtype and t.dtype != tf.resource for t in (*op.inputs, *op.outputs)
    )


def enclose(
    ops: Sequence[tf.Operation],
    results: Sequence[tf.Tensor],
    never: tf.Tensor,
    *,
    stands: Mapping[object, tf.Tensor],
    is_constant: Callable[[tf.Tensor], bool],
    name: str,
) -> list[tf.Tensor]:
    """Copy ``ops`` into a conditional, and return its outputs, which replace ``results``.

    Parameters
    ----------
    ops
        Ops of one graph, in topological order; `can_enclose` is true for each.
    results
        The outputs of ``ops`` that other ops read.
    never
        A boolean that is false (`graph_tools.editing.opaque.never`).
    stands
        For references of tensors, the tensors that the conditional reads instead.
    is_constant
        Returns whether a tensor depends on constants and shapes alone. A compiler may need its
        value, so each conditional computes it for itself.
    name
        The name of the conditional's function.
    """
    order = list(_with_constants(ops, is_constant))
    made = {t.ref() for op in order for t in op.outputs}
    read = dict.fromkeys(
        t.ref() for op in order if not _is_known(op) for t in op.inputs if t.ref() not in made
    )
    captured = [reference.deref() for reference in read]

    def inside(*args: tf.Tensor) -> list[tf.Tensor]:
        values = dict(zip(read, args, strict=True))
        for op in order:
            if _is_known(op):
                copies: Sequence[tf.Tensor] = _known(op)
            else:
                copies = _copies(op, [values[t.ref()] for t in op.inputs])
            values.update(zip((t.ref() for t in op.outputs), copies, strict=True))
        return [values[t.ref()] for t in results]

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in captured]
    body = _traced(inside, specs, name)
    known = all(t.shape.is_fully_defined() for t in results)

    def zeros(*args: tf.Tensor) -> list[tf.Tensor]:
        if known:
            return [tf.zeros(t.shape, t.dtype) for t in results]
        # XLA knows all shapes, and computes no values to get them.
        return [tf.zeros_like(t) for t in body(*args)]

    return graphs.conditional_on(
        never,
        [stands.get(t.ref(), t) for t in captured],
        _traced(zeros, specs, name + "_other"),
        body,
        results,
    )


def _copies(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    if _on_cpu():
        fast = convolutions.fast_copy(op, inputs)
        if fast is not None:
            return [fast]
    return loops.copy_op(op, inputs).outputs


def _on_cpu() -> bool:
    return not tf.config.list_logical_devices("GPU")


def _traced(function: Callable[..., Any], specs: Sequence[tf.TensorSpec], name: str) -> Any:
    function.__name__ = name
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _with_constants(
    ops: Sequence[tf.Operation], is_constant: Callable[[tf.Tensor], bool]
) -> Iterator[tf.Operation]:
    """Yield ``ops``, and before each one the ops that compute the constants that it reads."""
    own, seen = set(ops), set[tf.Operation]()
    for op in ops:
        stack = [op]
        while stack:
            top = stack[-1]
            waiting = [
                t.op
                for t in top.inputs
                if t.op not in seen and t.op not in own and is_constant(t) and can_enclose(t.op)
            ]
            if waiting and not _is_known(top):
                stack += waiting
                continue
            stack.pop()
            if top not in seen:
                seen.add(top)
                yield top


def _is_known(op: tf.Operation) -> bool:
    return op.type in op_types.SHAPES and op_types.reads_known_shapes(op)


def _known(op: tf.Operation) -> list[tf.Tensor]:
    """Return the results of an op that reads known shapes, as constants."""
    made = []
    for out, read in zip(op.outputs, op.inputs, strict=True):
        value: Any = read.shape.as_list()
        if op.type == "Size":
            value = read.shape.num_elements()
        elif op.type == "Rank":
            value = read.shape.rank
        made.append(tf.constant(value, out.dtype))
    return made
