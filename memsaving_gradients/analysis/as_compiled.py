"""The bytes that XLA assigns to a step, plain and with the plan of least memory, and the curve of
budgets in these bytes.

XLA compiles these two only. The bytes of plans between them are taken from the line through both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graph_tools.editing.rewiring import Rewiring
from graph_tools.errors import GraphError
from graph_tools.tf_private import autodiff, graphs
from graph_tools.warn import warn
from graph_tools.xla.program import Program
from memsaving_gradients.analysis.study import largest, traced
from memsaving_gradients.engine.assigned.trials import Trials
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.site.site import Site
from memsaving_gradients.errors import PlanNote
from memsaving_gradients.reports.explanation import Explanation
from memsaving_gradients.reports.explanation_values import AtPeak, Compiled, Point

__all__ = ["in_xlas_bytes"]


def in_xlas_bytes(
    found: Explanation, fn: Any, args: Sequence[Any], options: Options
) -> Explanation:
    """Return an explanation with budgets in the bytes that XLA assigns. If XLA cannot compile the
    step before it runs, say so in a note and return ``found``."""
    sites, graph = traced(fn, args, options)
    try:
        with autodiff.compiling(graph):
            trials = Trials(graph, [_with_stand_ins(largest(sites))])
            plain = _compiled("plain training", trials.simulated, trials.compiled())
            trial = trials.least()
    except GraphError as error:
        warn(f"budgets are simulated bytes, and XLA assigns more: {error}.", PlanNote)
        return found
    assert trial.program is not None
    least = _compiled("the plan of least memory", trial.simulated, trial.program)
    curve = [_point(found.curve[0], plain.assigned, plain)]
    if least.assigned < plain.assigned:
        curve += [_between(point, plain, least) for point in found.curve[1:-1]]
        curve.append(_point(found.least, least.assigned, plain))
    return replace(
        found,
        allocated_plain=plain.assigned,
        curve=tuple(_within_compiled(curve)),
        compiled=(plain, least),
    )


def _with_stand_ins(site: Site) -> Site:
    """Return the same computation, after letting the rest of the step read identities of its
    gradients. Rewriting can then point these identities to other tensors."""
    known, rewiring = set(site.call.operations), Rewiring()
    given = []
    for grad in site.grads:
        readers = [reader for reader in grad.consumers() if reader not in known]
        with graphs.outside_scopes(site.graph):
            given.append(tf.identity(grad))
        for reader in readers:
            for k, tensor in enumerate(reader.inputs):
                if tensor is grad:
                    rewiring.point(reader, k, given[-1])
    return Site(site.call, given)


def _compiled(name: str, simulated: int, program: Program) -> Compiled:
    alive = program.assignment.peak.values
    return Compiled(
        name=name,
        simulated=simulated,
        assigned=program.assignment.transient,
        results=program.assignment.results,
        seconds=program.seconds,
        at_peak=tuple(AtPeak(one.bytes, one.instruction, one.op_names) for one in alive),
    )


def _between(point: Point, plain: Compiled, least: Compiled) -> Point:
    """Return a point of the curve, with its budget on the line through the two compiled steps."""
    slope = (plain.assigned - least.assigned) / max(plain.simulated - least.simulated, 1)
    return _point(point, int(plain.assigned - slope * (plain.simulated - point.budget)), plain)


def _point(point: Point, assigned: int, plain: Compiled) -> Point:
    share = assigned / max(plain.assigned, 1)
    return replace(point, budget=assigned, share=share, simulated=point.budget)


def _within_compiled(curve: Sequence[Point]) -> list[Point]:
    """Return the compiled points, and the points whose budgets are between theirs."""
    least = curve[-1].budget
    inner = [point for point in curve[1:-1] if least < point.budget < curve[0].budget]
    return [curve[0], *inner, *curve[1:][-1:]]
