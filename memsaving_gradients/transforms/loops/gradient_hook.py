"""A hook on the differentiation of loops, which notes their gradients and keeps replays correct.

TensorFlow's function that differentiates loops is wrapped when gradients are first asked for. The
graph does not say which loop is the gradient of which loop, so the wrapper notes it. It also

- replays loops inside of functions, branches and other loops at once, if that was asked for
  (`replaying`): it would be too late once their gradients have become functions;
- keeps a replayed loop replayed when it is differentiated a second time. The new gradient is
  replayed from the same kept states. A second gradient of a call of a function with the loop calls
  the functions of the first gradient again;
- restores the loop as TensorFlow built it when its gradient is differentiated, which needs every
  step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.errors import GraphError
from graph_tools.notes import notes
from graph_tools.ops.trip_counts import behind_identities, note_steps, trip_count
from graph_tools.ops.while_loops import Loop
from graph_tools.tf_private import graphs, hooks, loops
from graph_tools.tf_private.autodiff import (
    differentiated_function,
    enclosing_graphs,
    home_of,
    orders_effects,
    prepares_higher_orders,
    vectorized,
    without_side_gradients,
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
    "kept_inside",
    "note_replay",
    "replay_of",
    "replaying",
    "stand",
]

#: The reason why loops stay as they are under several tapes, or a persistent one.
_PREPARED = (
    "TensorFlow prepares gradients of its gradients, because several tapes or a persistent one"
    " record it; ask for gradients with tf.gradients, or with one tape after the other"
)

#: The reason why loops inside of functions, branches and other loops stay as they are if they
#: already have gradients.
_DIFFERENTIATED = "gradients of it that were built before read the values of each of its steps"

#: A function that decides how a loop is replayed; ``None``: not at all.
Rule = Callable[[Loop, Gradient], Replayed | None]


@dataclass(eq=False)
class _OfLoop:
    """A note on a loop.

    Attributes
    ----------
    own
        The number of outputs that it had before gradients added accumulators; ``None``: it was not
        differentiated.
    is_gradient_of
        The gradient that it is, if it is one.
    gradients
        Its own gradients.
    replay
        Its replay; ``None``: it is not replayed now.
    unseen
        Whether it has gradients that are not noted: built before, or converted afterwards.
    """

    own: int | None = None
    is_gradient_of: Gradient | None = None
    gradients: list[Gradient] = field(default_factory=list)
    replay: Replay | None = None
    unseen: bool = False


@dataclass(eq=False)
class _OfGraph:
    """A note on the loops of a graph.

    Attributes
    ----------
    gradients
        The gradients that were built in it.
    inside
        The replayed loops of its functions, branches and loops.
    kept
        The reasons why others of these loops, by name, could not be replayed.
    """

    gradients: list[Gradient] = field(default_factory=list)
    inside: tuple[Replayed, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)


_rule: ContextVar[tuple[tf.Graph, Rule] | None] = ContextVar(
    "memsaving_gradients_loop_rule", default=None
)


#: The rules of `stand`. No context variable: distribution strategies trace in their own threads.
_standing: list[Callable[[], Rule | None]] = []


@contextmanager
def replaying(graph: tf.Graph, rule: Rule) -> Iterator[None]:
    """Replay loops that are differentiated in this context as ``rule`` says, except for loops of
    ``graph`` itself."""
    _note_gradients()
    token = _rule.set((graph, rule))
    try:
        yield
    finally:
        _rule.reset(token)


def stand(rule: Callable[[], Rule | None]) -> Callable[[], None]:
    """Replay loops as in `replaying` from now on, by the rule that ``rule`` returns. Return a
    function that ends this."""
    _note_gradients()
    _standing.append(rule)
    return lambda: _standing.remove(rule)


def inside(graph: tf.Graph) -> tuple[Replayed, ...]:
    """Return the replayed loops of functions, branches and other loops in ``graph``."""
    return notes(graph, _OfGraph).inside


def kept_inside(graph: tf.Graph) -> dict[str, str]:
    """Return why loops of functions in ``graph``, by name, could not be replayed."""
    return notes(graph, _OfGraph).kept


def gradients_in(graph: tf.Graph, built: Collection[tf.Operation]) -> list[list[Gradient]]:
    """Return all gradients of each loop of ``graph`` that has a gradient among the ops ``built``.

    Loops are left out if one of their gradients is in another graph, is not noted, or needs the
    values of every step. Loops of higher orders are left out, too: gradients, and loops whose
    gradients were differentiated.
    """
    ops = set(built)
    sources = dict.fromkeys(
        g.loop.op
        for g in notes(graph, _OfGraph).gradients
        if g.op in ops and g.loop.op.graph is graph
    )
    found = [notes(op, _OfLoop) for op in sources]
    return [
        loop.gradients
        for loop in found
        if loop.is_gradient_of is None
        and not loop.unseen
        and all(
            g.op.graph is graph and not g.of_every_step and notes(g.op, _OfLoop).own is None
            for g in loop.gradients
        )
    ]


def replay_of(loop: tf.Operation) -> Replay | None:
    """Return the replay of a loop; ``None``: it is not replayed now."""
    return notes(loop, _OfLoop).replay


def note_replay(replay: Replay) -> None:
    """Note a replay, which is undone while TensorFlow differentiates the loop's graph."""
    notes(replay.loop.op, _OfLoop).replay = replay
    original_view.remember(replay.loop.op.graph, replay.rewiring)


def forget_replay(replay: Replay) -> None:
    """Restore the loop as TensorFlow built it, for good."""
    notes(replay.loop.op, _OfLoop).replay = None
    original_view.forget(replay.loop.op.graph, replay.rewiring)
    replay.abandon()


@cache
def _note_gradients() -> None:
    """Wrap the differentiation of loops and calls, to note gradients; once is enough."""
    for hook in hooks.loop_gradients.values():
        hook.wrap(_differentiated)
    hooks.call_gradients.wrap(_call_differentiated)


def _call_differentiated(make: Any, functions: Any, num_doutputs: int | None = None) -> Any:
    """Return the gradient functions of a call. If its function has replayed loops, a second
    gradient runs the functions of the first one: differentiating again would need all steps."""
    replayed = inside(differentiated_function(functions))
    if replayed:
        name = replayed[0].name
        found = without_side_gradients(functions, num_doutputs, lambda: _refuse(name))
        if found is not None:
            return found
    return make(functions, num_doutputs)


def _differentiated(differentiate: Any, op: Any, *grads: Any) -> Any:
    # Tapes pass a substitute for the op.
    source = op.outputs[0].op
    known = notes(source, _OfLoop)
    if known.own is None:
        _first_seen(source, known)
    own, of = known.own, known.is_gradient_of
    assert own is not None
    if of is not None and (first := replay_of(of.loop.op)) is not None:
        _give_back(first)
    replay = replay_of(source)
    if of is None and replay is None and vectorized():
        # TensorFlow converts the ops built here afterwards, which changes their shapes.
        known.unseen = True
        return differentiate(op, *grads)
    if replay is not None:
        replay.rewiring.undo()
    asked = _rule.get()
    standing = None if asked or not _standing else _standing[-1]()
    if standing is not None:
        # Functions that are called under a tape are differentiated when they are called.
        asked = tf.compat.v1.get_default_graph(), standing
    of_accumulators = not all(map(_is_nothing, grads[own:]))
    of_every_step = len(source.outputs) > own
    if (replay or asked) and not of_accumulators:
        # The gradients of accumulators that an earlier gradient added are zeros: their results are
        # worth neither a sum nor a list of zeros.
        loops.note_own_outputs(source, own)
        of_every_step = False
    graph = tf.compat.v1.get_default_graph()
    since = len(graph.get_operations())
    until = tuple((g, len(g.get_operations())) for g in enclosing_graphs(source.graph))
    home = home_of(graph)
    settled = not standing and home is home_of(source.graph) and orders_effects(home)
    result = differentiate(op, *grads)
    made = [built for built in graph.get_operations()[since:] if built.type in loops.LOOPS]
    if not made or loops.body_of(source) is None:
        return result
    gradient = Gradient(made[-1], Loop(source, own, settled, until), of_every_step)
    notes(made[-1], _OfLoop).is_gradient_of = gradient
    if (steps := trip_count(source)) is not None:
        for op in (source, made[-1]):
            note_steps(op, steps)
    earlier = known.unseen or bool(known.gradients)
    known.gradients = [*known.gradients, gradient]
    notes(graph, _OfGraph).gradients.append(gradient)
    if replay is not None:
        _replay_too(replay, gradient, of_accumulators)
    elif asked is not None and source.graph is not asked[0] and of is None:
        prepared = prepares_higher_orders()
        if earlier or prepared:
            why = _PREPARED if prepared else _DIFFERENTIATED
            for around in enclosing_graphs(graph):
                notes(around, _OfGraph).kept[source.name] = why
        else:
            _replay_inside(gradient, asked[1])
    return result


def _first_seen(source: tf.Operation, known: _OfLoop) -> None:
    """Note the outputs before accumulators, and whether gradients were built unseen: the loop has
    accumulators, or reads accumulators of another loop and is no noted gradient."""
    accumulators = [k for k in range(len(source.outputs)) if _accumulates(source, k)]
    known.own = min(accumulators, default=len(source.outputs))
    made_from = (behind_identities(tensor) for tensor in source.inputs)
    reads = any(
        tensor.op.type in loops.LOOPS and _accumulates(tensor.op, tensor.value_index)
        for tensor in made_from
    )
    known.unseen = bool(accumulators) or (reads and known.is_gradient_of is None)


def _accumulates(loop: tf.Operation, k: int) -> bool:
    """Return whether a gradient added output ``k``: each step appends to a list that begins empty
    and was created after the loop."""
    body, begins = loops.body_of(loop), behind_identities(loop.inputs[k]).op
    if body is None or begins.type != "EmptyTensorList":
        return False
    late = graphs.creation_index(begins) > graphs.creation_index(loop)
    return late and behind_identities(body.outputs[k]).op.type == "TensorListPushBack"


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
        notes(around, _OfGraph).inside += (how,)


def _give_back(replay: Replay) -> None:
    name = replay.loop.op.name
    if replay.inside:
        _refuse(name)
    forget_replay(replay)
    warn(
        f"the loop {name!r} keeps all of its steps: gradients of its gradients, or other gradients "
        "that need its steps, were asked for.",
        NothingSavedWarning,
    )


def _refuse(name: str) -> NoReturn:
    raise HigherOrderError(
        f"the loop {name!r} is replayed inside of a function, a branch or another loop, and its"
        " steps are not kept: gradients of its gradients, or second gradients of a branch that"
        " calls its function, cannot be computed; ask for the first gradients with loops='keep'"
    )
