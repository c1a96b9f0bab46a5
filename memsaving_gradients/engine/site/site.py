"""A gradient computation that TensorFlow just built: its graph, its options, and the methods that
capture, pack and undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.memory.timeline import MANY_OPS
from graph_tools.ops.sizes import Bytes
from graph_tools.ops.trip_counts import UNKNOWN_STEPS, set_unknown_steps
from graph_tools.ops.variant_bytes import guessed_loops, note_copies
from graph_tools.tf_private import graphs
from memsaving_gradients.budget import Goal
from memsaving_gradients.capture.rest_of_step import Rest, Whole, with_rest
from memsaving_gradients.capture.storable import with_storable
from memsaving_gradients.capture.training_step import CapturedStep, capture_step
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.call import Call
from memsaving_gradients.engine.site.search_state import SearchState
from memsaving_gradients.engine.site.simulations import simulate_plain
from memsaving_gradients.planners.budget_search import FLOORS
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.transforms.loops.selection import Loops, Replayed
from memsaving_gradients.transforms.packing.packing import Packed, pack

__all__ = ["Site"]


@dataclass(eq=False)
class Site:
    """A gradient computation that was just built.

    Attributes
    ----------
    call
        The call, as TensorFlow built it.
    packed
        The tensors that are packed now.
    progress
        The hook that planning reports its progress to, if any.
    floors
        The multiples of the lowest peak that a search asks for where no plan fits (`FLOORS`).
    given
        For each gradient, the identity that the user got; empty: the user got the gradients.
    gates
        Forward ops that were created late, to hold the forward pass back; each with its triggers.
    without
        Control edges that were added after the gradients were built: for each op, the ops that it
        waits for by them.
    whole
        The whole step, if its function has been traced to its end; ``None``: the gradients are
        planned by themselves.
    estimate
        The number, in `Rest.estimates`, of the estimate of the rest of the step in use.
    search_state
        The search for a plan; ``None``: it has not begun. `engine.planning.within_limits` begins
        it, and follows changes of packing and of the estimate. `treat_loops` and `restore` end it.
    """

    call: Call
    given: Sequence[tf.Tensor] = ()
    gates: Mapping[tf.Operation, Collection[tf.Operation]] = field(default_factory=dict)
    without: Mapping[tf.Operation, Collection[tf.Operation]] = field(default_factory=dict)
    packed: Packed = field(default_factory=Packed)
    progress: Callable[[float, str], None] | None = None
    floors: Sequence[float] = FLOORS
    whole: Whole | None = None

    def __post_init__(self) -> None:
        call = self.call
        self.graph, self.grads, self.home = call.graph, call.flat, call.home
        self.options, self.attention, self.encode = call.options, call.attention, call.encode
        self.xla = call.xla
        set_unknown_steps(self.graph, self.options.loop_steps)
        if self.xla:
            note_copies(self.graph)
        self.search_state: SearchState | None = None
        asked = self.options.loops != "auto"
        of = self.graph, call.own, self.options.batch, self.xla
        self.loops = Loops(*of, asked=asked)
        self._known = len(self.graph.get_operations())
        self._captured: CapturedStep | None = None
        self._aside: Packed | None = None
        self._for_loops: set[int] = set()
        self._rest: Rest | None = None
        self.estimate = 0
        self._original: tuple[CapturedStep, Simulation] | None = None
        self.guessed_loops: Mapping[tf.Operation, Bytes] = {}
        if self.attention is not None and self.attention.names:
            self._note_original(self.attention.rewiring)

    @property
    def is_large(self) -> bool:
        """Whether the graph has so many ops that an attempt takes seconds (`MANY_OPS`)."""
        return len(self.call.operations) > MANY_OPS

    @property
    def covers_step(self) -> bool:
        """Whether simulations cover the whole step."""
        return self.whole is not None and self.whole.share is None

    @property
    def gating(self) -> str:
        """The kind of gates: ``"data"`` under XLA, else ``"control"``."""
        return "data" if self.xla else "control"

    @property
    def ignored_edges(self) -> Mapping[tf.Operation, Collection[tf.Operation]]:
        """The control edges that capture ignores: those added after the gradients were built, and
        those of gates. They only order the step.

        For each op, the ops that it waits for by them.
        """
        return {**self.without, **self.gates}

    @property
    def late_forward_ops(self) -> Collection[tf.Operation]:
        """The ops that belong to the forward pass, though they were created after the first
        gradient: those that pack tensors, and gates."""
        return {*self.packed.early, *self.gates}

    @property
    def assumed_steps(self) -> int | None:
        """The number of steps assumed for loops of unknown length, if bytes depend on it, else
        ``None``; known after `original`."""
        return UNKNOWN_STEPS if self.guessed_loops or self.guessed_inside else None

    @property
    def guessed_inside(self) -> list[Replayed]:
        """Replayed loops, in functions, branches or loops, whose number of steps is unknown."""
        return [how for how in self.loops.inside if how.division.planned is None]

    def capture(self) -> CapturedStep:
        """Return the training step of the graph as it is now, without a rewrite for a plan."""
        if self._captured is None:
            self._captured = self._capture()
        return self._captured

    def original(self) -> tuple[CapturedStep, Simulation]:
        """Return the step as TensorFlow built it, and its simulation.

        The first call must come before all edits of the graph.
        """
        whole = self.whole if self.covers_step else None
        if self._original is None:
            step = self.capture()
            self._original = step, simulate_plain(self, step) if whole is None else whole.plain
            # Noted now: once a loop is replayed, the graph shows the steps planned for it.
            self.guessed_loops = guessed_loops(step.source.ops)
        step, alone = self._original
        return step, alone if whole is None else whole.plain

    def _note_original(self, rewiring: Rewiring) -> None:
        """Note the step as it was before the edits of ``rewiring``."""
        rewiring.undo()
        try:
            self.original()
        except GraphError:
            # The graph cannot be rewritten; the first caller that captures it warns of that.
            pass
        finally:
            rewiring.redo()
            self._captured = None

    @property
    def differs_from_plain(self) -> bool:
        """Whether plans are made for a step other than TensorFlow's: with replayed loops, or with
        attention in blocks."""
        return bool(self.loops.replayed or (self.attention is not None and self.attention.names))

    def treat_loops(self, way: str | None) -> None:
        """Unpack, and treat loops in another way (``None``: as TensorFlow built them). If that
        changes the step, forget the search."""
        if self.packed.tensors:
            self.search_state = None
        self.unpack()
        start = len(self.graph.get_operations())
        if self.loops.treat(way):
            self._captured = self.search_state = None
            # The ops that were built for the previous way have no readers any more.
            graph_state.idle(self.graph).update(self._for_loops)
            built = self.graph.get_operations()[start:]
            self._for_loops = set(map(graphs.creation_index, built))

    def _capture(self) -> CapturedStep:
        options = self.options
        step = capture_step(
            graphs.creation_index(self.call.first_operation),
            self.call.ys,
            self.grads,
            batch=options.batch,
            hold_gradients=self.call.holds_gradients,
            may_chain=options.accumulate and not graphs.tape_is_recording(),
            # XLA chooses its own order for sums of few addends, whatever op expresses them.
            short_sums=not self.xla,
            idle=graph_state.idle(self.graph),
            early=self.late_forward_ops,
            without=self.ignored_edges,
            home=self.home,
            profile=options.profile,
        )
        if (rest := self._rest_beside(step)) is not None:
            step = with_rest(step, self.grads, rest.estimates[self.estimate])
        return with_storable(step, lossy=options.lossy, encode=self.encode, offload=options.offload)

    def _rest_beside(self, step: CapturedStep) -> Rest | None:
        """Return the estimates of the rest of the step; ``None``: gradients are planned alone."""
        whole = self.whole
        if whole is None or whole.source is None or whole.run is None or not self.covers_step:
            return None
        if self._rest is None:
            counted, hold = step.source.position.keys(), self.call.holds_gradients
            self._rest = Rest(self.grads, counted, whole.source, whole.run, hold, whole.updates)
        return self._rest

    def use_lower_estimate(self, least: float) -> bool:
        """Switch to the next estimate of the rest of the step that is lower, for some gradient, by
        more than ``least`` bytes; return whether there is one."""
        if self._rest is None or self.search_state is None:
            return False
        estimates = self._rest.estimates
        now = estimates[self.estimate]
        less = (
            number
            for number in range(self.estimate + 1, len(estimates))
            if max((a - b for a, b in zip(now, estimates[number], strict=True)), default=0) > least
        )
        found = next(less, None)
        if found is None:
            return False
        self.use_estimate(found)
        return True

    def use_estimate(self, estimate: int = 0) -> None:
        """Use this estimate from now on; number 0 is all that the rest of the step may take."""
        if estimate != self.estimate:
            self.estimate, self._captured = estimate, None

    def pack(self, *, parts: bool = True) -> bool:
        """Pack masks and, with ``parts``, tensors of which backward ops read only a part, unless
        the options forbid encoding; return whether any was packed."""
        if self.options.encode is None:
            return False
        self.packed = pack(self.capture(), parts=parts)
        if self.packed.tensors:
            self._captured = None
        return bool(self.packed.tensors)

    def switch_packing(self, on: bool) -> None:
        """Undo the edits of `pack` and set them aside; with ``on``, redo the edits set aside."""
        if on:
            assert self._aside is not None
            self.packed, self._aside = self._aside, None
            self.packed.rewiring.redo()
        else:
            self._aside, self.packed = self.packed, Packed()
            self._aside.rewiring.undo()
        self._captured = None

    def unpack(self) -> None:
        """Undo `pack`."""
        if self.packed.tensors:
            self._captured = None
        self.packed.rewiring.undo()
        self.packed = Packed()
        self._forget(self.graph.get_operations()[self._known :])

    @property
    def goal(self) -> Goal | None:
        """The budget that plans have to keep; ``None``: there is none, or it is not known yet."""
        return None if self.search_state is None else self.search_state.goal

    def capped_by_plain(self, need: int, plain_need: int) -> int:
        """Return the lower of the needs of a plan and of plain training; the latter does not count
        if the user asked for a way to treat loops."""
        return min(need, plain_need) if self.options.loops == "auto" else need

    @property
    def stopped(self) -> str:
        """Why planning ended early, or an empty string."""
        search = self.search_state.search if self.search_state is not None else None
        return "" if search is None else search.stopped

    def restore(self) -> None:
        """Restore the graph, so that it can be planned anew, and forget the search."""
        self.treat_loops(None)
        self.search_state = None

    def abandon(self) -> None:
        """Restore the graph; note that the ops built for these gradients have no readers."""
        self.treat_loops(None)
        self._forget(self.call.own)
        graph_state.retire(self.graph, self.graph.get_operations()[self._known :])

    def _forget(self, ops: Iterable[tf.Operation]) -> None:
        graph_state.idle(self.graph).update(map(graphs.creation_index, ops))

    def keep(self, step: CapturedStep, why: str) -> dict[int, str]:
        """Return the storages to keep, each with the reason."""
        kept = _storages(step, self.call.kept, why)
        return kept | dict.fromkeys(_storages(step, self.packed.masks, ""), "mask, in bits")


def _storages(step: CapturedStep, tensors: Iterable[tf.Tensor], why: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for tensor in tensors:
        if tensor.op.name in step.source.position:
            storage = step.graph.end_of_kernel(int(step.graph.storage[step.source.value(tensor)]))
            # A mark has its own name and the marked tensor's buffer; of ops merged into a kernel,
            # the last one's storage is kept. In both cases the reason adds the tensor's name.
            itself = step.source.tensor(storage) is tensor
            found[storage] = why if itself else f"{why} {tensor.op.name.rpartition('/')[2]!r}"
    return found
