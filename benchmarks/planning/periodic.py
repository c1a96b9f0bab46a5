"""``python -m benchmarks.planning.periodic``: our extra time beside that of periodic checkpoints, at the same memory. Nothing runs.

A network of n blocks is cut into k segments of equally many, for every k from 2 to 2√n, as PyTorch's ``checkpoint_sequential``
does: the inputs of segments are kept, all segments but the last one are made again. The peak of that is the budget of ours. Both
are simulated on the same training graph, and the periodic plan is given what our planners have: it makes each value again
just before it is read, and only those that are. (``checkpoint_sequential`` runs whole segments again: the column *literal*.)

Costs are measured on this device (``profile=True``), estimated with ``--static``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Figure, chosen, mark, options_for, print_figures, write
from benchmarks.networks import build
from graph_tools.tf_private import graphs
from memsaving_gradients.capture.training_step import CapturedStep, capture_step
from memsaving_gradients.planners import Limits, named
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

RESULTS = Path(__file__).parents[1] / "results" / "periodic.json"
#: Our extra time over the periodic plan's: the median over segments and models, and the most.
MEDIAN, MOST = 0.6, 1.0


#: A block's end: the number of a storage, or the name of a layer.
End = TypeVar("End")


@dataclass(frozen=True)
class Network:
    """A network and the names of the layers (or ops) behind which a block ends."""

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


def main(arguments: list[str] | None = None) -> int:
    """Plan what was asked for, print the table, keep it; 1 if a bar is missed."""
    options = _parse(arguments)
    names = chosen(NETWORKS, options.only)
    if not names:
        return 2
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    for name in names:
        clock = time.perf_counter()
        network = NETWORKS[name]
        step, ends = captured(network, profile=not options.static)
        console.print(
            f"{name}: {step.graph.length:,} ops, {len(ends) + 1} blocks, {time.perf_counter() - clock:.0f} s"
        )
        for segments, result in compare(step.graph, ends, options.planner):
            case = f"{name}-{segments}"
            results[case] = {"network": name, "segments": segments, **result}
            console.print(f"{case}: {result['seconds']:.1f} s", highlight=False)
            write(options.json, results)
    figures = judge(results)
    write(options.json, results, figures)
    print_results(results, figures, Console(width=120))
    return int(not all(figure.passed for figure in figures))


def captured(network: Network, *, profile: bool) -> tuple[CapturedStep, list[int]]:
    """The training step of a network, and the storages of the outputs of all blocks but the last one, in order."""
    step = captured_step(network.model, network.options, profile=profile)
    return step, block_ends(step, network.blocks)


def captured_step(model_name: str, options: dict[str, Any], *, profile: bool) -> CapturedStep:
    """The training step of a network of the zoo, with costs that are measured or estimated."""
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


def block_ends(step: CapturedStep, pattern: str) -> list[int]:
    """The storages behind which blocks end, of `named_ends`."""
    return list(named_ends(step, pattern).values())


def named_ends(step: CapturedStep, pattern: str) -> dict[str, int]:
    """The storages behind which blocks end, in order: what the last op of each layer makes whose name matches ``pattern``; by names of layers.

    Keras numbers scopes that are entered again: ``_1`` behind a name counts for nothing.

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
    """What ``checkpoint_sequential`` keeps: the inputs of all segments but the first one.

    Examples
    --------
    >>> cuts([10, 20, 30, 40, 50, 60], 3)  # seven blocks: two, two, and three
    [20, 40]
    """
    each = (len(ends) + 1) // segments
    return [ends[each * number - 1] for number in range(1, segments)]


def compare(
    graph: TrainingGraph, ends: Sequence[int], planner: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """For each number of segments the periodic plan and ours within its peak."""
    for segments, row in periodic_plans(graph, ends):
        yield segments, beside(graph, row, planner)


def periodic_plans(
    graph: TrainingGraph, ends: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """For each number of segments what the periodic plan takes."""
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
    """A row of a periodic plan, with ours within its peak."""
    module = importlib.import_module(f"memsaving_gradients.planners.{planner}")
    clock = time.perf_counter()
    ours = module.plan(graph, Limits(budget=row["peak"]))
    seconds, extra = time.perf_counter() - clock, ours.extra_seconds / graph.total_seconds
    return {
        **row,
        "ours": ours.peak,
        "ours_extra": extra,
        "bound": ours.lower_bound / graph.total_seconds,
        "ratio": extra / row["periodic_extra"],
        "seconds": seconds,
    }


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The bars."""
    ratios = [row["ratio"] for row in results.values()]
    over = [row["ours"] / row["peak"] for row in results.values()]
    many = len(ratios)
    return [
        Figure("our extra time / periodic, median", statistics.median(ratios), MEDIAN, count=many),
        Figure("our extra time / periodic, most", max(ratios), MOST, count=many),
        Figure("our peak / periodic, most", max(over), 1.0, count=many),
    ]


def print_results(
    results: Mapping[str, Mapping[str, Any]], figures: Sequence[Figure], console: Console
) -> None:
    """Print a row for each network and number of segments, and the bars below."""
    table = Table(title="extra time at the memory of periodic checkpoints", header_style="bold")
    table.add_column("network", no_wrap=True)
    headings = ("segments", "peak MB", "of plain", "literal", "periodic", "ours", "bound", "ratio")
    for heading in (*headings, "", "plan s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.values():
        table.add_row(
            row["network"],
            str(row["segments"]),
            f"{row['peak'] / 1e6:,.1f}",
            f"{row['peak'] / row['plain']:.2f}",
            *(
                f"{row[key]:.1%}"
                for key in ("literal_extra", "periodic_extra", "ours_extra", "bound")
            ),
            f"{row['ratio']:.3f}",
            mark(row["ratio"] <= MOST and row["ours"] <= row["peak"]),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    print_figures(figures, console)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("periodic", __doc__, RESULTS, "names of networks")
    parser.add_argument("--static", action="store_true", help="estimated costs, not measured ones")
    parser.add_argument(
        "--planner", default="auto", help="a module of memsaving_gradients.planners"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
