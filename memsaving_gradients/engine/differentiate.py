"""One gradient computation, from its arguments to rewired gradients; `gradients` and the patches
share this code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.ops.trip_counts import set_unknown_steps
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.capture.encodings import ENCODINGS
from memsaving_gradients.engine import graph_state, whole_step
from memsaving_gradients.engine.call import Call, components
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.replicas import home_of
from memsaving_gradients.engine.rewire import rewire_now
from memsaving_gradients.engine.step_budget import (
    drop_inner,
    is_inner,
    let_wait,
    waits_for_its_step,
)
from memsaving_gradients.engine.tensor_selection import marks_between, resolve
from memsaving_gradients.errors import ArgumentError, SelectionError
from memsaving_gradients.transforms.attention.pattern.substitution import (
    Prepared,
    Substituted,
    prepare,
    substitute,
)
from memsaving_gradients.transforms.loops.gradient_hook import Rule, replaying
from memsaving_gradients.transforms.loops.selection import inner_rule

__all__ = ["all_plain", "ends_in", "inner_way", "is_paused", "paused", "rewired", "rule_inside"]

_paused: ContextVar[bool] = ContextVar("memsaving_gradients_paused", default=False)
_all_plain: ContextVar[bool] = ContextVar("memsaving_gradients_all_plain", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Leave gradients that are built inside to TensorFlow, even while it is patched."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


@contextmanager
def all_plain() -> Iterator[None]:
    """Leave gradients that are built inside to TensorFlow, even those that
    `memsaving_gradients.gradients` builds."""
    token = _all_plain.set(True)
    try:
        yield
    finally:
        _all_plain.reset(token)


def is_paused() -> bool:
    """Return whether `paused` is in force."""
    return _paused.get()


def ends_in(graph: tf.Graph, ys: Any) -> list[tf.Tensor]:
    """Return the tensors among ``ys`` that ``graph`` computes."""
    parts = tf.nest.flatten(ys, expand_composites=True)
    return [y for y in parts if _is_in(graph, y) and y.dtype != tf.resource]


def _is_in(graph: tf.Graph, part: Any) -> bool:
    return isinstance(part, tf.Tensor) and tf.is_symbolic_tensor(part) and part.graph is graph


@tf.autograph.experimental.do_not_convert
@uncollected()
def rewired(
    differentiate: Callable[[], Any],
    ends: Sequence[tf.Tensor],
    xs: Any,
    options: Options,
    tape: Any = None,
) -> Any:
    """Run ``differentiate`` in the current graph, and rewire the ops that it builds.

    Parameters
    ----------
    differentiate
        Builds gradients of ``ends`` with respect to ``xs`` in the current graph, and returns them
        in any structure.
    ends
        The targets of differentiation that the graph computes, at least one (`ends_in`).
    xs
        The sources of differentiation (a structure of tensors and variables).
    options
        How to save memory. Checkpoints are resolved before any op is built, so that an error
        leaves the graph as it was.
    tape
        The tape that computes the gradients, if one does.
    """
    graph = tf.compat.v1.get_default_graph()
    starts = tf.nest.flatten(xs, expand_composites=True)
    if _all_plain.get() or graph_state.is_differentiated(graph, ends):
        # The caller wants plain gradients, or a loop has computed the loss's gradients already.
        with paused():
            return differentiate()
    built = graph.get_operations()
    mode, kept = _chosen(graph, len(built), ends, starts, options)
    encode = _encodings(graph, len(built), ends, starts, options)
    found, inner = None, is_inner(graph, options, ends, tape)
    if inner:
        with paused():
            grads = differentiate()
    else:
        if options.blocks_attention and not autodiff.vectorized():
            with paused():
                found = prepare(graph, ends, graph_state.idle(graph))
            built = graph.get_operations()
        set_unknown_steps(graph, options.loop_steps)
        with paused(), replaying(graph, rule_inside(options, mode, kept)):
            grads = differentiate()
    parts, ragged = _parts(graph, grads)
    flat = [part if not ragged or _is_in(graph, part) else None for part in parts]
    in_blocks = None
    if found is not None:
        in_blocks = _in_blocks(graph, len(built), found, flat, ends, kept)
        flat = [_stand_in(grad, in_blocks) for grad in flat]
        kept = [in_blocks.outputs.get(t.ref(), t) for t in kept]
    call = Call(
        graph=graph,
        first_backward=len(built),
        operations=graph.get_operations(),
        ys=ends,
        xs=starts,
        grads=flat,
        mode=mode,
        kept=kept,
        options=options,
        encode=encode,
        xla=autodiff.compiled_by_xla() if options.xla is None else bool(options.xla),
        attention=in_blocks,
        home=home_of(ends),
        reduced=whole_step.will_be_reduced(),
    )
    if inner or waits_for_its_step(call):
        flat = let_wait(call)
    else:
        drop_inner(call)
        flat = _saved(call, found)
    graph_state.returned(graph, components(flat, graph), options.hold_gradients or call.reduced)
    flat = [part if new is None else new for new, part in zip(flat, parts, strict=True)]
    return tf.nest.pack_sequence_as(grads, flat, expand_composites=ragged)


def _parts(graph: tf.Graph, grads: Any) -> tuple[list[Any], bool]:
    """Return the tensors of gradients, and whether they are parts of ragged gradients; the gradient
    of a gather stays whole."""
    leaves = tf.nest.flatten(grads)
    if all(g is None or isinstance(g, tf.IndexedSlices) or _is_in(graph, g) for g in leaves):
        return leaves, False
    return tf.nest.flatten(grads, expand_composites=True), True


def _saved(call: Call, found: Prepared | None) -> list[Any]:
    """Return the gradients of a call with less memory; after an error, restore the attention that
    was ``found``."""
    try:
        return rewire_now(call)
    except BaseException:
        if found is not None and call.attention is not None:
            _take_back(call.graph, found, call.attention)
        raise


def _in_blocks(
    graph: tf.Graph,
    first_backward: int,
    found: Prepared,
    grads: Sequence[Any],
    ys: Sequence[tf.Tensor],
    kept: Sequence[tf.Tensor],
) -> Substituted:
    """Substitute blocks for the attention that was found, and return the substitution."""
    with paused():
        done = substitute(found, first_backward, components(grads, graph), ys, kept)
    original_view.remember(graph, done.rewiring)
    graph_state.idle(graph).update(map(graphs.creation_index, done.idle))
    return done


def _take_back(graph: tf.Graph, found: Prepared, done: Substituted) -> None:
    """Restore attention as TensorFlow built it."""
    done.rewiring.undo()
    original_view.forget(graph, done.rewiring)
    idle = graph_state.idle(graph)
    idle.difference_update(map(graphs.creation_index, done.idle))
    idle.update(map(graphs.creation_index, found.ops))


def _stand_in(grad: Any, done: Substituted) -> Any:
    """Return ``grad``, or an identity that reads its replacement, if it has one; when TensorFlow
    differentiates, the identity reads the plain gradient."""
    if not isinstance(grad, tf.Tensor) or grad.ref() not in done.gradients:
        return grad
    stands = graphs.stand_in(grad)
    done.rewiring.point(stands.op, 0, done.gradients[grad.ref()])
    return stands


def inner_way(options: Options, mode: str, kept: Sequence[tf.Tensor] = ()) -> str:
    """Return how to treat loops inside functions, branches and other loops, which is decided
    before there is a plan."""
    replays_all = mode in ("auto", "memory") or (mode == "named" and not kept)
    return options.loops if options.loops != "auto" else "segments" if replays_all else "keep"


def rule_inside(options: Options, mode: str, kept: Sequence[tf.Tensor] = ()) -> Rule:
    """Return how to build the gradients of loops that `inner_way` treats."""
    way, asked = inner_way(options, mode, kept), options.loops != "auto"
    return inner_rule(way, options.batch, options.xla, options.loop_steps, asked)


def _encodings(
    graph: tf.Graph,
    first_backward: int,
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    options: Options,
) -> dict[object, str]:
    """Return the encodings of tensors that the user named, by reference."""
    found: dict[object, str] = {}
    for spec, name in options.encode.items() if isinstance(options.encode, Mapping) else ():
        # Tensors of a graph cannot be keys of a mapping; their references can.
        key = spec.deref() if hasattr(spec, "deref") else spec
        try:
            tensors = resolve(graph, first_backward, [key], ys, xs)
        except SelectionError as error:
            raise SelectionError("encode", key, error.problem) from None
        for tensor in tensors:
            if not ENCODINGS[name].fits(tensor.dtype):
                raise ArgumentError(
                    "encode",
                    tensor.name,
                    f"has dtype {tensor.dtype.name}, which {name} does not make smaller; name"
                    " floating point tensors with more bits",
                )
            found[tensor.ref()] = name
    return found


def _chosen(
    graph: tf.Graph,
    first_backward: int,
    ys: Sequence[tf.Tensor],
    xs: Sequence[Any],
    options: Options,
) -> tuple[str, list[tf.Tensor]]:
    """Return the mode of the plan, and the tensors that the plan must keep."""
    spec = options.checkpoints
    if options.plan:
        return "saved", []
    if options.searches:
        mode = "budget" if options.budget is not None else "slowdown"
        mode = mode if mode == "budget" or options.max_slowdown is not None else "planner"
        return mode, marks_between(graph, ys, xs)
    if spec in ("memory", "speed"):
        return spec, []
    if spec in ("auto", "collection"):
        marks = marks_between(graph, ys, xs)
        if marks:
            return "collection", marks
        if spec == "auto":
            return "memory", []
        raise ArgumentError(
            "checkpoints",
            spec,
            "no tensor between xs and ys is marked; mark some with"
            " memsaving_gradients.checkpoint(tensor) or"
            " tf.compat.v1.add_to_collection('checkpoints', tensor), or use checkpoints='memory'",
        )
    return "named", resolve(graph, first_backward, spec, ys, xs)
