"""Our extra time and the extra time of periodic checkpoints, at the same memory. Nothing runs.

A network of n blocks is cut into k segments of equally many blocks, for every k from 2 to 2√n, as
by PyTorch's ``checkpoint_sequential``. The periodic plan keeps the inputs of segments, and
recomputes all segments but the last one. Its peak is the budget of our plan. Both are simulated on
the same training graph. Like our planners, the periodic plan recomputes each value just before it
is read, and only values that are read. (``checkpoint_sequential`` recomputes whole segments: the
column *literal*.)

Costs are measured on this device (``profile=True``), or estimated with ``--set static=yes``.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting
from benchmarks.networks import build
from benchmarks.settings import flag, planner
from benchmarks.tables import mark
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import CapturedStep, capture_step
from memsaving_gradients.planners import Limits, find_planner, named
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

#: Bars for our extra time over the periodic plan's: the median over segments and models, the most.
MEDIAN, MOST = 0.6, 1.0


#: A block's end: the number of a storage, or the name of a layer.
End = TypeVar("End")


@dataclass(frozen=True)
class Network:
    """A network, and a pattern of the names of layers (or ops) that end a block."""

    model: str
    options: dict[str, Any]
    blocks: str


NETWORKS = {
    "resnet101": Network(
        "application", {"name": "ResNet101", "batch": 8}, r"pool1_pool|conv\d_block\d+_out"
    ),
    "densenet121": Network(
        "application",
        {"name": "DenseNet121", "batch": 8},
        r"pool\d|pool\d_pool|conv\d_block\d+_concat",
    ),
    "transformer48": Network(
        "transformer",
        {"layers": 48, "batch": 8, "length": 128, "width": 256, "vocabulary": 1024, "named": True},
        r"block\d+",
    ),
}


def run(job: Job) -> dict[str, Any]:
    """Plan a network for every number of segments."""
    network = NETWORKS[job.row]
    step = captured_step(network.model, network.options, profile=not job.settings["static"])
    ends = list(named_ends(step, network.blocks).values())
    job.say(f"{job.row}: {step.graph.length:,} ops, {len(ends) + 1} blocks")
    rows = {
        str(segments): beside(step.graph, row, job.settings["planner"])
        for segments, row in periodic_plans(step.graph, ends)
    }
    return {"segments": rows}


def captured_step(model_name: str, options: dict[str, Any], *, profile: bool) -> CapturedStep:
    """Return the training step of a network of the zoo, with measured or estimated costs."""
    model = build(model_name, **options)
    found: list[CapturedStep] = []

    def step(*batch: tf.Tensor) -> tf.Tensor:
        loss = model.loss(*batch)
        border = graphs.creation_index(tf.no_op()) + 1
        grads = tf.gradients(loss, list(model.variables))
        found.append(
            capture_step(
                border,
                [loss],
                [tf.convert_to_tensor(grad) for grad in grads],
                batch=1,
                hold_gradients=False,
                may_chain=True,
                profile=profile,
            )
        )
        return loss

    tf.function(step, autograph=False).get_concrete_function(*map(tf.constant, model.batch))
    return found[0]


def named_ends(step: CapturedStep, pattern: str) -> dict[str, int]:
    """Return the storages at the ends of blocks, in order, by names of layers.

    A block ends with the output of the last op of a layer whose name matches ``pattern``. Keras
    numbers scopes that it enters again: a suffix ``_1`` of a name is ignored.

    Raises
    ------
    ValueError
        No layer matches.
    """
    graph, last = step.graph, dict[str, int]()
    for number, op in enumerate(step.source.ops[: graph.first_backward]):
        for part in op.name.split("/"):
            match = re.fullmatch(rf"({pattern})(_\d+)?", part)
            if match and graph.writes[number]:
                last[match[1]] = int(graph.storage[graph.writes[number][0]])
    if not last:
        raise ValueError(f"no layer is called {pattern!r}")
    by_root = {root: name for name, root in last.items()}
    roots = sorted(by_root, key=lambda root: int(graph.producer[root]))
    return {by_root[root]: root for root in roots}


def cuts(ends: Sequence[End], segments: int) -> list[End]:
    """Return the ends that ``checkpoint_sequential`` keeps: all segments' inputs but the first's.

    Examples
    --------
    >>> cuts([10, 20, 30, 40, 50, 60], 3)  # seven blocks: two, two, and three
    [20, 40]
    """
    each = (len(ends) + 1) // segments
    return [ends[each * number - 1] for number in range(1, segments)]


def periodic_plans(
    graph: TrainingGraph, ends: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each number of segments with the figures of its periodic plan."""
    whole = simulate(graph, plain(graph, graph.sums))
    blocks, total = len(ends) + 1, graph.total_seconds
    for segments in range(2, min(blocks, math.floor(2 * math.sqrt(blocks))) + 1):
        kept = cuts(ends, segments)
        periodic = named.plan(graph, Limits(keep=dict.fromkeys(kept, "segment")))
        behind = int(graph.producer[kept[-1]]) + 1
        row = {
            "plain": whole.peak,
            "peak": periodic.peak,
            "periodic_extra": periodic.extra_seconds / total,
            "literal_extra": float(graph.seconds[:behind].sum()) / total,
        }
        yield segments, row


def beside(graph: TrainingGraph, row: Mapping[str, Any], planner: str) -> dict[str, Any]:
    """Return the row of a periodic plan, with the figures of our plan within its peak."""
    clock = time.perf_counter()
    ours = find_planner(planner)(graph, Limits(budget=row["peak"]))
    seconds, extra = time.perf_counter() - clock, ours.extra_seconds / graph.total_seconds
    return {
        **row,
        "ours": ours.peak,
        "ours_extra": extra,
        "bound": ours.lower_bound / graph.total_seconds,
        "ratio": extra / row["periodic_extra"],
        "seconds": seconds,
    }


def _every(results: Results) -> list[Mapping[str, Any]]:
    return [row for result in results.values() for row in result["segments"].values()]


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    rows = _every(results)
    if not rows:
        return []
    ratios, many = [row["ratio"] for row in rows], len(rows)
    over = max(row["ours"] / row["peak"] for row in rows)
    return [
        Figure("our extra time / periodic, median", statistics.median(ratios), MEDIAN, count=many),
        Figure("our extra time / periodic, most", max(ratios), MOST, count=many),
        Figure("our peak / periodic, most", over, 1.0, count=many),
    ]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network and number of segments."""
    for network, result in results.items():
        for segments, row in result["segments"].items():
            extra = ("literal_extra", "periodic_extra", "ours_extra", "bound")
            yield (
                network,
                segments,
                f"{row['peak'] / 1e6:,.1f}",
                f"{row['peak'] / row['plain']:.2f}",
                *(f"{row[key]:.1%}" for key in extra),
                f"{row['ratio']:.3f}",
                mark(row["ratio"] <= MOST and row["ours"] <= row["peak"]),
                f"{row['seconds']:.1f}",
            )


COLUMNS = Columns(
    "extra time at the memory of periodic checkpoints",
    "network | segments | peak MB | of plain | literal | periodic | ours | bound | ratio |  |"
    " plan s",
    lines,
)
EXPERIMENT = Experiment(
    "periodic",
    rows=lambda settings: NETWORKS,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    settings={
        "static": Setting(False, flag, "estimated costs, not measured ones: yes"),
        "planner": planner(),
    },
)
