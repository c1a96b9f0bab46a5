"""Plans by a mode: the plan of least memory, the plan that recomputes cheap ops, or the plan that
keeps named tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from graph_tools.memory.liveness import timeline
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine.feedback.notices import warn_nothing_saved
from memsaving_gradients.engine.planning.outcome import (
    Outcome,
    captured,
    described,
    nothing_else,
)
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.planners import Limits, Proposal, cheap_ops, least_memory, named
from memsaving_gradients.planners.meter import Found, is_clearly_less
from memsaving_gradients.planners.short_sums import left_alone
from memsaving_gradients.planners.with_storage import planner_that_stores
from memsaving_gradients.reports.describe import why_nothing
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.transforms.packing.packing import packable

__all__ = ["by_mode"]

_BY_MODE = {"memory": least_memory.plan, "speed": cheap_ops.plan}


def by_mode(site: Site, mode: str) -> Outcome | None:
    """Return the outcome of a mode or of named checkpoints; ``None``, after a warning, if
    gradients stay plain."""
    step = captured(site)
    if step is None:
        return None
    original, before = site.original()
    proposal = _by_mode(site, step, mode)
    packs = mode == "memory" and site.options.encode is not None
    tries = packs and _packing_may_help(step, proposal, packable(site.capture()))
    for parts in (True, False) if tries else ():
        if not site.pack(parts=parts):
            break
        packed = site.capture()
        other = _by_mode(site, packed, mode)
        if is_clearly_less(other.peak, proposal.peak):
            step, proposal = packed, other
            break
        both = bool(site.packed.masks and site.packed.parts)
        site.unpack()
        if not both:
            break
    most = simulate(step.graph, plain(step.graph)).peak
    schedule = proposal.schedule
    works = schedule.clones or schedule.chained or schedule.stored
    if site.differs_from_plain and (not works or proposal.peak >= most):
        return nothing_else(site, mode, mode)
    if not works or (proposal.peak >= most and mode in _BY_MODE):
        warn_nothing_saved(site.graph, why_nothing(step, mode, most, site.loops.kept))
        return None
    if proposal.peak >= most:
        warn_nothing_saved(
            site.graph,
            f"the named checkpoints do not lower the simulated peak ({proposal.peak:,} bytes, plain"
            f" training {most:,}); checkpoints='memory' finds better ones",
            what="tensors are recomputed, but that saves no memory",
        )
    found = Found(proposal, proposal.peak, None)
    unpacked = original if site.differs_from_plain else None
    plan = described(site, step, found, mode, mode, before=before, unpacked=unpacked)
    return Outcome(step, proposal, plan)


def _packing_may_help(step: CapturedStep, proposal: Proposal, tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether the plan's peak would be clearly lower if ``tensors`` took no bytes. (Packing
    is expensive: it builds ops, and planning starts again.)"""
    graph, simulation = step.graph, proposal.simulation
    roots = graph.storage[[step.source.value(tensor) for tensor in tensors]]
    if not len(roots):
        return False
    owned = np.flatnonzero(np.isin(graph.storage[simulation.owner], roots))
    born, dies, size = (values[owned] for values in simulation.buffers)
    without = simulation.bytes_alive - timeline(born, dies, size, len(simulation.bytes_alive))
    return is_clearly_less(int(without.max()), simulation.peak)


def _by_mode(site: Site, step: CapturedStep, mode: str) -> Proposal:
    limits = Limits(
        keep=site.keep(step, "marked" if mode == "collection" else "named"),
        accumulate=site.options.accumulate,
        seconds=site.options.planning_seconds,
        progress=site.progress,
        host=site.call.room_on_host,
        early=site.call.early,
    )
    proposal = planner_that_stores(_BY_MODE.get(mode, named.plan))(step.graph, limits)
    return left_alone(step.graph, proposal, None)
