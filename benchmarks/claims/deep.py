"""``python -m benchmarks.claims.deep``: a CIFAR ResNet of 1001 layers within a tenth, a twentieth, a fortieth of its memory.

Measured as in :mod:`benchmarks.claims.budgets`. *Planning* is all that our call for gradients takes beyond TensorFlow's own function
in it: capture, planning, rewriting, and the description of the plan. Building a graph of 95,000 ops takes minutes by itself,
and is done four times for each budget. ``--blocks 11`` is the same network with 101 layers, to try things on; only the one of 111
blocks a stage is held to the bars.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bars import Figure, write
from benchmarks.claims.budgets import measure, parser, print_results

RESULTS = Path(__file__).parents[1] / "results" / "deep.json"
#: For each share of the plain transient peak, what a step may take of the plain one's time.
TIMES = {1 / 10: 1.17, 1 / 20: 1.25, 1 / 40: 1.60}
#: The most seconds from captured to rewritten.
PLANNING = 20.0
BLOCKS = 111
NAME = f"resnet{9 * BLOCKS + 2}"


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; 1 if a bar is missed or a case fails."""
    options = _parse(arguments)
    sizes = {"blocks": options.blocks, "batch": options.batch}
    name = f"resnet{9 * options.blocks + 2}"
    results: dict[str, Any] = {}
    for case, result in measure(name, "cifar_resnet", sizes, options, Console(stderr=True)):
        results[case] = result
        write(options.json, results)
    figures = judge(results) if options.blocks == BLOCKS else []
    write(options.json, results, figures)
    print_results(results, figures, Console(width=180))
    failed = any("failed" in result for result in results.values())
    return int(failed or not all(figure.passed for figure in figures))


def measured(share: float) -> dict[str, Any]:
    """One budget of the network of 1001 layers."""
    options = _parse(["--budgets", str(share)])
    sizes = {"blocks": options.blocks, "batch": options.batch}
    ((_, found),) = measure(NAME, "cifar_resnet", sizes, options, Console(stderr=True))
    return found


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The bars; a budget that is refused has missed."""
    figures = []
    for case, result in results.items():
        if "failed" in result:
            continue
        share = result["share"]
        figures.append(Figure(f"{case}: seconds to plan", result["planning"], PLANNING))
        figures.append(
            Figure(f"{case}: worst step / budget", result["ours"]["peak"] / result["allowed"], 1.0)
        )
        limit = next((most for of, most in TIMES.items() if abs(of - share) < 1e-9), None)
        if result["time"] and limit is not None:
            figures.append(Figure(f"{case}: step time / plain", result["time"]["ratio"], limit))
    return figures


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    options = parser("deep", __doc__, RESULTS, list(TIMES))
    options.add_argument("--blocks", type=int, default=BLOCKS, help="a stage; three layers each")
    options.add_argument("--batch", type=int, default=8, help="examples")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
