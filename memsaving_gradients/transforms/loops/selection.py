"""The choice of loops that are replayed, and of their segments.

As TensorFlow built it, a loop holds the accumulated values of all T steps for its gradient. In
segments of k steps, it holds the state T / k times and the values of k steps. The sum is least for
k = √(T · state / values). Several levels hold still less, for one more run of the loop per level.
With a budget, `WAYS` are tried in their order; without a budget, loops are replayed in segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.notes import notes
from graph_tools.ops import op_types
from graph_tools.ops.trip_counts import UNKNOWN_STEPS, set_unknown_steps, trip_count, unknown_steps
from graph_tools.ops.variant_bytes import buffer_bytes
from graph_tools.ops.while_loops import Loop
from graph_tools.tf_private import autodiff
from memsaving_gradients.transforms.loops import gradient_hook
from memsaving_gradients.transforms.loops.checkpoint_positions import (
    Division,
    Replayed,
    leaf_for,
    states_for,
)
from memsaving_gradients.transforms.loops.loop_gradient import Gradient
from memsaving_gradients.transforms.loops.replay import Replay

__all__ = ["WAYS", "Loops", "Replayed", "inner_rule", "mark"]

#: How loops are treated: as TensorFlow built them; in segments; in segments of segments of
#: segments.
WAYS = ("keep", "segments", "treeverse")
#: Fact: the levels of segments of each way.
LEVELS = {"segments": 1, "treeverse": 3}
#: A loop is replayed if that saves at least this share of its bytes, or if the user asks for it.
#: Chosen by judgement.
LEAST_SAVED = 0.2


@dataclass(eq=False)
class _Wish:
    """The way in which the user wants a loop treated (`memsaving_gradients.while_loop`); an empty
    string: like all loops."""

    way: str = ""


def mark(loop: tf.Operation, way: str) -> None:
    """Note how the user wants ``loop`` to be treated."""
    notes(loop, _Wish).way = way


def _division(
    loop: Loop, gradients: Sequence[Gradient], way: str, batch: int, xla: bool, asked: bool
) -> Replayed | str:
    """Return how a loop is divided, or why it is kept as it is.

    ``asked``: whether the user asked for ``way``; a mark on the loop counts more.

    ``xla``: whether XLA compiles the loop. XLA must know how long lists are, and copies values that
    are read from variables into lists.
    """
    marked = notes(loop.op, _Wish).way
    way = marked or way
    least_saved = min(LEAST_SAVED, 0.0) if marked or asked else LEAST_SAVED
    if way == "keep":
        return "loops='keep'"
    try:
        numbers = {n for gradient in gradients for n in gradient.taken.values()}
        gathered = [loop.accumulated[n] for n in sorted(numbers)]
        part = loop.part(gathered)
    except GraphError as error:
        return str(error)
    if not loop.condition_is_pure:
        return "its condition has side effects, and a replay would run it more often"
    state = _bytes([loop.body.inputs[state] for state in part.states], batch, xla)
    once, step = _bytes(part.once, batch, xla), _bytes(gathered, batch, xla)
    steps = trip_count(loop.op)
    if xla and steps is None:
        return "XLA must know how many steps there are; give maximum_iterations as a number"
    told = unknown_steps(loop.op.graph) if steps is None else None
    planned = told if steps is None else steps
    many = UNKNOWN_STEPS if planned is None else planned
    repeats = LEVELS[way]
    leaf = leaf_for(many, repeats, max(state, 1), max(step, 1))
    held = states_for(many, repeats, leaf) * state + leaf * step + many * once
    if not part.states or held >= (1 - least_saved) * many * step:
        saved = "less than a fifth" if least_saved else "none"
        return f"a replay would save {saved} of the {many * step:,} bytes that it keeps"
    ratio = max(step, 1) / max(state, 1)
    division = Division(repeats, steps, 1 if planned is None else leaf, ratio, told)
    return Replayed(loop.op.name, division)


def _bytes(tensors: Iterable[tf.Tensor], batch: int, xla: bool) -> int:
    # A value that is read from a variable is the variable's own buffer, except under XLA.
    own = (t for t in tensors if xla or t.op.type not in op_types.READS)
    return sum(buffer_bytes(t).at(batch) for t in own)


@dataclass(eq=False)
class Loops:
    """The loops of a graph whose gradients were just built there.

    Attributes
    ----------
    graph
        The graph.
    built
        The ops that were built for these gradients.
    batch
        The number of examples that is taken for an unknown batch dimension.
    xla
        Whether XLA compiles the graph.
    asked
        Whether the user asked for a way. Then a loop is replayed even if that saves little.
    way
        The way in which they are treated now; ``None``: as TensorFlow built them, marked or not.
    """

    graph: tf.Graph
    built: Sequence[tf.Operation]
    batch: int
    xla: bool = False
    asked: bool = False
    way: str | None = None
    _replays: list[Replay] = field(default_factory=list)
    _refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = gradient_hook.gradients_in(self.graph, self.built)
        replays = [gradient_hook.replay_of(gradients[0].loop.op) for gradients in found]
        self._found = [g for g, replay in zip(found, replays, strict=True) if replay is None]
        self._since_earlier = tuple(replay.how for replay in replays if replay is not None)

    @property
    def replayed(self) -> tuple[Replayed, ...]:
        """The loops that are replayed, now or since earlier gradients, in the graph itself or in
        functions, branches and other loops."""
        here = (replay.how for replay in self._replays)
        return (*self._since_earlier, *here, *self.inside)

    @property
    def inside(self) -> tuple[Replayed, ...]:
        """The replayed loops of functions, branches and other loops. Their replay was built while
        TensorFlow built their gradients."""
        return gradient_hook.inside(self.graph)

    @property
    def kept(self) -> dict[str, str]:
        """The reasons why loops, by name, are kept as they are."""
        asked = "segments" if self.way is None else self.way
        answers = [(g[-1].loop.op.name, self._asked(g, asked)) for g in self._found]
        kept = {name: why for name, why in answers if isinstance(why, str)}
        return kept | self._refused | gradient_hook.kept_inside(self.graph)

    def ways(self, wanted: Iterable[str]) -> list[str]:
        """Return the ways in ``wanted`` that differ in their result; none if no loop is replayed in
        any of them."""
        found: dict[tuple[Replayed, ...], str] = {}
        for way in wanted:
            found.setdefault(tuple(replayed for _, replayed in self._divided(way)), way)
        return list(found.values()) if any(found) else []

    def _divided(self, way: str) -> list[tuple[list[Gradient], Replayed]]:
        found = []
        for gradients in self._found:
            divided = self._asked(gradients, way)
            if isinstance(divided, Replayed):
                found.append((gradients, divided))
        return found

    def _asked(self, gradients: list[Gradient], way: str) -> Replayed | str:
        loop = gradients[-1].loop
        return _division(loop, gradients, way, self.batch, self.xla, self.asked)

    def treat(self, way: str | None) -> bool:
        """Treat the loops in another way, and return whether anything changed."""
        before = bool(self._replays)
        for replay in reversed(self._replays):
            gradient_hook.forget_replay(replay)
        self._replays.clear()
        for gradients, divided in () if way is None else self._divided(way):
            replay = Replay(gradients[-1].loop, list(gradients), divided)
            try:
                replay.apply()
            except GraphError as error:
                self._refused[divided.name] = str(error)
                continue
            gradient_hook.note_replay(replay)
            self._replays.append(replay)
        self.way = way
        return before or bool(self._replays)


def inner_rule(
    way: str, batch: int, xla: bool | None, loop_steps: int | None, asked: bool
) -> gradient_hook.Rule:
    """Return the rule for loops inside of functions, branches and other loops, whose replay cannot
    be decided later.

    ``loop_steps``: the most steps of loops whose graph does not show their number. ``asked``:
    whether the user asked for ``way``.
    """

    def rule(loop: Loop, gradient: Gradient) -> Replayed | None:
        if loop_steps is not None:
            set_unknown_steps(loop.op.graph, loop_steps)
        compiled = autodiff.compiled_by_xla() if xla is None else xla
        how = _division(loop, [gradient], way, batch, compiled, asked)
        return how if isinstance(how, Replayed) else None

    return rule
