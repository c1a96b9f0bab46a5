"""``python -m benchmarks``: measure, print figures with their bars, keep results.

A row that has results is measured again only with ``--again``, so that an interrupted run continues
where it stopped. Exit code 1: a figure misses its bar, or a row fails. 2: an argument is wrong.
3: this machine lacks something that the experiments need.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.experiment import Experiment
from benchmarks.records import read
from benchmarks.running import chosen, measure, results_of
from benchmarks.settings import count
from benchmarks.tables import print_results

DOCS = Path(__file__).parents[1] / "docs"
#: Module (and attribute, ``EXPERIMENT`` by default) of each experiment, imported on demand.
EXPERIMENTS: dict[str, str] = {
    "claims": "claims.memory",
    "first_step": "claims.first_step",
    "budgets": "claims.budgets",
    "budgets-sgd": "claims.budgets:SGD",
    "deep": "claims.deep",
    "explain": "claims.explain",
    "largest": "claims.largest",
    "gpu": "claims.gpu",
    "xla": "claims.compiled",
    "attention": "techniques.attention",
    "encodings": "techniques.encodings",
    "loops": "techniques.loops",
    "low_memory": "techniques.low_memory",
    "microbatches": "techniques.microbatches",
    "offload": "techniques.offload",
    "instances": "planning.instances",
    "instances-exact": "planning.instances:EXACT",
    "instances-layered": "planning.instances:LAYERED",
    "planning": "planning.networks",
    "paper": "planning.paper",
    "periodic": "planning.periodic",
    "retracing": "planning.retracing",
    "simulation": "planning.simulation",
    "compatibility": "zoo.compatibility",
    "peers": "peers.experiment",
    "papers": "papers.experiment",
    "users": "users.experiment",
}


def experiment(name: str) -> Experiment:
    """Return the experiment of a name."""
    module, _, attribute = EXPERIMENTS[name].partition(":")
    found: Experiment = getattr(
        importlib.import_module(f"benchmarks.{module}"), attribute or "EXPERIMENT"
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parse(arguments)
    head, _, glob = options.only.partition("/")
    names = [name for name in EXPERIMENTS if fnmatch.fnmatchcase(name, head)]
    if not names:
        return _refused(f"--only {options.only!r} matches none of {', '.join(EXPERIMENTS)}")
    several = len(names) > 1
    if several and options.json and options.json.suffix == ".json":
        return _refused(
            f"--json {options.json} is one file for {len(names)} experiments: name a folder"
        )
    experiments = [experiment(name) for name in names]
    try:
        settings = [_settings(one, options.set) for one in experiments]
        _check_settings(experiments, options.set)
    except ValueError as error:
        return _refused(str(error))
    codes = [
        _run(one, values, glob or "*", several, options)
        for one, values in zip(experiments, settings, strict=True)
    ]
    # An experiment that this machine cannot run (code 3) counts only if there is no other one.
    return codes[0] if not several else max((code for code in codes if code != 3), default=3)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--only", default="*", metavar="GLOB", help="experiments, or rows: 'papers/chen*'")
    add("--list", action="store_true", help="print names of experiments and rows, and stop")
    add("--json", type=_new_file, metavar="PATH", help="results file, or folder for several")
    add("--again", action="store_true", help="also measure rows that have results")
    add("--jobs", type=_at_least_one, default=1, metavar="N", help="rows at a time")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; see README.md")
    return parser.parse_args(arguments)


def _run(
    one: Experiment, settings: dict[str, Any], glob: str, several: bool, options: argparse.Namespace
) -> int:
    """Run one experiment, print its results, write its page."""
    if lacking := one.missing(settings, glob):
        print(f"{one.name}: {lacking}", file=sys.stderr if options.list else sys.stdout)
        if not options.list:
            return 3
    rows = chosen(one, settings, glob)
    if options.list:
        print(*(f"{one.name}/{row}" for row in rows), sep="\n")
        return 0
    path = options.json or results_of(one)
    path = path / f"{one.name}.json" if options.json and several else path
    if not rows and not _matching(read(path), glob):
        names = ", ".join(one.rows(settings))
        return 0 if several else _refused(f"--only {options.only!r} matches no row of {names}")
    console = Console(stderr=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    failed = measure(one, rows, path, settings, again=options.again, jobs=options.jobs, say=say)
    results = read(path)
    shown = {row: found for row, found in _matching(results, glob).items() if row not in failed}
    figures = one.bars(shown)
    print_results(one, shown, figures, Console(width=None if sys.stdout.isatty() else 190))
    for row, text in failed.items():
        print(f"{one.name}/{row} failed: {text}")
    if one.page is not None:
        page = path.with_suffix(".md") if options.json else DOCS / one.page.file
        page.write_text(one.page.written(results), encoding="utf-8")
    return int(bool(failed) or not all(figure.passed for figure in figures))


def _matching(results: dict[str, dict[str, Any]], glob: str) -> dict[str, dict[str, Any]]:
    """Return the results of the rows that a glob matches; a file may have more rows."""
    return {row: result for row, result in results.items() if fnmatch.fnmatchcase(row, glob)}


def _settings(one: Experiment, given: list[str]) -> dict[str, Any]:
    """Return the settings of an experiment: the given ones replace the defaults."""
    values = one.defaults
    for text in given:
        name, _, value = text.partition("=")
        if name in values:
            try:
                values[name] = one.settings[name].parse(value)
            except ValueError as error:
                raise ValueError(f"--set {text}: {error}") from None
    return values


def _check_settings(experiments: list[Experiment], given: list[str]) -> None:
    known = {name: one for each in experiments for name, one in each.settings.items()}
    for text in given:
        if text.partition("=")[0] not in known:
            listed = "; ".join(f"{name} ({one.help})" for name, one in known.items()) or "none"
            raise ValueError(f"--set {text}: unknown setting; the settings are: {listed}")


def _at_least_one(text: str) -> int:
    try:
        return count(1, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"folder {path.parent} does not exist")
    return path


def _refused(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
