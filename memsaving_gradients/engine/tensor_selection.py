"""The tensors that a user selects by tensor, operation, name, glob pattern or layer name.

Every item must select at least one tensor that can be a checkpoint: a tensor of the graph, on a
path of gradients from ys to xs. A name may belong to a tensor (``"dense/MatMul:0"``), to an op
(``"dense/MatMul"``), or to a name scope, which in Keras models is a layer. An op or scope selects
its outputs. A name may omit outer scopes (``"block3_out"`` for ``"resnet/block3_out"``); then a
layer goes before a scope and a scope before an op. A pattern with ``*``, ``?`` or ``[`` matches in
the same way, name by name between slashes; if nothing matches, it may cross slashes. A pattern
selects only matches that can be checkpoints.

Linear in the graph for all plain names together; every pattern reads all names once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import cached_property
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.tf_private import autodiff
from memsaving_gradients.engine.marks import marked
from memsaving_gradients.errors import SelectionError

__all__ = ["marks_between", "resolve"]

_WILD = re.compile(r"[*?\[]")
_NUMBERED = re.compile(r"(.+)_\d+")


def resolve(
    graph: tf.Graph,
    first_backward: int,
    spec: Sequence[Any],
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    *,
    skipped: dict[int, SelectionError] | None = None,
) -> list[tf.Tensor]:
    """Return the tensors that ``spec`` names, each once, in its order.

    Parameters
    ----------
    graph
        The graph that gradients are built in.
    first_backward
        Number of ops to look at: those created before the gradients.
    spec
        Tensors, operations, names, patterns.
    ys, xs
        The targets and the sources of differentiation (variables allowed).
    skipped
        For lists that serve several gradient computations. If given, the error for an item that is
        in the graph but cannot be a checkpoint here is noted by its position. It is raised only if
        no other item can be one.

    Raises
    ------
    SelectionError
        For the first item that cannot be used.
    """
    with original_view.as_built(graph):
        between = _Between(graph, ys, xs)
        names = _Names(graph.get_operations()[:first_backward], between.inside)
        found: dict[Any, tf.Tensor] = {}
        failed: dict[int, SelectionError] = {}
        for position, item in enumerate(spec):
            candidates = _candidates(item, graph, names)
            tensors = [t for t in candidates if between.problem(t) is None]
            if not tensors:
                failed[position] = _unusable(item, candidates, names, between)
                # An item that is nowhere in the graph is a mistake in any case.
                if skipped is None or not candidates:
                    raise failed[position]
            found.update((t.ref(), t) for t in tensors)
    if failed and not found:
        raise next(iter(failed.values()))
    if skipped is not None:
        skipped.update(failed)
    return list(found.values())


def marks_between(graph: tf.Graph, ys: Sequence[tf.Tensor], xs: Sequence[Any]) -> list[tf.Tensor]:
    """Return the marked tensors between ``xs`` and ``ys`` (others belong to other gradients)."""
    if not (tensors := marked(graph)):
        return []
    with original_view.as_built(graph):
        between = _Between(graph, ys, xs)
        return [t for t in tensors if between.problem(t) is None]


class _Between:
    """The part of a graph between xs and ys. ``inside``: the ops through which a gradient flows
    from ys to xs."""

    def __init__(self, graph: tf.Graph, ys: Sequence[tf.Tensor], xs: Sequence[Any]) -> None:
        self.graph, self.ys = graph, ys
        self.ends = {y.ref() for y in self.ys}
        self.xs = autodiff.tensors_in(graph, xs)
        self.starts = {x.ref() for x in self.xs}
        self.inside = self._reached_from_xs(differentiably=True)

    @cached_property
    def connected(self) -> set[tf.Operation]:
        """Ops between xs and ys by any path, differentiable or not."""
        return self._reached_from_xs(differentiably=False)

    def _reached_from_xs(self, *, differentiably: bool) -> set[tf.Operation]:
        """Return the ops that ys need and that need xs."""
        reached = {x.op for x in self.xs}
        above: dict[tf.Operation, Sequence[tf.Tensor]] = {}
        stack = [(y.op, False) for y in self.ys]
        while stack:
            op, done = stack.pop()
            if done:
                if any(t.op in reached for t in above[op]):
                    reached.add(op)
            elif op not in above:
                above[op] = _read(op, differentiably)
                stack.append((op, True))
                stack += [(t.op, False) for t in above[op] if t.op not in above]
        return reached & above.keys()

    def problem(self, tensor: tf.Tensor) -> str | None:
        """Return why ``tensor`` cannot be a checkpoint, or ``None``."""
        if tensor.graph is not self.graph:
            return (
                "belongs to another graph than ys; name a tensor of the graph that is"
                " differentiated"
            )
        if tensor.dtype.base_dtype in (tf.resource, tf.variant, tf.string):
            return (
                f"has dtype {tensor.dtype.name}: a variable's handle cannot be a checkpoint"
                " (variables are never recomputed); name a tensor computed from it"
            )
        if tensor.dtype != tensor.dtype.base_dtype:
            return "is a variable, which is never recomputed; name a tensor computed from it"
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return (
                f"has dtype {tensor.dtype.name} and therefore no gradient; name a floating point"
                " tensor"
            )
        read = tensor.op in self.inside and any(r in self.inside for r in tensor.consumers())
        if tensor.ref() in self.starts and not tensor.op.inputs:
            return "is one of xs and always available; name a tensor computed from it"
        if read:
            return None
        if tensor.ref() in self.ends:
            return (
                "is one of ys: the backward pass begins there, so keeping it saves nothing; name a"
                " tensor before it"
            )
        if tensor.op in self.connected:
            return (
                "has no gradient: between it and xs or ys there are only ops that are not"
                " differentiable, such as stop_gradient; name a tensor on the differentiable path"
            )
        return "is not between xs and ys; name a tensor that ys need and that is computed from xs"


def _read(op: tf.Operation, differentiably: bool) -> Sequence[tf.Tensor]:
    """Return the inputs of an op, or only those into which its gradient flows."""
    if not differentiably:
        return tuple(op.inputs)
    inputs = [t for t in op.inputs if _has_gradient(t.dtype)]
    return inputs if inputs and autodiff.passes_gradient(op) else ()


def _has_gradient(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_complex or dtype in (tf.resource, tf.variant)


class _Names:
    """Tables of ops and scopes by name, each built when it is first used."""

    def __init__(self, ops: Sequence[tf.Operation], inside: set[tf.Operation]) -> None:
        self.ops = ops
        self.inside = inside

    @cached_property
    def by_name(self) -> dict[str, tf.Operation]:
        return {op.name: op for op in self.ops}

    @cached_property
    def scopes(self) -> dict[str, list[tf.Operation]]:
        """The ops of each scope, with those of inner scopes and the op of the same name, if any.

        (Python functions such as ``tf.split`` make an op, and a scope of the same name for the
        op's constants.)
        """
        scopes: dict[str, list[tf.Operation]] = {}
        for op in self.ops:
            end = op.name.find("/")
            while end > 0:
                scopes.setdefault(op.name[:end], []).append(op)
                end = op.name.find("/", end + 1)
        for scope, ops in scopes.items():
            if (op := self.by_name.get(scope)) is not None:
                ops.append(op)
        return scopes

    @cached_property
    def layers(self) -> dict[str, str]:
        """For each scope, the name that its author gave it, as far as that can be found out.

        Keras enters the scope of a layer once before it is called. So the ops of layer ``dense``
        are in ``dense_1`` (and ``dense_3``, if it is called again), the ops of ``dense_1`` in
        ``dense_1_1``. A number is therefore Keras's if the scope without the number has no ops, or
        if that scope's own number is Keras's.
        """
        layers: dict[str, str] = {}

        def is_numbered(path: str) -> bool:
            base = _NUMBERED.fullmatch(path)
            return base is not None and (base[1] not in self.scopes or is_numbered(base[1]))

        for path in self.scopes:
            parent, _, last = path.rpartition("/")
            base = _NUMBERED.fullmatch(last)
            name = base[1] if base is not None and is_numbered(path) else last
            layers[path] = f"{layers[parent]}/{name}" if parent else name
        return layers

    @cached_property
    def by_last(self) -> dict[str, list[tuple[str, str]]]:
        """Pairs ``(layer path, scope)`` by the last part of the layer path."""
        table: dict[str, list[tuple[str, str]]] = {}
        for scope, layer in self.layers.items():
            table.setdefault(layer.rpartition("/")[2], []).append((layer, scope))
        return table

    @cached_property
    def by_last_as_is(self) -> dict[str, list[tuple[str, str]]]:
        table: dict[str, list[tuple[str, str]]] = {}
        for scope in self.scopes:
            table.setdefault(scope.rpartition("/")[2], []).append((scope, scope))
        return table

    @cached_property
    def by_last_op(self) -> dict[str, list[tf.Operation]]:
        table: dict[str, list[tf.Operation]] = {}
        for op in self.ops:
            table.setdefault(op.name.rpartition("/")[2], []).append(op)
        return table

    def exactly(self, name: str) -> list[tf.Tensor]:
        """Return the tensors of the op, tensor, layer or scope with this name."""
        operation, colon, index = name.partition(":")
        if (op := self.by_name.get(operation)) is not None:
            return _outputs(op, index) if colon else list(op.outputs)
        for table in (self.by_last, self.by_last_as_is):
            matches = [
                scope
                for path, scope in table.get(name.rpartition("/")[2], ())
                if path == name or path.endswith("/" + name)
            ]
            if matches:
                return self._outputs_of(matches)
        ops = self.by_last_op.get(operation.rpartition("/")[2], ())
        matching = [op for op in ops if op.name.endswith("/" + operation)]
        return [t for op in matching for t in (_outputs(op, index) if colon else op.outputs)]

    def like(self, pattern: str) -> list[tf.Tensor]:
        """Return the tensors of the ops, layers and scopes that match a pattern."""
        operation, colon, index = pattern.partition(":")
        parts = [re.compile(translate(part)) for part in operation.split("/")]

        def fits(path: str) -> bool:
            last = path.split("/")[-len(parts) :]
            return len(last) == len(parts) and all(
                part.match(name) for part, name in zip(parts, last, strict=True)
            )

        matches = [op for op in self.ops if fits(op.name)]
        scopes: list[str] = []
        if not colon:
            scopes = [scope for scope, layer in self.layers.items() if fits(layer)]
            scopes = scopes or [scope for scope in self.scopes if fits(scope)]
        if not matches and not scopes:
            across = re.compile(translate(operation))
            matches = [op for op in self.ops if across.match(op.name)]
        found = [t for op in matches for t in (_outputs(op, index) if colon else op.outputs)]
        return found + self._outputs_of(scopes)

    def _outputs_of(self, scopes: Iterable[str]) -> list[tf.Tensor]:
        """Return the tensors that are made in a scope and read outside of it, between xs and ys."""
        found = []
        for scope in scopes:
            ops = self.scopes[scope]
            own = set(ops)
            outputs = [
                out
                for op in ops
                if op in self.inside
                for out in op.outputs
                if any(r in self.inside and r not in own for r in out.consumers())
            ]
            # If there are none, the outputs of the last op, for the error message.
            found += outputs or [out for op in ops[-1:] for out in op.outputs]
        return found

    def near(self, name: str) -> list[str]:
        """Return known names that look like an unknown one."""
        known = dict.fromkeys(layer.rpartition("/")[2] for layer in self.layers.values())
        known |= dict.fromkeys(self.by_last_op) | dict.fromkeys(self.by_name)
        return difflib.get_close_matches(name, known, n=3, cutoff=0.5)


def _outputs(op: tf.Operation, index: str) -> list[tf.Tensor]:
    return list(op.outputs[int(index) : int(index) + 1]) if index.isdecimal() else []


def _candidates(item: Any, graph: tf.Graph, names: _Names) -> list[tf.Tensor]:
    """Return the tensors that an item means, whether they can be checkpoints or not."""
    if isinstance(item, str):
        return names.exactly(item) or (names.like(item) if _WILD.search(item) else [])
    if isinstance(item, tf.Variable) or hasattr(item, "handle"):
        raise SelectionError(
            "checkpoints",
            item,
            "is a variable, which is never recomputed; name a tensor computed from it",
        )
    if isinstance(item, tf.Operation):
        if not item.outputs:
            raise SelectionError("checkpoints", item.name, "is an operation without outputs")
        return list(item.outputs)
    if not isinstance(item, tf.Tensor):
        raise SelectionError(
            "checkpoints",
            item,
            "is neither a tensor nor an operation nor a name of one (for a Keras layer, give its"
            " name)",
        )
    if not tf.is_symbolic_tensor(item):
        raise SelectionError(
            "checkpoints",
            item,
            "is an eager tensor, which is in no graph; name a tensor made inside of the"
            " tf.function",
        )
    if item.graph is not graph:
        raise SelectionError(
            "checkpoints",
            item.name,
            "belongs to another graph than ys; name a tensor of the graph that is differentiated",
        )
    return [item]


def _unusable(
    item: Any, candidates: list[tf.Tensor], names: _Names, between: _Between
) -> SelectionError:
    shown = item if isinstance(item, str) else item.name
    if candidates:
        tensor = candidates[-1]
        what = "" if tensor.name == shown else f"means {tensor.name!r}, which "
        return SelectionError("checkpoints", shown, f"{what}{between.problem(tensor)}")
    close = names.near(item)
    hint = (
        f"did you mean {' or '.join(map(repr, close))}?"
        if close
        else "list the names with [op.name for op in graph.get_operations()]"
    )
    return SelectionError("checkpoints", shown, f"matches nothing in the graph; {hint}")
