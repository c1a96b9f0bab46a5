"""From what a user names to tensors: tensors, operations, names, glob patterns, layer names.

Every item must lead to at least one tensor that can be a checkpoint: in the graph, on a path from xs to ys,
differentiable. A name is that of an op (``"dense/MatMul"``), of a tensor (``"dense/MatMul:0"``) or of a name scope, which
in Keras models is a layer (``"block3_out"``; its output is meant). A pattern with ``*``, ``?`` or ``[`` matches
op names and scopes and takes whatever of its matches can be a checkpoint. Linear in the graph for all items together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import tensorflow as tf

from graph_tools import _tf_autodiff
from memsaving_gradients.errors import SelectionError
from memsaving_gradients.marks import marked

__all__ = ["marks_between", "resolve"]

_WILD = re.compile(r"[*?\[]")
#: Keras makes the scopes of a layer that is called again unique by a suffix.
_AGAIN = re.compile(r"_\d+$")


def resolve(
    graph: tf.Graph,
    first_backward: int,
    spec: Sequence[Any],
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
) -> list[tf.Tensor]:
    """The tensors that ``spec`` names, each once, in its order.

    Parameters
    ----------
    graph
        The graph that gradients are built in.
    first_backward
        Number of ops to look at: those created before the gradients.
    spec
        Tensors, operations, names, patterns.
    ys, xs
        What is differentiated, and with respect to what (variables allowed).

    Raises
    ------
    SelectionError
        For the first item that cannot be used.
    """
    between = _Between(graph, first_backward, ys, xs)
    found: dict[Any, tf.Tensor] = {}
    for item in spec:
        for tensor in _tensors(item, between):
            found[tensor.ref()] = tensor
    return list(found.values())


def marks_between(
    graph: tf.Graph, first_backward: int, ys: Sequence[tf.Tensor], xs: Sequence[Any]
) -> list[tf.Tensor]:
    """The marked tensors that lie between ``xs`` and ``ys`` (others belong to other gradients)."""
    if not (tensors := marked(graph)):
        return []
    between = _Between(graph, first_backward, ys, xs)
    return [t for t in tensors if between.problem(t) is None]


class _Between:
    """What lies between xs and ys, by one sweep down and one up."""

    def __init__(
        self, graph: tf.Graph, first_backward: int, ys: Sequence[tf.Tensor], xs: Sequence[Any]
    ) -> None:
        self.graph = graph
        self.ops = graph.get_operations()[:first_backward]
        self.ends = {y.ref() for y in ys}
        starts = _tf_autodiff.tensors_in(graph, xs)
        self.starts = {x.ref() for x in starts}
        down = {x.op for x in starts}
        for op in self.ops:
            if any(t.op in down for t in op.inputs):
                down.add(op)
        up: set[tf.Operation] = set()
        stack = [y.op for y in ys if y.graph is graph]
        while stack:
            op = stack.pop()
            if op not in up:
                up.add(op)
                stack.extend(t.op for t in op.inputs)
        self.inside = down & up

    def problem(self, tensor: tf.Tensor) -> str | None:
        """Why ``tensor`` cannot be a checkpoint, or ``None``."""
        if tensor.graph is not self.graph:
            return "is of another graph than ys; name a tensor of the graph that is differentiated"
        if tensor.dtype in (tf.resource, tf.variant) or tensor.dtype.is_compatible_with(tf.string):
            return (
                f"has dtype {tensor.dtype.name}: a variable's handle is no checkpoint (variables are never "
                "recomputed); name a tensor computed from it"
            )
        if tensor.ref() in self.ends:
            return "is one of ys: backward begins there, so keeping it saves nothing; name a tensor before it"
        if tensor.ref() in self.starts:
            return "is one of xs and always available; name a tensor computed from it"
        if tensor.op not in self.inside:
            return "does not lie between xs and ys, so that no gradient flows through it"
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return f"has dtype {tensor.dtype.name} and therefore no gradient; name a floating point tensor"
        return None


def _tensors(item: Any, between: _Between) -> list[tf.Tensor]:
    if isinstance(item, str):
        return _by_name(item, between)
    if isinstance(item, tf.Variable) or hasattr(item, "handle"):
        raise SelectionError(
            "checkpoints",
            item,
            "is a variable, which is never recomputed; name a tensor computed from it",
        )
    if isinstance(item, tf.Operation):
        outputs = [t for t in item.outputs if between.problem(t) is None]
        if outputs:
            return outputs
        why = between.problem(item.outputs[0]) if item.outputs else "has no output"
        raise SelectionError("checkpoints", item.name, f"operation {why}")
    if not isinstance(item, tf.Tensor):
        raise SelectionError(
            "checkpoints", item, "is neither a tensor nor an operation nor a name of one"
        )
    if not tf.is_symbolic_tensor(item):
        raise SelectionError(
            "checkpoints",
            item,
            "is an eager tensor, which is in no graph; name a tensor made inside of the tf.function",
        )
    if (why := between.problem(item)) is not None:
        raise SelectionError("checkpoints", item.name, f"tensor {why}")
    return [item]


def _by_name(name: str, between: _Between) -> list[tf.Tensor]:
    operation, _, index = name.partition(":")
    wild = bool(_WILD.search(name))
    exact: list[tf.Tensor] = []
    scopes: dict[str, list[tf.Operation]] = {}
    for op in between.ops:
        if op.name == operation or (wild and fnmatchcase(op.name, operation)):
            outputs = op.outputs[int(index) : int(index) + 1] if index.isdigit() else op.outputs
            exact += outputs
        parts = op.name.split("/")[:-1]
        for depth in range(len(parts)):
            path = "/".join(parts[: depth + 1])
            if _is_scope(operation, path, parts[depth], wild):
                scopes.setdefault(path, []).append(op)
    found = list(exact)
    for path, ops in scopes.items():
        found += _output_of_scope(path, ops, between)
    usable = [t for t in found if between.problem(t) is None]
    if usable:
        return usable
    if found:
        raise SelectionError(
            "checkpoints", name, f"matches {found[0].name!r}, which {between.problem(found[0])}"
        )
    raise SelectionError("checkpoints", name, f"matches nothing{_near(name, between)}")


def _is_scope(pattern: str, path: str, last: str, wild: bool) -> bool:
    names = (path, last, _AGAIN.sub("", path), _AGAIN.sub("", last))
    return any(fnmatchcase(n, pattern) for n in names) if wild else pattern in names


def _output_of_scope(path: str, ops: list[tf.Operation], between: _Between) -> list[tf.Tensor]:
    """The last tensor of a scope that something outside of it reads."""
    inside = set(ops)
    last: tf.Tensor | None = None
    for op in ops:
        for out in op.outputs:
            if between.problem(out) is None and any(r not in inside for r in out.consumers()):
                last = out
    return [last] if last is not None else [t for op in ops[-1:] for t in op.outputs[:1]]


def _near(name: str, between: _Between) -> str:
    known: dict[str, None] = {}
    for op in between.ops:
        known[op.name] = None
        for part in op.name.split("/")[:-1]:
            known[part] = None
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return "; see [op.name for op in graph.get_operations()] for the names there are"
