"""`explain`: where the memory of a training step goes, and what each budget costs, before a step is
run.

The step is traced as TensorFlow would trace it, and its gradients are not rewired. The graph of the
whole step is then simulated (:mod:`graph_tools.memory.executor`). The parts are the values alive at
the first moment that comes within a hundredth of the peak. The search that also serves errors about
budgets finds the least budget. :mod:`memsaving_gradients.planners.budget_curve` plans for a row of
budgets, evenly spread from plain training down to the least.

This takes some seconds in addition to tracing, and half a minute for a network of 1001 layers.
There, the least plan is not rewritten to see the bytes that the executor adds to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.graph.capture import OpGraph
from graph_tools.memory.timeline import Timeline
from graph_tools.memory.whole_function import simulate_function
from graph_tools.ops.elements import most_chosen
from graph_tools.tf_private import graphs
from memsaving_gradients.analysis.as_compiled import in_xlas_bytes
from memsaving_gradients.analysis.study import Study, asked
from memsaving_gradients.engine.feedback.progress import showing
from memsaving_gradients.engine.no_gc import uncollected
from memsaving_gradients.planners import Limits, Proposal, budget_curve
from memsaving_gradients.reports.describe import source_line
from memsaving_gradients.reports.explanation import Explanation, Layer, Parts, Point
from memsaving_gradients.schedules.simulate import TIE

__all__ = ["explain"]

Curve = Sequence[tuple[int, Proposal]]

#: Layout: points of the curve, including plain training and the least budget.
POINTS = 20


@tf.autograph.experimental.do_not_convert
def explain(fn: Any, *args: Any, **options: Any) -> Explanation:
    """Return where the memory of a training step goes, and the extra time that each budget costs.
    No step is run.

    Parameters
    ----------
    fn
        A training step: a function or ``tf.function`` that asks for gradients (``tf.gradients``,
        ``tf.GradientTape``, `gradients`), or a compiled Keras model, which is explained by its
        ``train_step``.
    *args
        Arguments of the step: tensors, arrays or ``tf.TensorSpec``. Only shapes and dtypes matter.
        For a model: the parts of a batch for ``train_step``, such as x and y.
    **options
        ``batch_size``, ``loop_steps``, ``hold_gradients``, ``xla``, ``accumulate``, ``profile``,
        ``progress`` as in `memsaving_gradients.gradients`. With ``xla=True``, XLA compiles the step
        twice, and budgets are in the bytes that XLA assigns. Otherwise, budgets are in simulated
        bytes, even if XLA compiles the step.

    Returns
    -------
    Explanation
        Parts, layers, the curve of budgets, the least budget. It prints as a table.

    Raises
    ------
    ArgumentError
        If ``fn`` asks for no gradients, or for none that can be rewired.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> def step(x):
    ...     y = x
    ...     for _ in range(16):
    ...         y = tf.sin(y)
    ...     return tf.gradients(y, x)
    >>> found = ms.explain(step, tf.TensorSpec([1024]))
    >>> found.parts.activations, found.least.share < 0.6
    (61440, True)
    """
    known = asked(options)
    with uncollected():
        found = _explanation(Study(fn, args, known))
        return in_xlas_bytes(found, fn, args, known) if known.xla else found


def _explanation(study: Study) -> Explanation:
    site, graph = study.site, study.graph
    ops, run = simulate_function(site.graph, site.options.batch, site.home)
    parts, layers = _at_peak(study, ops, run)
    points = [Point(study.plain_budget, study.plain_budget / max(study.plain, 1), 0.0, 0.0, 0)]
    lowest = study.least() if study.plain else None
    if lowest is not None:
        plan, need = lowest.proposal, lowest.need
        found = _between(study, plan.peak)
        points.append(_point(study, found, plan, need))
        adds = study.executor_adds(lowest)
        for _, proposal in found:
            budget = int(study.budget_for(study.need(proposal)) * adds)
            # Budgets below ``need`` would be refused.
            if budget > need:
                points.append(_point(study, found, proposal, budget))
        share = 1 / max(study.plain, 1)
        points += [Point(n, n * share, extra, 0.0, 0) for n, extra in study.loops_alone]
    falling = _falling(points)
    return Explanation(
        parts=parts,
        allocated_plain=study.plain,
        layers=tuple(layers),
        curve=tuple(falling),
        seconds=graph.total_seconds,
        computations=study.computations,
        sums=study.sums,
        assumed_batch=site.options.batch if study.assumes_batch else None,
        assumed_steps=site.assumed_steps,
        assumed_rows=most_chosen(ops.ops, site.options.batch),
        xla=site.xla,
    )


def _between(study: Study, least: int) -> Curve:
    """Return plans for budgets between plain training and ``least``, in bytes asked for."""
    search = study.search
    assert search is not None
    most = search.meter.plain.peak
    budgets = np.linspace(most, min(least, most), POINTS)[1:-1].astype(int).tolist()
    with showing(study.site.options.progress) as progress:
        limits = Limits(keep=search.keep, accumulate=search.accumulate, progress=progress)
        return budget_curve.plans(search.meter.graph, limits, budgets)


def _point(study: Study, found: Curve, proposal: Proposal, budget: int) -> Point:
    extra = study.extra_time(proposal)
    # A plan that needs ``budget`` bytes asks for no more than these, so lower bounds for larger
    # budgets hold for it.
    bounds = (plan.lower_bound for within, plan in found if within >= budget)
    return Point(
        budget=budget,
        share=budget / max(study.plain, 1),
        extra_time=extra,
        lower_bound=min(study.of_step(max(bounds, default=0.0)), extra),
        clones=proposal.schedule.clones,
    )


def _falling(points: Sequence[Point]) -> list[Point]:
    """Return points from the largest budget to the least, each slower than the one before."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.extra_time, point.budget)):
        if not found or point.budget < found[-1].budget:
            found.append(point)
    return found


def _at_peak(study: Study, ops: OpGraph, run: Timeline) -> tuple[Parts, list[Layer]]:
    """Return the parts and layers alive at the first moment that comes close to the step's peak."""
    site = study.site
    first = graphs.creation_index(site.call.first_operation)
    late = [graphs.creation_index(op) >= first for op in ops.ops]
    producer, storage = ops.producer.tolist(), ops.storage.tolist()
    residual = {storage[v] for op, values in enumerate(ops.inputs) if late[op] for v in values}
    results = {storage[ops.value(t)] for t in site.grads if t.op.name in ops.position}
    # Chance decides which of the moments that tie with the peak takes most.
    at = int(np.argmax(run.bytes_alive >= (1 - TIE) * run.peak))
    born, dies, size = run.buffers
    total = {"gradients": 0, "activations": 0, "temporaries": 0}
    layers: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for number in np.flatnonzero((born <= at) & (dies >= at)).tolist():
        value = run.owner[number] if number < len(run.owner) else -1
        kind = "temporaries"
        if value in results:
            kind = "gradients"
        elif value in residual and not late[producer[value]]:
            kind = "activations"
            scope = ops.ops[producer[value]].name.rpartition("/")[0]
            layers[scope][value] = int(size[number])
        total[kind] += int(size[number])
    found = [
        Layer(scope, sum(values.values()), source_line(_largest(ops, values)))
        for scope, values in layers.items()
    ]
    found.sort(key=lambda layer: (-layer.bytes, layer.name))
    return Parts(*study.variables, **total), found


def _largest(ops: OpGraph, values: dict[int, int]) -> tf.Operation:
    return ops.tensor(max(values, key=lambda value: (values[value], -value))).op
