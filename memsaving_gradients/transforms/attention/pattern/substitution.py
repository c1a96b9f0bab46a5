"""Attention in blocks in the place of plain attention, forward and backward, in a graph that TensorFlow differentiates as it stands.

Before differentiation the forward pass in blocks is built beside the plain one, and read by nobody. Then TensorFlow differentiates the
plain one; a tape has recorded nothing else anyway. Then readers of the plain output, and of its gradients for queries, keys and values,
get the ones of the blocks instead. That is an edit like any other: while somebody differentiates once more, the graph is the plain one
again.

Whether nothing needs the scores any more is not concluded from the pattern but seen: of all that gradients and ys need after the
exchange, none may hold a number for each pair. Linear in the size of the graph, once for each attention that is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import Rewiring
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
from memsaving_gradients.transforms.attention.pattern.reachability import Needs

__all__ = ["Prepared", "Substituted", "prepare", "substitute"]

_SCOPE = "attention_in_blocks"


@dataclass(frozen=True, eq=False)
class _Built:
    """An attention with its forward pass in blocks.

    Attributes
    ----------
    found
        The plain one.
    inputs
        Queries, keys and values as blocks are cut of them: ``[..., positions, width]``.
    result, kept
        The result of the forward pass, and what it keeps of each query.
    output
        The result, with the axes of the plain output.
    shape
        Of the scores.
    """

    found: Found
    inputs: tuple[tf.Tensor, ...]
    result: tf.Tensor
    kept: list[tf.Tensor]
    output: tf.Tensor
    shape: tf.Tensor

    @property
    def shapes(self) -> list[tf.Tensor]:
        """Who reads the shape of scores or weights."""
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
    """Attentions whose forward pass in blocks stands beside the plain one.

    Attributes
    ----------
    built
        By name of the softmax.
    refused
        Why others, by name of the softmax, stay as they are.
    ops
        What was built for them now.
    """

    built: dict[str, _Built] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ops: list[tf.Operation] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Substituted:
    """What was substituted.

    Attributes
    ----------
    names
        The softmax of each attention that is computed in blocks.
    refused
        Why others, by name of the softmax, stay as they are.
    rewiring
        The edits.
    idle
        Ops that nothing needs any more.
    gradients
        For each gradient (reference of a tensor), the one in its place.
    outputs
        The same for each output.
    """

    names: tuple[str, ...]
    refused: dict[str, str]
    rewiring: Rewiring
    idle: frozenset[tf.Operation]
    gradients: dict[Any, tf.Tensor]
    outputs: dict[Any, tf.Tensor]


def prepare(graph: tf.Graph, ys: Sequence[tf.Tensor], idle: Collection[int]) -> Prepared:
    """Find attention among what ``ys`` need, and build its forward pass in blocks.

    Parameters
    ----------
    idle
        Creation indices of ops that are known to be of no use.
    """
    known = notes(graph, _Known).built
    prepared = Prepared(dict(known))
    since = len(graph.get_operations())
    needed = Needs().of([y for y in ys if y.graph is graph])
    softmaxes = [op for op in needed if op.type == "Softmax" and op.name not in known]
    for softmax in sorted(softmaxes, key=graphs.creation_index):
        try:
            found = found_in(softmax)
            _check_readers(found, idle)
        except Unclear as reason:
            if is_attention_like(softmax):
                prepared.refused[softmax.name] = str(reason)
            continue
        with graphs.outside_scopes(graph), graphs.unrecorded(), tf.name_scope(_SCOPE):
            prepared.built[softmax.name] = _forward(found)
    prepared.ops.extend(graph.get_operations()[since:])
    notes(graph, _Known).built = dict(prepared.built)
    return prepared


def _check_readers(found: Found, idle: Collection[int]) -> None:
    """Raise if the forward pass reads scores or weights for something else."""
    own = {*found.ops, *found.between.ops}
    for op in found.ops[:-1]:
        for tensor in op.outputs:
            for reader in tensor.consumers():
                if reader in own or reader.type in op_types.SHAPE_READERS:
                    continue
                if graphs.creation_index(reader) not in idle:
                    raise Unclear(f"{reader.name!r} ({reader.type}) reads {tensor.name!r} besides")


def _forward(found: Found) -> _Built:
    *lead, row, column = found.scores
    order = [(*lead, row, "width"), (*lead, column, "width"), (*lead, column, "of values")]
    pairs = (found.query, found.key, found.value)
    inputs = [_turned(x, axes, to) for (x, axes), to in zip(pairs, order, strict=True)]
    if found.broadcasts and not _same_lead(inputs):
        shape = tf.broadcast_dynamic_shape(*(tf.shape(x)[:-2] for x in inputs[:2]))
        inputs = [_broadcast(x, shape, found.between.product) for x in inputs]
    result, kept = forward(partial(graph_scores.attention, found.between), inputs)
    output = _turned(result, (*lead, row, "of values"), found.output[1])
    output = tf.cast(output, found.output[0].dtype)
    output.set_shape(found.output[0].shape)
    shape = tf.concat([tf.shape(inputs[0])[:-1], tf.shape(inputs[1])[-2:-1]], 0)
    return _Built(found, tuple(inputs), result, kept, output, shape)


def _turned(x: tf.Tensor, axes: Axes, to: Axes) -> tf.Tensor:
    """``x`` with its axes in another order."""
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
    """Replace those attentions of which nothing is needed then but what blocks give.

    Parameters
    ----------
    prepared
        What was found.
    first_backward
        How many ops the graph had before it was differentiated.
    targets
        Gradients.
    ys
        What was differentiated.
    named
        Tensors that are to be kept.
    """
    rewiring = Rewiring()
    needs = Needs()
    before = needs.of([*targets, *ys])
    refused = dict(prepared.refused)
    outputs = {_output(built).ref(): built.output for built in prepared.built.values()}
    found: dict[str, Gradient] = {}
    for name, built in prepared.built.items():
        if built.found.softmax not in before:
            continue
        try:
            _check_order(built.found, first_backward, ys)
            found[name] = gradient_of(built.found, _Readers(before, first_backward))
        except Unclear as reason:
            refused[name] = str(reason)
    wanted = [*ys, *(t for t in named if t.ref() not in outputs)]
    while True:
        replaced = _replaced(prepared, found)
        after = needs.of([new for t in targets for new in replaced.get(t.ref(), (t,))], replaced)
        after |= needs.of(wanted, replaced)
        answers = {
            name: _held(prepared.built[name].found, gradient, after, replaced)
            for name, gradient in found.items()
        }
        held = {name: why for name, why in answers.items() if why}
        if not held:
            break
        refused |= held
        found = {name: gradient for name, gradient in found.items() if name not in held}
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


def _check_order(found: Found, first_backward: int, ys: Sequence[tf.Tensor]) -> None:
    """Raise if ``ys`` depend on scores or weights in another way: then the gradients for these are sums of which the pattern makes a part.

    That is so where ``ys`` follow from an earlier gradient. (Readers that are of no use otherwise were let pass when it was found.)
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
        plain = Needs().of(ys)
    if not others.isdisjoint(plain):
        raise Unclear("its gradient is differentiated once more")


def _output(built: _Built) -> tf.Tensor:
    return built.found.output[0]


def _replaced(
    prepared: Prepared, found: Mapping[str, Gradient]
) -> dict[Any, tuple[tf.Tensor, ...]]:
    """For each tensor that gets another one in its place, what that one needs."""
    replaced: dict[Any, tuple[tf.Tensor, ...]] = {}
    for name, gradient in found.items():
        built = prepared.built[name]
        replaced[_output(built).ref()] = (built.output,)
        replaced |= {tensor.ref(): (built.shape,) for tensor in built.shapes}
        upstream = () if gradient.upstream is None else (gradient.upstream,)
        for tensor, _ in (*gradient.of_query, *gradient.of_key, *gradient.of_value):
            replaced[tensor.ref()] = (built.output, *upstream)
    return replaced


def _held(
    found: Found,
    gradient: Gradient,
    after: Collection[tf.Operation],
    replaced: Mapping[Any, Any],
) -> str | None:
    """Who needs the scores still, or ``None``."""
    own = {*found.ops, *gradient.ops}
    for op in found.ops:
        for tensor in op.outputs if op in after else ():
            for reader in tensor.consumers() if tensor.ref() not in replaced else ():
                if reader in after and reader not in own:
                    return f"{reader.name!r} ({reader.type}) needs {tensor.name!r} as well"
    if any(op in after for op in gradient.ops):
        return "its scores have a gradient besides those of queries and keys (a bias or scale that is trained, keys or values that are shared?)"
    if any(op in after for op in found.ops):
        return "its scores, weights or output are asked for themselves"
    return None


def _exchange(built: _Built, gradient: Gradient, rewiring: Rewiring) -> dict[Any, tf.Tensor]:
    found = built.found
    graph = found.softmax.graph
    _repoint(found.output[0], built.output, rewiring)
    inside = {*found.ops, *found.between.ops}
    rewiring.forbid_feeding(out for op in inside for out in op.outputs)
    with graphs.outside_scopes(graph), graphs.unrecorded(), tf.name_scope(_SCOPE):
        for tensor in built.shapes:
            _repoint(tensor, tf.cast(built.shape, tensor.dtype), rewiring)
    if gradient.upstream is None:
        return {}
    *lead, row, column = found.scores
    orders = ((*lead, row, "width"), (*lead, column, "width"), (*lead, column, "of values"))
    ends = (gradient.of_query, gradient.of_key, gradient.of_value)
    with graphs.outside_scopes(graph), graphs.unrecorded(), tf.name_scope(_SCOPE):
        upstream = _turned(gradient.upstream, found.output[1], (*lead, row, "of values"))
        # Its shape may be known less well than that of what it is the gradient of.
        upstream.set_shape(built.result.shape)
        wanted = bool(ends[0]), bool(ends[1]), bool(ends[2])
        formula = partial(graph_scores.attention, found.between)
        made = backward(formula, built.inputs, (), built.result, built.kept, upstream, wanted)
        turned = []
        for tensor, order, plain in zip(made, orders, ends, strict=True):
            for old, axes in plain:
                assert tensor is not None
                new = tf.cast(_turned(tensor, order, axes), old.dtype)
                new.set_shape(old.shape)
                turned.append((old, new))
    for old, new in turned:
        _repoint(old, new, rewiring)
    return {old.ref(): new for old, new in turned}


def _repoint(old: tf.Tensor, new: tf.Tensor, rewiring: Rewiring) -> None:
    for reader in old.consumers():
        for index, tensor in enumerate(reader.inputs):
            if tensor is old:
                rewiring.point(reader, index, new)
    rewiring.forbid_feeding([old])


@dataclass(frozen=True, eq=False)
class _Readers:
    """The backward ops that read a tensor and are needed."""

    needed: Collection[tf.Operation]
    first_backward: int

    def __call__(self, tensor: tf.Tensor) -> list[tf.Operation]:
        return [
            op
            for op in tensor.consumers()
            if op in self.needed and graphs.creation_index(op) >= self.first_backward
        ]
