"""Attention in blocks in the place of plain attention, in a graph that TensorFlow differentiates.

Before differentiation, `prepare` builds the forward pass in blocks next to the plain one; nothing
reads it yet. TensorFlow then differentiates the plain attention, which is all that a tape has
recorded. Afterwards `substitute` points the readers of the plain output, and of its gradients for
queries, keys and values, to the results of the blocks. Like every edit, this is undone while
TensorFlow differentiates the graph once more.

The pattern does not show whether anything else still needs the scores. So `substitute` looks at all
ancestors of gradients and ys after the exchange: none of them may hold a number for each pair. The
cost is linear in the size of the graph, at most once for each attention that stays plain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
from graph_tools.graph.topology import Edges, ancestors
from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.tf_private import graphs
from memsaving_gradients.transforms.attention.online_softmax import backward, forward
from memsaving_gradients.transforms.attention.pattern import graph_scores
from memsaving_gradients.transforms.attention.pattern.elementwise import Unclear
from memsaving_gradients.transforms.attention.pattern.matching import (
    Found,
    Gradient,
    found_in,
    gradient_of,
    is_attention_like,
)
from memsaving_gradients.transforms.attention.pattern.products import Axes
from memsaving_gradients.transforms.attention.pattern.reachability import Exchanged

__all__ = ["Prepared", "Substituted", "prepare", "substitute"]

_SCOPE = "attention_in_blocks"


@dataclass(frozen=True, eq=False)
class _Built:
    """An attention with its forward pass in blocks.

    Attributes
    ----------
    found
        The plain attention.
    inputs
        Queries, keys and values, ``[..., positions, width]``.
    result, kept
        The result of the forward pass, and the numbers that it keeps for each query.
    output
        The result, with the axes of the plain output.
    shape
        The shape of the scores.
    """

    found: Found
    inputs: tuple[tf.Tensor, ...]
    result: tf.Tensor
    kept: list[tf.Tensor]
    output: tf.Tensor
    shape: tf.Tensor

    @property
    def shapes(self) -> list[tf.Tensor]:
        """The shapes of scores or weights that the graph reads."""
        return [
            reader.outputs[0]
            for op in self.found.ops[:-1]
            for reader in op.outputs[0].consumers()
            if reader.type == "Shape"
        ]


@dataclass(eq=False)
class _Known:
    """The attentions of a graph that were built for earlier gradients."""

    built: dict[str, _Built] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Attentions with a forward pass in blocks next to the plain one.

    Attributes
    ----------
    built
        The attentions, by name of the softmax.
    refused
        Why other attentions stay as they are, by name of the softmax.
    ops
        The ops that were added for them.
    """

    built: dict[str, _Built] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ops: list[tf.Operation] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Substituted:
    """The result of a substitution.

    Attributes
    ----------
    names
        The name of the softmax of each attention that is computed in blocks.
    refused
        Why other attentions stay as they are, by name of the softmax.
    rewiring
        The edits.
    idle
        Ops that nothing needs any more.
    gradients
        The new gradient for each plain gradient (reference of a tensor).
    outputs
        The new output for each plain output.
    """

    names: tuple[str, ...]
    refused: dict[str, str]
    rewiring: Rewiring
    idle: frozenset[tf.Operation]
    gradients: dict[Any, tf.Tensor]
    outputs: dict[Any, tf.Tensor]


def prepare(graph: tf.Graph, ys: Sequence[tf.Tensor], idle: Collection[int]) -> Prepared:
    """Find attention among the ancestors of ``ys``, and build its forward pass in blocks.

    Parameters
    ----------
    idle
        Creation indices of ops that are known to have no use.
    """
    known = notes(graph, _Known).built
    prepared = Prepared(dict(known))
    since = len(graph.get_operations())
    needed = ancestors([y.op for y in ys if y.graph is graph], Edges())
    softmaxes = [op for op in needed if op.type == "Softmax" and op.name not in known]
    for softmax in sorted(softmaxes, key=graphs.creation_index):
        try:
            found = found_in(softmax)
            _check_readers(found, idle)
        except Unclear as reason:
            if is_attention_like(softmax):
                prepared.refused[softmax.name] = str(reason)
            continue
        with _scope(graph):
            prepared.built[softmax.name] = _forward(found)
    prepared.ops.extend(graph.get_operations()[since:])
    notes(graph, _Known).built = dict(prepared.built)
    return prepared


@contextmanager
def _scope(graph: tf.Graph) -> Iterator[None]:
    """Build ops in a scope of their own, which no tape records."""
    with graphs.outside_scopes(graph), graphs.unrecorded(), tf.name_scope(_SCOPE):
        yield


def _check_readers(found: Found, idle: Collection[int]) -> None:
    """Raise if the forward pass reads scores or weights for another purpose."""
    own = {*found.ops, *found.between.ops}
    for op in found.ops[:-1]:
        for tensor in op.outputs:
            for reader in tensor.consumers():
                if reader in own or reader.type in op_types.SHAPE_READERS:
                    continue
                if graphs.creation_index(reader) not in idle:
                    raise Unclear(f"{reader.name!r} ({reader.type}) also reads {tensor.name!r}")


def _forward(found: Found) -> _Built:
    named = (found.query, found.key, found.value)
    inputs = [_transposed(x, axes, to) for (x, axes), to in zip(named, found.orders, strict=True)]
    if found.broadcasts and not _same_lead(inputs):
        shape = tf.broadcast_dynamic_shape(*(tf.shape(x)[:-2] for x in inputs[:2]))
        inputs = [_broadcast(x, shape, found.between.product) for x in inputs]
    result, kept = forward(partial(graph_scores.attention, found.between), inputs)
    output = _transposed(result, found.output_order, found.output[1])
    output = tf.cast(output, found.output[0].dtype)
    output.set_shape(found.output[0].shape)
    shape = tf.concat([tf.shape(inputs[0])[:-1], tf.shape(inputs[1])[-2:-1]], 0)
    return _Built(found, tuple(inputs), result, kept, output, shape)


def _transposed(x: tf.Tensor, axes: Axes, to: Axes) -> tf.Tensor:
    """Return ``x`` with its axes in another order."""
    return x if axes == to else tf.transpose(x, [axes.index(axis) for axis in to])


def _same_lead(inputs: Sequence[tf.Tensor]) -> bool:
    shapes = [x.shape[:-2].as_list() for x in inputs]
    return None not in shapes[0] and all(shape == shapes[0] for shape in shapes)


def _broadcast(x: tf.Tensor, lead: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    longer = tf.broadcast_to(x, tf.concat([lead, tf.shape(x)[-2:]], 0))
    longer.set_shape([*like.shape.as_list()[:-2], *x.shape.as_list()[-2:]])
    return longer


def substitute(
    prepared: Prepared,
    first_backward: int,
    targets: Sequence[tf.Tensor],
    ys: Sequence[tf.Tensor],
    named: Sequence[tf.Tensor],
) -> Substituted:
    """Replace each attention of which the graph then needs only the output and the gradients.

    Parameters
    ----------
    prepared
        The result of `prepare`.
    first_backward
        How many ops the graph had before it was differentiated.
    targets
        The gradients.
    ys
        The tensors that were differentiated.
    named
        Tensors that the user wants kept.
    """
    edges = Edges()
    before = ancestors([t.op for t in (*targets, *ys)], edges)
    refused = dict(prepared.refused)
    found = _gradients(prepared, first_backward, before, ys, refused)
    outputs = {_output(built).ref(): built.output for built in prepared.built.values()}
    wanted = [*ys, *(t for t in named if t.ref() not in outputs)]
    while True:
        replaced = _replaced(prepared, found)
        made = [new for t in targets for new in replaced.get(t.ref(), (t,))]
        after = ancestors([t.op for t in (*made, *wanted)], Exchanged(edges, replaced))
        answers = {
            name: _still_needed(prepared.built[name].found, gradient, after, replaced)
            for name, gradient in found.items()
        }
        held = {name: why for name, why in answers.items() if why}
        if not held:
            break
        refused |= held
        found = {name: gradient for name, gradient in found.items() if name not in held}
    rewiring = Rewiring()
    gradients: dict[Any, tf.Tensor] = {}
    try:
        for name, gradient in found.items():
            gradients |= _exchange(prepared.built[name], gradient, rewiring)
    except BaseException:
        rewiring.undo()
        raise
    idle = frozenset(before.union(prepared.ops) - after)
    outputs = {ref: new for ref, new in outputs.items() if ref in replaced}
    return Substituted(tuple(found), refused, rewiring, idle, gradients, outputs)


def _gradients(
    prepared: Prepared,
    first_backward: int,
    needed: Collection[tf.Operation],
    ys: Sequence[tf.Tensor],
    refused: dict[str, str],
) -> dict[str, Gradient]:
    """Return the gradient of each ``needed`` attention; add to ``refused`` why others have none."""

    def readers(tensor: tf.Tensor) -> list[tf.Operation]:
        found = (op for op in tensor.consumers() if op in needed)
        return [op for op in found if graphs.creation_index(op) >= first_backward]

    gradients: dict[str, Gradient] = {}
    for name, built in prepared.built.items():
        if built.found.softmax not in needed:
            continue
        try:
            _check_order(built.found, first_backward, ys)
            gradients[name] = gradient_of(built.found, readers)
        except Unclear as reason:
            refused[name] = str(reason)
    return gradients


def _check_order(found: Found, first_backward: int, ys: Sequence[tf.Tensor]) -> None:
    """Raise if ``ys`` depend on scores or weights in another way, as after an earlier gradient.

    Then the gradients for scores are sums, and the pattern is only one of the terms. (`prepare`
    ignores readers that have no use until ``ys`` need them.)
    """
    own = {*found.ops, *found.between.ops}
    others = {
        reader
        for op in found.ops[:-1]
        for reader in op.outputs[0].consumers()
        if reader not in own
        and reader.type not in op_types.SHAPE_READERS
        and graphs.creation_index(reader) < first_backward
    }
    if not others:
        return
    with original_view.as_built(found.softmax.graph):
        plain = ancestors([y.op for y in ys], Edges())
    if not others.isdisjoint(plain):
        raise Unclear("its gradient is differentiated again")


def _output(built: _Built) -> tf.Tensor:
    return built.found.output[0]


def _replaced(
    prepared: Prepared, found: Mapping[str, Gradient]
) -> dict[Any, tuple[tf.Tensor, ...]]:
    """Return, for each tensor that is replaced, the tensors that its replacement reads."""
    replaced: dict[Any, tuple[tf.Tensor, ...]] = {}
    for name, gradient in found.items():
        built = prepared.built[name]
        replaced[_output(built).ref()] = (built.output,)
        replaced |= {tensor.ref(): (built.shape,) for tensor in built.shapes}
        upstream = () if gradient.upstream is None else (gradient.upstream,)
        for tensor, _ in (*gradient.of_query, *gradient.of_key, *gradient.of_value):
            replaced[tensor.ref()] = (built.output, *upstream)
    return replaced


def _still_needed(
    found: Found,
    gradient: Gradient,
    after: Collection[tf.Operation],
    replaced: Mapping[Any, Any],
) -> str | None:
    """Return which op still needs the scores, or ``None``."""
    own = {*found.ops, *gradient.ops}
    for op in found.ops:
        for tensor in op.outputs if op in after else ():
            for reader in tensor.consumers() if tensor.ref() not in replaced else ():
                if reader in after and reader not in own:
                    return f"{reader.name!r} ({reader.type}) also needs {tensor.name!r}"
    if any(op in after for op in gradient.ops):
        return (
            "its scores have a gradient in addition to those of queries and keys (a bias or scale "
            "that is trained, keys or values that are shared?)"
        )
    if any(op in after for op in found.ops):
        return "its scores, weights or output are asked for directly"
    return None


def _exchange(built: _Built, gradient: Gradient, rewiring: Rewiring) -> dict[Any, tf.Tensor]:
    found = built.found
    graph = found.softmax.graph
    _repoint(found.output[0], built.output, rewiring)
    inside = {*found.ops, *found.between.ops}
    rewiring.forbid_feeding(out for op in inside for out in op.outputs)
    with _scope(graph):
        for tensor in built.shapes:
            _repoint(tensor, tf.cast(built.shape, tensor.dtype), rewiring)
    if gradient.upstream is None:
        return {}
    plain = (gradient.of_query, gradient.of_key, gradient.of_value)
    with _scope(graph):
        upstream = _transposed(gradient.upstream, found.output[1], found.output_order)
        # Its static shape may be less complete than the output's.
        upstream.set_shape(built.result.shape)
        formula = partial(graph_scores.attention, found.between)
        wanted = [bool(ends) for ends in plain]
        made = backward(formula, built.inputs, (), built.result, built.kept, upstream, wanted)
        replaced = []
        for tensor, order, ends in zip(made, found.orders, plain, strict=True):
            for old, axes in ends:
                new = tf.cast(_transposed(tensor, order, axes), old.dtype)
                new.set_shape(old.shape)
                replaced.append((old, new))
    for old, new in replaced:
        _repoint(old, new, rewiring)
    return {old.ref(): new for old, new in replaced}


def _repoint(old: tf.Tensor, new: tf.Tensor, rewiring: Rewiring) -> None:
    rewiring.point_readers(old, new)
    rewiring.forbid_feeding([old])
