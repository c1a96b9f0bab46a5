"""A gradient computation that TensorFlow just built: its graph, its options, and the methods that
capture, pack, simulate and undo it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.editing import original_view
from graph_tools.editing.rewiring import CLONE_SUFFIX, Rewiring
from graph_tools.errors import GraphError
from graph_tools.graph.capture import OpGraph, capture
from graph_tools.memory.executor import simulate_execution
from graph_tools.memory.peak_tensors import with_names
from graph_tools.memory.timeline import Part
from graph_tools.ops.sizes import Bytes
from graph_tools.ops.trip_counts import UNKNOWN_STEPS, tell_steps
from graph_tools.ops.variant_bytes import guessed_loops, note_copies
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.budget import Goal
from memsaving_gradients.capture.rest_of_step import Rest, Whole, with_rest
from memsaving_gradients.capture.storable import with_storable
from memsaving_gradients.capture.training_step import CapturedStep, capture_step
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.call import Call
from memsaving_gradients.planners.budget_search import FLOORS, Search
from memsaving_gradients.planners.meter import MANY_OPS
from memsaving_gradients.rewriting.clones import Rewrite
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import Simulation, simulate
from memsaving_gradients.transforms.loops.selection import Loops, Replayed
from memsaving_gradients.transforms.packing.packing import Packed, pack

__all__ = ["SearchState", "Site"]


@dataclass(frozen=True, eq=False)
class SearchState:
    """The search for a plan for one gradient computation: its step, its goal, its state.

    Attributes
    ----------
    step
        The step that plans are made for; its masks may be packed.
    unpacked
        The step as TensorFlow built it.
    before
        The simulation of plain training.
    goal
        The budget, or ``None``.
    search
        The search, with the plans tried so far. ``None``: plain training meets the budget, or (in
        ``other``) the search has not begun.
    other
        Under a budget, the search with packing switched: one of its plans may be better.
    cost
        The extra seconds of a first plan within the budget, or the bytes that a plan within the
        slowdown needs; infinite: no plan was found.
    estimate
        The number of the estimate of the rest of the step in ``step``, as `Site.estimate`.
    searched
        For each estimate that was in use before, its step and its search.
    """

    step: CapturedStep
    unpacked: CapturedStep
    before: Simulation
    goal: Goal | None
    search: Search | None
    other: SearchState | None = None
    cost: float = math.inf
    estimate: int = 0
    searched: dict[int, tuple[CapturedStep, Search | None]] = field(default_factory=dict)


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
        Control edges that capture ignores: for each op, the ops that it waits for by them.
    whole
        The whole step, if its function has been traced to its end; ``None``: the gradients are
        planned by themselves.
    estimate
        The number, in `Rest.estimates`, of the estimate of the rest of the step in use.
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
        tell_steps(self.graph, self.options.loop_steps)
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
    def first_operation(self) -> tf.Operation:
        """The first op of the backward pass."""
        return self.call.own[0]

    def is_here(self, op: tf.Operation) -> bool:
        """Return whether ``op`` runs, or may run, on the device that memory is saved on."""
        return self.home is None or self.home.has(op)

    @property
    def is_large(self) -> bool:
        """Whether the graph has so many ops that an attempt takes seconds (`MANY_OPS`)."""
        return len(self.call.operations) > MANY_OPS

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients live until all of them are made, because the user says so or because
        replicas will add them up."""
        return self.options.hold_gradients or self.call.reduced

    @property
    def gating(self) -> str:
        """The kind of gates: ``"data"`` under XLA, else ``"control"``."""
        return "data" if self.xla else "control"

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
        whole = self.whole if self.in_whole else None
        if self._original is None:
            step = self.capture()
            self._original = step, self.simulate_plain(step) if whole is None else whole.plain
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
    def is_other(self) -> bool:
        """Whether plans are made for a step other than TensorFlow's: with replayed loops, or with
        attention in blocks."""
        return bool(self.loops.replayed or (self.attention is not None and self.attention.names))

    def treat_loops(self, way: str | None) -> None:
        """Unpack, and treat loops in another way (``None``: as TensorFlow built them). If a loop
        changes, forget the search."""
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
        more: dict[str, Any] = {"profile": True} if options.profile else {}
        step = capture_step(
            graphs.creation_index(self.first_operation),
            self.call.ends,
            self.grads,
            batch=options.batch,
            hold_gradients=self.holds_gradients,
            may_chain=options.accumulate and not graphs.tape_is_recording(),
            # XLA chooses its own order for sums of few addends, whatever op expresses them.
            short_sums=not self.xla,
            idle=graph_state.idle(self.graph),
            beside={*self.packed.early, *self.gates},
            without={**self.without, **self.gates},
            home=self.home,
            **more,
        )
        if (rest := self._rest_beside(step)) is not None:
            step = with_rest(step, self.grads, rest.estimates[self.estimate])
        return with_storable(step, lossy=options.lossy, encode=self.encode, offload=options.offload)

    def _rest_beside(self, step: CapturedStep) -> Rest | None:
        """Return the estimates of the rest of the step; ``None``: gradients are planned alone."""
        whole = self.whole
        if whole is None or whole.source is None or whole.run is None or not self.in_whole:
            return None
        if self._rest is None:
            counted, hold = step.source.position.keys(), self.holds_gradients
            self._rest = Rest(self.grads, counted, whole.source, whole.run, hold, whole.updates)
        return self._rest

    def count_less(self, least: float) -> bool:
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
        self.count(found)
        return True

    def count(self, estimate: int = 0) -> None:
        """Use this estimate from now on; number 0 is all that the rest of the step may take."""
        if estimate != self.estimate:
            self.estimate, self._captured = estimate, None

    def simulate_plain(self, step: CapturedStep) -> Simulation:
        """Return the simulation of plain training: by the executor, or of the schedule for XLA."""
        if self.xla:
            # XLA runs no executor: its own scheduler orders one program.
            return self._named(simulate(step.graph, plain(step.graph)), step.source)
        return self._simulated(step.source, step.graph.targets)

    @property
    def in_whole(self) -> bool:
        """Whether simulations cover the whole step."""
        return self.whole is not None and self.whole.share is None

    def as_it_is(self, step: CapturedStep) -> Simulation:
        """Return the simulation of gradients that no plan rewrites; loops, blocks, masks stay."""
        return self.simulate_traced() if self.in_whole else self.simulate_plain(step)

    def simulate_rewritten(self, result: Rewrite, extra_seconds: float) -> Simulation:
        """Return the simulation of the step that was just rewritten."""
        if self.in_whole:
            return self.simulate_traced(extra_seconds)
        grads = [result.replaced.get(t.ref(), t) for t in self.grads]
        return self._simulate_built(grads, (), extra_seconds)

    def simulate_together(self, grads: Sequence[tf.Tensor]) -> Simulation | None:
        """Return the simulation of the step with ``grads`` and the gradients of earlier calls on
        the same device; ``None``: there are no earlier calls, or XLA orders the step."""
        others = [(t, held) for t, held in graph_state.earlier(self.graph) if self.is_here(t.op)]
        if not others or self.xla:
            return None
        return self._simulate_built(grads, others)

    def simulate_traced(self, extra_seconds: float = 0.0) -> Simulation:
        """Return the simulation of all that the traced function does, with its results held to the
        end.

        Raises
        ------
        GraphError
            If an op outside of the gradients cannot be captured, such as a loop of TF1.
        """
        return self.simulate_all(extra_seconds)[1]

    def simulate_all(self, extra_seconds: float = 0.0) -> tuple[OpGraph, Simulation]:
        """Return the step captured for `simulate_traced`, and the simulation."""
        ops = capture(autodiff.ends_of(self.graph), home=self.home)
        held = [ops.value(tensor) for tensor in autodiff.outputs_of(self.graph)]
        return ops, self._simulated(ops, held, extra_seconds)

    def _simulate_built(
        self,
        grads: Sequence[tf.Tensor],
        others: Sequence[tuple[tf.Tensor, bool]],
        extra_seconds: float = 0.0,
    ) -> Simulation:
        border = graphs.creation_index(self.first_operation)
        ops = capture(
            grads,
            besides=[*self.call.ends, *(t for t, _ in others)],
            late=border,
            without={**self.without, **self.gates},
            home=self.home,
        )
        held = [*(grads if self.holds_gradients else ()), *(t for t, held in others if held)]
        return self._simulated(ops, [ops.value(t) for t in held], extra_seconds)

    def _simulated(
        self, ops: OpGraph, held: Sequence[int], extra_seconds: float = 0.0
    ) -> Simulation:
        simulated, _ = simulate_execution(ops, batch=self.options.batch, held=held)
        return self._named(Simulation.of(simulated, extra_seconds), ops)

    def _named(self, simulation: Simulation, ops: OpGraph) -> Simulation:
        border = graphs.creation_index(self.first_operation)
        early = {op.name for op in (*self.packed.early, *self.gates)}

        def name(value: int, _: int) -> tuple[str, Part]:
            tensor = ops.tensor(value)
            op = tensor.op
            if CLONE_SUFFIX in op.name.rpartition("/")[2]:
                return tensor.name, "recomputed"
            forward = graphs.creation_index(op) < border or op.name in early
            return tensor.name, "forward" if forward else "backward"

        return with_names(simulation, name)

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

    def or_plain(self, need: int, plain_need: int) -> int:
        """Return the lower of the needs of a plan and of plain training; the latter does not count
        if the user asked for a way to treat loops."""
        return min(need, plain_need) if self.options.loops == "auto" else need

    @property
    def stopped(self) -> str:
        """Why planning ended early, or an empty string."""
        search = self.search_state.search if self.search_state is not None else None
        return "" if search is None else search.stopped

    def take_back(self, result: Rewrite) -> None:
        """Undo a rewrite, for good."""
        result.rewiring.undo()
        original_view.forget(self.graph, result.rewiring)
        graph_state.retire(self.graph, result.built)

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
