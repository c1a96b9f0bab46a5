"""Loops and their gradients, noted as TensorFlow builds them, and kept right whatever is differentiated later.

TensorFlow's function that differentiates a loop is wrapped, once, when the package is imported. It notes which loop is the gradient of
which, which nothing in the graph says, and

- replays loops inside of functions, branches and other loops at once, if that was asked for (`replaying`): when their gradients have
  become functions themselves, it is too late;
- sees to it that a loop which is replayed stays so when it is differentiated a second time: the new gradient is replayed from
  the same kept states;
- gives a loop back what TensorFlow made of it when its gradient is differentiated: that needs every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.errors import GraphError
from graph_tools.ops.while_loops import Loop, note_steps, trip_count
from graph_tools.tf_private import loops
from graph_tools.tf_private.autodiff import (
    enclosing_graphs,
    home_of,
    orders_effects,
    prepares_higher_orders,
    vectorized,
)
from graph_tools.warn import warn
from memsaving_gradients.errors import HigherOrderError, NothingSavedWarning
from memsaving_gradients.transforms.loops.checkpoint_positions import Replayed
from memsaving_gradients.transforms.loops.loop_gradient import Gradient
from memsaving_gradients.transforms.loops.replay import Replay

__all__ = [
    "Rule",
    "forget_replay",
    "gradients_in",
    "inside",
    "install",
    "kept_inside",
    "note_replay",
    "replay_of",
    "replaying",
    "stand",
]

#: What is known of a loop stands on its op, and of a graph's gradients on the graph: neither outlives these.
_OWN, _GRADIENT, _REPLAY = (f"_memsaving_gradients_{what}" for what in ("own", "of", "replay"))
_GRADIENTS, _INSIDE, _KEPT = (
    f"_memsaving_gradients_{what}" for what in ("loops", "inner_loops", "kept_loops")
)
#: Why loops stay as they are under several tapes, or a persistent one.
_PREPARED = (
    "gradients of its gradients are prepared, for there are several tapes around it or a persistent one; "
    "ask for gradients with tf.gradients, or with one tape after the other"
)

#: How a loop is to be replayed; ``None``: not at all.
Rule = Callable[[Loop, Gradient], Replayed | None]
_rule: ContextVar[tuple[tf.Graph, Rule] | None] = ContextVar(
    "memsaving_gradients_loop_rule", default=None
)


#: Not context variables: distribution strategies trace in threads of their own.
_standing: list[Callable[[], Rule | None]] = []


@contextmanager
def replaying(graph: tf.Graph, rule: Rule) -> Iterator[None]:
    """Loops that are differentiated inside, but for those of ``graph`` itself, are replayed as ``rule`` says."""
    token = _rule.set((graph, rule))
    try:
        yield
    finally:
        _rule.reset(token)


def stand(rule: Callable[[], Rule | None]) -> Callable[[], None]:
    """As `replaying`, for whatever is differentiated from now on, until the function is called that this returns."""
    _standing.append(rule)
    return lambda: _standing.remove(rule)


def inside(graph: tf.Graph) -> tuple[Replayed, ...]:
    """The loops of functions, branches and other loops in ``graph`` that are replayed."""
    return getattr(graph, _INSIDE, ())


def kept_inside(graph: tf.Graph) -> dict[str, str]:
    """Why loops of functions in ``graph``, by name, could not be replayed."""
    found: dict[str, str] = getattr(graph, _KEPT, {})
    return found


def gradients_in(graph: tf.Graph, since: int) -> list[list[Gradient]]:
    """For each loop of ``graph`` that was differentiated there from op number ``since`` on, all of its gradients.

    Loops with gradients elsewhere, too, are left out, and those that are part of a higher order: gradients, and what has gradients that
    were differentiated themselves.
    """
    sources = dict.fromkeys(
        g.loop.op
        for n, g in getattr(graph, _GRADIENTS, ())
        if n >= since and g.loop.op.graph is graph
    )
    found = [getattr(op, _GRADIENTS) for op in sources]
    return [
        gradients
        for gradients in found
        if not hasattr(gradients[0].loop.op, _GRADIENT)
        and all(g.op.graph is graph and not hasattr(g.op, _OWN) for g in gradients)
    ]


def replay_of(loop: tf.Operation) -> Replay | None:
    """How a loop is replayed now; ``None``: it is not."""
    return getattr(loop, _REPLAY, None)


def note_replay(replay: Replay) -> None:
    """Note that a loop is replayed: to whoever differentiates, it is what TensorFlow made of it."""
    setattr(replay.loop.op, _REPLAY, replay)
    original_view.remember(replay.loop.op.graph, replay.rewiring)


def forget_replay(replay: Replay) -> None:
    """Give the loop back what TensorFlow made of it, for good."""
    setattr(replay.loop.op, _REPLAY, None)
    original_view.forget(replay.loop.op.graph, replay.rewiring)
    replay.abandon()


def install() -> None:
    """Wrap TensorFlow's differentiation of loops; does nothing the second time."""

    def wrap(differentiate: Any) -> Any:
        if getattr(differentiate, "_memsaving_loops", False):
            return differentiate

        @tf.autograph.experimental.do_not_convert
        def gradient(op: Any, *grads: Any) -> Any:
            return _differentiated(differentiate, op, grads)

        gradient._memsaving_loops = True
        return gradient

    loops.wrap_loop_gradients(wrap)


def _differentiated(differentiate: Any, op: Any, grads: Sequence[Any]) -> Any:
    # Tapes hand in a stand-in for the op.
    source = op.outputs[0].op
    own: int = getattr(source, _OWN, len(source.outputs))
    setattr(source, _OWN, own)
    of: Gradient | None = getattr(source, _GRADIENT, None)
    if of is not None and (first := replay_of(of.loop.op)) is not None:
        _give_back(first)
    replay = replay_of(source)
    if of is None and replay is None and vectorized():
        # What is built here is converted afterwards, and gives other shapes than these.
        return differentiate(op, *grads)
    if replay is not None:
        replay.rewiring.undo()
    asked = _rule.get()
    standing = None if asked or not _standing else _standing[-1]()
    if standing is not None:
        # Functions that are called under a tape are differentiated when they are called.
        asked = tf.compat.v1.get_default_graph(), standing
    of_accumulators = not all(map(_is_nothing, grads[own:]))
    if (replay or asked) and not of_accumulators:
        # Zeros for accumulators that an earlier gradient added: what they lead to is not worth a sum, nor a list of zeros.
        loops.note_own_outputs(source, own)
    graph = tf.compat.v1.get_default_graph()
    since = len(graph.get_operations())
    until = tuple((g, len(g.get_operations())) for g in enclosing_graphs(source.graph))
    home = home_of(graph)
    settled = not standing and home is home_of(source.graph) and orders_effects(home)
    result = differentiate(op, *grads)
    made = [built for built in graph.get_operations()[since:] if built.type in loops.LOOPS]
    if not made or loops.body_of(source) is None:
        return result
    gradient = Gradient(made[-1], Loop(source, own, settled, until))
    setattr(made[-1], _GRADIENT, gradient)
    for op in (source, made[-1]):
        note_steps(op, trip_count(source))
    setattr(source, _GRADIENTS, [*getattr(source, _GRADIENTS, ()), gradient])
    setattr(graph, _GRADIENTS, [*getattr(graph, _GRADIENTS, ()), (since, gradient)])
    if replay is not None:
        _replay_too(replay, gradient, of_accumulators)
    elif asked is not None and source.graph is not asked[0] and of is None:
        if prepares_higher_orders():
            for around in enclosing_graphs(graph):
                setattr(around, _KEPT, {**kept_inside(around), source.name: _PREPARED})
        else:
            _replay_inside(gradient, asked[1])
    return result


def _is_nothing(grad: Any) -> bool:
    return grad is None or grad.op.type == "ZerosLike"


def _replay_too(replay: Replay, gradient: Gradient, of_accumulators: bool) -> None:
    try:
        if not of_accumulators:
            replay.extend(gradient)
            return
    except GraphError:
        pass
    _give_back(replay)


def _replay_inside(gradient: Gradient, rule: Rule) -> None:
    how = rule(gradient.loop, gradient)
    if how is None:
        return
    replay = Replay(gradient.loop, [gradient], how, inside=True)
    try:
        replay.apply()
    except GraphError:
        return
    note_replay(replay)
    for around in enclosing_graphs(gradient.op.graph):
        setattr(around, _INSIDE, (*inside(around), how))


def _give_back(replay: Replay) -> None:
    name = replay.loop.op.name
    if replay.inside:
        raise HigherOrderError(
            f"gradients of gradients of the loop {name!r}, which is inside of a function, a branch or another loop and is "
            "replayed there: its steps are not kept; ask for the first gradients with loops='keep'"
        )
    forget_replay(replay)
    warn(
        f"the loop {name!r} keeps all of its steps: gradients of its gradients were asked for, or "
        "other ones that need its steps.",
        NothingSavedWarning,
    )
