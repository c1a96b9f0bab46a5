"""``python -m benchmarks.papers``: the headlines of founding works, run or planned again, published beside ours.

What is in the file of results is not made again, but with ``--again``; results that another benchmark has are taken from it. ``docs/founding-figures.md`` is written
from all that is there. Exits with 1 if a published figure is not reached.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.arguments import new_file
from benchmarks.bars import chosen, measure_missing, options_for, write
from benchmarks.papers import checkpointing, chen, meng, rotor, sohoni
from benchmarks.papers.page import page, print_work

RESULTS = Path(__file__).parents[1] / "results" / "papers.json"
PAGE = Path(__file__).parents[2] / "docs" / "founding-figures.md"
WORKS = (chen.WORK, rotor.WORK, meng.WORK, sohoni.WORK, checkpointing.WORK)


def main(arguments: list[str] | None = None) -> int:
    """Make what was asked for, print all that is there, write the page; 1 if a published figure is not reached."""
    options = _parse(arguments)
    jobs = {name: job for work in WORKS for name, job in work.jobs.items()}
    asked = chosen(jobs, options.only)
    if not asked:
        return 2
    if options.list:
        print(*asked, sep="\n")
        return 0
    results = measure_missing(jobs, options, lambda name: jobs[name](options.again))
    made = [(work, work.lines(results)) for work in WORKS]
    every = [line for _, lines in made for line in lines]
    write(options.json, {}, every)
    options.page.write_text(page(made, results), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 180)
    for work, lines in made:
        if lines:
            print_work(work, lines, console)
    return int(not all(line.passed for line in every))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("papers", __doc__, RESULTS, "names of jobs, with * and ?")
    parser.add_argument("--again", action="store_true", help="make also what has results")
    parser.add_argument("--list", action="store_true", help="print the names of jobs, and stop")
    parser.add_argument("--page", type=new_file, default=PAGE, metavar="PATH", help="of the docs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
