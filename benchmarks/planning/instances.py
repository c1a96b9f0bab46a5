"""``python -m benchmarks.planning.instances``: planners on layer-level training steps, as they are compared in the literature.

Nothing runs: forward and backward layers are the nodes of a graph, forward ones may be run again (all of them, where the graph does
not say which are which), and a budget is a share of the peak of running them in the given order. Without ``--data`` the graphs are made from the shapes of well-known networks
(:mod:`benchmarks.planning.layered`). ``--data FOLDER`` reads public ones: node-link JSON as in the repository
``haoming-codes/moccasin``, nodes in the order in which they run. Nodes have ``cost_ram`` (bytes) and ``cost_cpu``, or ``out_cost`` and
``duration``; and ``backward``, if they say that much. The order may stand in ``graph["order"]`` instead.

Beside our figures stand the best known ones, for the instances that have some. They come from proofs of optimality by constraint
programming (Moccasin's retention intervals, arXiv 2304.14463, with up to three of them for a value) or of Checkmate's integer program
(arXiv 1910.02653), the random graphs' from the former. They belong to a graph, not to a name: numbers of nodes and edges, the
peak and the cost of all nodes must agree.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import shares
from benchmarks.bars import Figure, mark, options_for, print_figures, write
from benchmarks.planning.layered import NETWORKS, Instance, random_layered
from memsaving_gradients.planners import Limits
from memsaving_gradients.schedules.validation import problem_of

RESULTS = Path(__file__).parents[1] / "results" / "instances.json"

BUDGETS = (0.9, 0.8, 0.6, 0.5)
#: The most seconds to plan, for proofs and large graphs more, and points (hundredths) above the best known extra time.
SECONDS, SECONDS_LONG, POINTS = 10.0, 300.0, 0.1
#: For random layered graphs of this many nodes and more: the most extra time in hundredths of the step's, by budget.
LARGE, MOST_EXTRA = 500, {0.9: 5.0, 0.8: 10.0}
#: Seconds that a search on those is given.
SEARCHED = 280.0

#: For nodes, edges, peak and cost: extra time by share of the peak, as published or proven, in hundredths of the step's.
KNOWN: dict[tuple[int, int, int, int], dict[float, float]] = {
    # VGG16, batch 256, and U-Net on VGG, 416 × 608, batch 32: profiles of a V100
    (45, 87, 15_825_108_992, 15_500): {0.95: 0.77, 0.9: 1.97, 0.85: 1.97},
    (71, 148, 20_959_461_376, 31_005): {0.8: 1.98, 0.6: 4.45, 0.45: 9.32, 0.4: 13.11},
    # FCN8 on VGG, 416 × 608, batch 32: multiplications
    (73, 149, 13_484_795_520, 10_275_337_746_048): {0.9: 0.03, 0.8: 0.15, 0.7: 0.89},
    # random layered graphs of 100 and 250 nodes
    (100, 236, 46_319, 47_769): {0.9: 0.79, 0.8: 2.30},
    (250, 944, 146_840, 125_569): {0.9: 0.90},
}


def main(arguments: list[str] | None = None) -> int:
    """Plan what was asked for, print the table, keep it; 1 if a bar is missed."""
    options = _parse(arguments)
    instances = _instances(options)
    instances = [i for i in instances if fnmatch.fnmatch(i.name, options.only)]
    if not instances:
        print(f"--only {options.only!r} matches no instance", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    results: dict[str, Any] = {}
    for instance in instances:
        for share in options.budgets:
            name = f"{instance.name} {share:g}"
            results[name] = planned(instance, share, options.planner)
            console.print(f"{name}: {results[name]['seconds']:.1f} s", highlight=False)
        write(options.json, results)
    figures = judge(results)
    write(options.json, results, figures)
    print_results(results, figures, Console(width=130))
    return int(not all(figure.passed for figure in figures))


def _instances(options: argparse.Namespace) -> list[Instance]:
    if options.layered:
        return [random_layered(nodes) for nodes in options.layered]
    return read_folder(options.data) if options.data else [make() for make in NETWORKS]


def planned(instance: Instance, share: float, planner: str) -> dict[str, Any]:
    """What a planner makes of an instance within a share of its peak."""
    graph = instance.graph()
    budget = int(share * instance.peak)
    module = importlib.import_module(f"memsaving_gradients.planners.{planner}")
    large = instance.name.startswith("random") and len(instance.reads) >= LARGE
    limits = Limits(budget=budget, seconds=SEARCHED if large else None)
    clock = time.perf_counter()
    proposal = module.plan(graph, limits)
    seconds = time.perf_counter() - clock
    problem = problem_of(graph, proposal.schedule) if instance.first_backward else None
    graph_key = len(instance.reads), instance.edges, instance.peak, int(sum(instance.seconds))
    known = KNOWN.get(graph_key, {})
    return {
        "instance": instance.name,
        "planner": planner,
        "large": large,
        "nodes": len(instance.reads),
        "edges": instance.edges,
        "peak": instance.peak,
        "share": share,
        "budget": budget,
        "found": proposal.peak,
        "fits": proposal.peak <= budget,
        "possible": instance.least <= budget,
        "least": instance.least / instance.peak,
        "extra": 100 * proposal.extra_seconds / graph.total_seconds,
        "bound": 100 * proposal.lower_bound / graph.total_seconds,
        "optimal": proposal.optimal,
        "known": known.get(share),
        "seconds": seconds,
        "problem": problem or None,
    }


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The bars."""
    rows = list(results.values())
    missed = [row for row in rows if row["known"] is not None and not row["fits"]]
    above = [
        row["extra"] - row["known"] for row in rows if row["known"] is not None and row["fits"]
    ]
    figures = [
        *(
            Figure("seconds to plan", max(seconds), limit, count=len(seconds))
            for limit, seconds in _seconds(rows).items()
        ),
        Figure("schedules that are not valid", sum(bool(row["problem"]) for row in rows), 0),
    ]
    figures += (
        Figure(
            f"{row['instance']} at {row['share']:g}: extra %",
            row["extra"] if row["fits"] else float("inf"),
            MOST_EXTRA[row["share"]],
        )
        for row in rows
        if row["large"] and row["share"] in MOST_EXTRA
    )
    if above or missed:
        figures.append(Figure("budgets met in the literature, not here", len(missed), 0))
    if above:
        figures.append(
            Figure("points above the best known extra time", max(above), POINTS, count=len(above))
        )
    return figures


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[float, list[float]]:
    """By how long planning may take, how long it took."""
    found: dict[float, list[float]] = {}
    for row in rows:
        long = row["planner"] == "exact" or row["large"]
        found.setdefault(SECONDS_LONG if long else SECONDS, []).append(row["seconds"])
    return found


def print_results(
    results: Mapping[str, Mapping[str, Any]], figures: Sequence[Figure], console: Console
) -> None:
    """Print a row for each instance and budget, and the bars below."""
    table = Table(
        title="layer-level training steps: extra time in % of the step", header_style="bold"
    )
    table.add_column("instance", no_wrap=True)
    for heading in ("nodes", "budget", "met", "extra %", "bound %", "best known", "", "plan s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results.values():
        known = row["known"]
        if row["fits"]:
            extra = f"{row['extra']:.2f}" + (" =" if row["optimal"] else "")
        else:
            extra = f"least {row['found'] / row['peak']:.3f}"
        verdict = ""
        if known is not None:
            verdict = mark(row["fits"] and row["extra"] - known <= POINTS)
        elif not row["possible"]:
            verdict = f"from {row['least']:.3f}"
        table.add_row(
            row["instance"],
            str(row["nodes"]),
            f"{row['share']:g}",
            f"{row['found'] / row['budget']:.3f}",
            extra,
            f"{row['bound']:.2f}",
            "" if known is None else f"{known:.2f}",
            verdict,
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    console.print(
        "=: proven to be the least in this order. least: no plan was found that fits, this share is the lowest found. "
        "from: below this share of the peak (the largest inputs + output) nothing can fit.",
        highlight=False,
    )
    print_figures(figures, console)


def read_folder(folder: Path) -> list[Instance]:
    """The instances in the JSON files of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> Instance:
    """The instance in one file.

    Raises
    ------
    ValueError
        The file is no graph, or its nodes have no costs, or they do not stand in an order in which they can run.
    """
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or "nodes" not in document:
        raise ValueError(f"{path} is no graph in node-link JSON")
    nodes = {_name(node): node for node in document["nodes"]}
    order = [name for name in document.get("graph", {}).get("order", nodes) if name in nodes]
    position = {name: k for k, name in enumerate(order)}
    reads: list[dict[int, None]] = [{} for _ in order]
    for link in document["links" if "links" in document else "edges"]:
        tail, head = (
            (link["source"], link["target"]) if "source" in link else (link["0"], link["1"])
        )
        reads[position[head]][position[tail]] = None
    if any(maker >= reader for reader, read in enumerate(reads) for maker in read):
        raise ValueError(f"{path}: nodes are not listed in an order in which they can run")
    if not all(nodes[name].keys() & keys for name in order for keys in (_BYTES, _COSTS)):
        raise ValueError(f"{path}: nodes need cost_ram and cost_cpu, or out_cost and duration")
    size, seconds = (
        tuple(nodes[name][next(iter(nodes[name].keys() & keys))] for name in order)
        for keys in (_BYTES, _COSTS)
    )
    late = [bool(nodes[name].get("backward")) for name in order]
    first = late.index(True) if True in late else 0
    if not all(late[first:]):
        first = 0
    return Instance(path.stem, tuple(tuple(sorted(read)) for read in reads), size, seconds, first)


_BYTES, _COSTS = {"cost_ram", "out_cost"}, {"cost_cpu", "duration"}


def _name(node: Mapping[str, Any]) -> Any:
    return node["id"] if "id" in node else node["name"]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("instances", __doc__, RESULTS, "names of instances")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of instances to read")
    parser.add_argument(
        "--layered",
        default=[],
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="NODES",
        help="random layered graphs of so many nodes, such as 500,1000",
    )
    parser.add_argument(
        "--budgets",
        default=list(BUDGETS),
        type=shares,
        metavar="SHARES",
        help="of the peak, such as 0.9,0.45",
    )
    parser.add_argument(
        "--planner", default="auto", help="a module of memsaving_gradients.planners"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
