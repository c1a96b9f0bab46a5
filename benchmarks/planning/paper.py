"""``python -m benchmarks.planning.paper``: the setting of Chen et al. 2016 (arXiv 1604.06174), planned from shapes alone.

The network of a thousand layers, batch 32, 224 x 224, is built symbolically, differentiated and planned; nothing runs, so that
tens of gigabytes are planned on a machine that has none of them. The paper reports 48 GB before and 7 GB after, at 30 % more
time:

- the 48 GB are an estimate for its ``sharing`` strategy (no card could run that), of intermediate results alone, to be compared
  with the peak here. MXNet prints 2^20 bytes as MB, so a GB is 2^30 bytes in this table;
- the 7 GB are what a card held while it trained ("using less than 7GB of GPU memory"): parameters, their gradients and
  their momentum as well. The sublinear plan's peak is to be compared with them after adding three times the parameters.

*Ours* is the fastest plan that the planner named with ``--planner`` finds within 4 GB, a module of
``memsaving_gradients.planners``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from benchmarks.bars import mark
from benchmarks.networks.deep import deep_resnet, units_of
from graph_tools.tf_private import graphs
from memsaving_gradients.analysis.strategies import strategies
from memsaving_gradients.capture.training_step import capture_step
from memsaving_gradients.planners import Limits
from memsaving_gradients.schedules.training_graph import TrainingGraph

RESULTS = Path(__file__).parents[1] / "results" / "paper.json"
GB = 2**30
#: Bytes and extra time that ours may take.
OURS, EXTRA = 4 * GB, 0.30


@dataclass(frozen=True)
class Figure:
    """One figure beside its bars."""

    what: str
    value: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Whether it lies between the bars."""
        return self.low <= self.value <= self.high


def main(arguments: list[str] | None = None) -> int:
    """Plan the network, print the table, keep it; 1 if a bar is missed."""
    options = _parse(arguments)
    found = planned(options.depth, options.batch, options.planner)
    judged = (options.depth, options.batch) == (1001, 32)
    figures = judge(found) if judged else []
    _print(options, found["rows"], figures, found["parameters"])
    seconds = found["seconds"]
    print(
        f"{found['ops']:,} ops; built in {seconds['built']:.0f} s, planned by ours in {seconds['planned']:.0f} s"
    )
    if judged:
        result: dict[str, Any] = {
            "planner": options.planner,
            "rows": found["rows"],
            "parameters": found["parameters"],
            "figures": [{**asdict(figure), "passed": figure.passed} for figure in figures],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(judged and not all(figure.passed for figure in figures))


def planned(
    depth: int, batch: int, planner: str, budget: Callable[[int], int] = lambda parameters: OURS
) -> dict[str, Any]:
    """The strategies, and the fastest plan that a planner finds within a budget, which may depend on the bytes of the parameters."""
    clock = time.perf_counter()
    graph, parameters = planned_graph(depth, batch)
    built = time.perf_counter() - clock
    rows = [asdict(row) for row in strategies(graph, parameters=parameters)]
    clock = time.perf_counter()
    module = importlib.import_module(f"memsaving_gradients.planners.{planner}")
    ours = module.plan(graph, Limits(budget=budget(parameters)))
    seconds = time.perf_counter() - clock
    extra = ours.extra_seconds / graph.total_seconds
    rows.append(
        {"name": planner, "peak": ours.peak, "extra": extra, "clones": ours.schedule.clones}
    )
    return {
        "rows": rows,
        "parameters": parameters,
        "ops": graph.length,
        "seconds": {"built": built, "planned": seconds},
    }


def judge(found: dict[str, Any]) -> list[Figure]:
    """The bars of the network of 1001 layers, batch 32."""
    rows = {row["name"]: row for row in found["rows"]}
    sublinear, ours = rows["sublinear plan"], found["rows"][-1]
    on_the_card = sublinear["peak"] + 3 * found["parameters"]
    return [
        Figure("sharing, GB (paper: 48)", rows["sharing"]["peak"] / GB, 48 * 0.8, 48 * 1.2),
        Figure("sublinear plan on the card, GB (paper: 7)", on_the_card / GB, 7 * 0.8, 7 * 1.2),
        Figure("sublinear plan, extra time (paper: 30 %)", sublinear["extra"], 0, 0.36),
        Figure("ours, GB", ours["peak"] / GB, 0, OURS / GB),
        Figure("ours, extra time", ours["extra"], 0, EXTRA),
    ]


def planned_graph(depth: int, batch: int) -> tuple[TrainingGraph, int]:
    """The training graph of a deep ResNet and the bytes of its parameters; nothing is allocated."""
    with tf.Graph().as_default():
        loss, weights = deep_resnet(depth, batch)
        border = graphs.creation_index(tf.no_op()) + 1
        grads = tf.gradients(loss, weights)
        step = capture_step(
            border, [loss], grads, batch=batch, hold_gradients=False, may_chain=False
        )
    return step.graph, sum(4 * weight.shape.num_elements() for weight in weights)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.planning.paper", description=__doc__)
    parser.add_argument("--depth", type=int, default=1001, help="layers; only 1001 is judged")
    parser.add_argument("--batch", type=int, default=32, help="examples; only 32 is judged")
    parser.add_argument("--planner", default="chen_budget", help="whose plan is ours")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="results file")
    return parser.parse_args(arguments)


def _print(
    options: argparse.Namespace, rows: list[dict[str, Any]], figures: list[Figure], parameters: int
) -> None:
    console = Console(width=100)
    units = ", ".join(map(str, units_of(options.depth)))
    table = Table(title=f"ResNet of {options.depth} layers ({units} units), batch {options.batch}")
    table.add_column("strategy")
    for heading in ("peak GB", "extra time", "ops run again"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"], f"{row['peak'] / GB:.2f}", f"{row['extra']:.1%}", f"{row['clones']:,}"
        )
    console.print(table)
    console.print(f"besides: parameters {parameters / GB:.2f} GB (1 GB = 2^30 bytes)")
    if figures:
        table = Table(title="bars")
        table.add_column("figure")
        for heading in ("value", "from", "to", ""):
            table.add_column(heading, justify="right")
        for figure in figures:
            ends = (f"{figure.low:.2f}", f"{figure.high:.2f}")
            table.add_row(figure.what, f"{figure.value:.3f}", *ends, mark(figure.passed))
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
