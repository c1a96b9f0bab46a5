"""Make a `Plan` from a schedule: fates of residuals, by names and lines of the user's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from graph_tools.memory.liveness import timeline
from graph_tools.memory.peak_tensors import with_names
from graph_tools.memory.timeline import Part
from graph_tools.ops import op_types
from graph_tools.ops.elements import most_chosen
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.fingerprint import fingerprint
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.planners import Proposal
from memsaving_gradients.planners.meter import Found
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.reports.plan_values import Decision, Fate
from memsaving_gradients.schedules.simulate import Simulation
from memsaving_gradients.schedules.storage import OFFLOAD, Stored
from memsaving_gradients.schedules.training_graph import TrainingGraph
from memsaving_gradients.transforms.loops.selection import Loops

__all__ = ["describe", "source_line", "why_nothing"]

#: The folder of this package, whose frames are not part of the user's program.
_OWN = str(Path(__file__).parent.parent)


def describe(
    step: CapturedStep,
    found: Found,
    *,
    mode: str,
    planner: str,
    batch: int,
    xla: bool,
    packed: bool,
    before: Simulation,
    batch_is_known: bool = True,
    assumed_steps: int | None = None,
    budget: int | None = None,
    earlier: CapturedStep | None = None,
    loops: Loops | None = None,
) -> Plan:
    """Return the plan for ``step``, with the simulation of the planner.

    Parameters
    ----------
    step
        The captured training step.
    found
        The proposal that was followed.
    mode, planner, budget
        The mode, the planner and the budget of the request.
    batch, batch_is_known
        The batch size that was planned for, and whether it was given.
    assumed_steps
        The number of steps that loops were planned for, if it was not given; else ``None``.
    xla
        Whether XLA compiles the graph.
    packed
        Whether masks were packed before the step was captured.
    before
        The simulation of plain training as it runs.
    earlier
        The step before masks were packed and loops replayed, if that is not ``step``.
    loops
        The loops of the step.
    """
    graph, proposal = step.graph, found.proposal
    after = proposal.simulation
    untouched = graph if earlier is None else earlier.graph
    seconds = max(untouched.total_seconds, 1e-12)
    more = 0.0 if earlier is None else graph.total_seconds - seconds
    by_choice = ("checkpoint", "named", "marked")
    checkpoints = [s for s, why in proposal.reasons.items() if why.startswith(by_choice)]
    mark = fingerprint(step, batch)
    return Plan(
        mode=mode,
        decisions=tuple(_decisions(step, proposal)),
        peak_plain=before.peak,
        peak=after.peak,
        # Plain training holds all residuals at the end of the forward pass.
        activations_plain=untouched.residual_bytes,
        activations=_most_residuals(graph, after),
        extra_time=(proposal.extra_seconds + more) / seconds,
        clones=proposal.schedule.clones,
        checkpoints=tuple(step.source.tensor(s).name for s in sorted(checkpoints)),
        gating="data" if xla else "control",
        planner=planner,
        budget=budget,
        planned_for=found.asked,
        lower_bound=proposal.lower_bound / seconds,
        optimal=proposal.optimal,
        complete=proposal.complete,
        packed=packed,
        loops="" if loops is None or not loops.replayed else str(loops.way),
        replayed=() if loops is None else loops.replayed,
        schedule=proposal.schedule,
        reasons=proposal.reasons,
        fingerprint=mark,
        assumed_batch=None if batch_is_known or not mark.batch else batch,
        assumed_steps=assumed_steps,
        assumed_rows=most_chosen(step.source.ops, batch),
        simulation_plain=before,
        simulation=_named(step, proposal),
    )


def _named(step: CapturedStep, proposal: Proposal) -> Simulation:
    """Return the planner's simulation, with the names of the buffers alive at its peak."""
    steps, graph = proposal.schedule.steps, step.graph

    def name(value: int, place: int) -> tuple[str, Part]:
        tensor = step.source.tensor(value)
        if steps[place].copy:
            return tensor.name, "recomputed"
        forward = graph.producer[value] < graph.first_backward
        return tensor.name, "forward" if forward else "backward"

    return with_names(proposal.simulation, name)


def _most_residuals(graph: TrainingGraph, simulation: Simulation) -> int:
    """Return the most bytes of residuals, kept or recomputed, that are alive at one time."""
    owned = slice(len(simulation.owner))
    residual = np.isin(simulation.owner, list(graph.residuals))
    born, dies, size = (of[owned][residual] for of in simulation.buffers)
    alive = timeline(born, dies, size, len(simulation.bytes_alive))
    return int(alive.max(initial=0))


def _decisions(step: CapturedStep, proposal: Proposal) -> list[Decision]:
    graph, source = step.graph, step.source
    stored = {how.value: how for how in proposal.schedule.stored.values()}
    clones = [
        entry
        for entry in proposal.schedule.steps
        if entry.copy and entry.op not in proposal.schedule.stored
    ]
    again = {entry.op for entry in clones}
    read = {int(graph.storage[v]) for entry in clones for v in graph.reads[entry.op]}
    kept = {s for s in read & proposal.reasons.keys() if graph.producer[s] not in again}
    largest = float(graph.size.max(initial=0))
    origin = "from checkpoints" if proposal.reasons else "from the inputs"
    decisions = []
    for storage in sorted(kept | graph.residuals):
        maker = int(graph.producer[storage])
        size = int(graph.size[storage])
        if size * 1024 < largest:
            continue
        fate: Fate = "recompute" if maker in again else "keep"
        reason = origin if fate == "recompute" else _reason(step, proposal, storage)
        if storage in stored:
            fate = stored[storage].fate
            reason = _stored(stored[storage])
        tensor = source.tensor(storage)
        decisions.append(
            Decision(
                tensor=tensor.name,
                bytes=size,
                fate=fate,
                reason=reason,
                op_type=tensor.op.type,
                source=source_line(tensor.op),
            )
        )
    return decisions


def _stored(how: Stored) -> str:
    if how.means == OFFLOAD:
        return f"moved to another device; {how.moving_seconds * 1e3:.3g} ms each way"
    return f"kept as {how.means}, in {how.bytes:,} bytes"


def _reason(step: CapturedStep, proposal: Proposal, storage: int) -> str:
    if not step.graph.clonable[step.graph.producer[storage]]:
        return "cannot be recomputed"
    return proposal.reasons.get(storage, "read before it is dropped")


def source_line(op: tf.Operation) -> str:
    """Return the innermost frame of the user's program that created ``op``, as ``file:line``;
    ``"imported"`` in an imported graph, and empty if no frame is the user's."""
    frames = graphs.user_frames(op)
    if not frames:
        return "imported"
    for file, line, _ in reversed(frames):
        if "/site-packages/" not in file and not file.startswith(_OWN) and not file.startswith("<"):
            return f"{file}:{line}"
    return ""


def _why_once(ops: Sequence[tf.Operation], loops: Mapping[str, str]) -> str:
    """Return why ops cannot run again, and what to do; ``loops``: as in `why_nothing`."""
    never = {op.type for op in ops if not op_types.is_clonable(op)}
    if not never:
        kinds = ", ".join(sorted({op.type for op in ops}))
        return (
            f"whose clones might compute other bits ({kinds}): ops outside of the gradients read"
            " their outputs, or change their inputs"
        )
    way_out = "".join(f"; the loop {name!r} is not replayed: {why}" for name, why in loops.items())
    if not way_out and not never.isdisjoint(op_types.FUNCTIONAL):
        way_out = "; split these functions into smaller ones, or inline them"
    return f"that must not run twice ({', '.join(sorted(never))}){way_out}"


def why_nothing(step: CapturedStep, mode: str, peak: int, loops: Mapping[str, str]) -> str:
    """Return why no plan lowers the simulated peak of ``peak`` bytes. ``loops``: for each loop that
    is not replayed, by name, the reason."""
    graph = step.graph
    residual = [s for s in graph.residuals if graph.size[s]]
    total = graph.residual_bytes
    if not residual:
        return "the backward pass reads no forward tensor that takes memory"
    fixed = [s for s in residual if not graph.clonable[graph.producer[s]]]
    held = sum(int(graph.size[s]) for s in fixed)
    if 2 * held > total:
        ops = [step.source.ops[int(graph.producer[s])] for s in fixed]
        return (
            f"{held:,} of {total:,} bytes that the backward pass reads are computed by ops"
            f" {_why_once(ops, loops)}"
        )
    return (
        f"no choice of checkpoints (mode {mode!r}) lowers the simulated peak of {peak:,} "
        "bytes: the graph is too short or one op alone makes the peak"
    )
