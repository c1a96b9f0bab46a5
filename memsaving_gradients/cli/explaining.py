"""``explain``: traces a target, explains it, plans for a budget, and writes the results as text, as
JSON, as a page and as a figure.

Standard output has results and nothing else. Output of a program while it is imported or traced
goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memsaving_gradients import errors, patching
from memsaving_gradients.analysis.explain import explain
from memsaving_gradients.analysis.study import function_of, specs_of
from memsaving_gradients.budget import exact_bytes, parse_budget
from memsaving_gradients.cli.arguments import PROGRAM, USAGE_ERROR, parse
from memsaving_gradients.cli.starting import INTERRUPTED, be_quiet
from memsaving_gradients.cli.target import Target, cause
from memsaving_gradients.cli.targets import target_of
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError, BudgetError, MemorySavingError
from memsaving_gradients.reports.explanation import Explanation
from memsaving_gradients.reports.extras import needed
from memsaving_gradients.reports.figures.drawing import check_folder, check_path
from memsaving_gradients.reports.plan import Plan

__all__ = ["main"]

#: Fact: the exit status if the budget cannot be met.
NOT_MET = 1


@dataclass
class _Results:
    """The results so far."""

    target: Target
    explanation: Explanation
    plans: tuple[Plan, ...] = ()
    error: str = ""
    least: int | None = None
    notes: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = parse(arguments)
    if not options.debug:
        be_quiet()
    try:
        return _explain(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Python must not write to it again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        said = str(error) if isinstance(error, MemorySavingError) else cause(error)
        _say(f"error: {' '.join(said.split())}")
        return USAGE_ERROR


def _explain(options: argparse.Namespace) -> int:
    _check(options)
    notes: list[str] = []
    with contextlib.redirect_stdout(sys.stderr), _noting(notes, options.debug):
        target = target_of(options)
        results = _Results(target, _explained(target, options), notes=notes)
        if options.budget is not None:
            _plan(results, options.budget)
        _write(results, options)
    if options.json:
        print(json.dumps(_as_json(results, options), indent=2))
    else:
        print(_as_text(results, options))
        for note in notes:
            _say(f"note: {note}")
    sys.stdout.flush()
    if results.error:
        _say(f"error: {results.error}")
        return NOT_MET
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise for options that are known to be wrong before anything takes time."""
    if options.budget is not None:
        parse_budget(options.budget, "--budget")
    if options.html is not None:
        check_folder(Path(options.html), "--html")
        needed("matplotlib", "--html")
    if options.plot is not None:
        check_path(options.plot, "--plot")
        needed("matplotlib", "--plot")


def _explained(target: Target, options: argparse.Namespace) -> Explanation:
    try:
        return explain(target.step, *target.args, **target.options)
    except ArgumentError as error:
        if error.argument != "fn":
            raise
        # On the command line, ``fn`` has another name.
        raise ArgumentError("TARGET", options.target, error.problem) from error
    except MemorySavingError:
        raise
    except Exception as error:
        raise ArgumentError(
            "TARGET", options.target, f"its training step cannot be traced: {cause(error)}"
        ) from error


def _plan(results: _Results, budget: Any) -> None:
    """Plan for a budget as training would; a budget that cannot be met is a result."""
    target = results.target
    asked = Options.of({**target.options, "budget": budget})
    function = function_of(target.step, target.args, compiled=bool(asked.xla))
    try:
        with patching.scoped(asked, eager_is_error=False):
            function.get_concrete_function(*specs_of(target.args))
    except BudgetError as error:
        results.error, results.least = f"the budget cannot be met: {error}", error.least
        return
    results.plans = graph_state.plans(function)
    if not results.plans:
        results.error = (
            "the budget cannot be met: nothing can be saved in this step (see the notes)"
        )
        return
    if any(plan.budget is None for plan in results.plans):
        results.notes.append(
            "the step computes its gradients with its own options, which --budget does not change"
        )
    worst = max(plan.whole_step or 0 for plan in results.plans)
    if (limit := results.plans[-1].budget) is not None and worst > limit:
        results.least = worst
        results.error = (
            f"the budget of {exact_bytes(limit)} cannot be met: the gradients fit into it, but with"
            f" the optimizer the step may take {exact_bytes(worst)}, which is the least budget"
            " known to work"
        )


def _write(results: _Results, options: argparse.Namespace) -> None:
    if options.html is not None:
        from memsaving_gradients.reports.web import page

        with _writing("--html", options.html):
            page.save(options.html, results.explanation, *results.plans, title=options.target)
    if options.plot is not None:
        with _writing("--plot", options.plot):
            (results.plans[-1] if results.plans else results.explanation).plot(options.plot)


@contextlib.contextmanager
def _writing(option: str, file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}; name another file"
        raise ArgumentError(option, file, problem) from error


def _as_text(results: _Results, options: argparse.Namespace) -> str:
    assumed = results.target.assumed
    parts = [
        options.target + (f"; assumed: {', '.join(assumed)}" if assumed else ""),
        str(results.explanation),
        *map(str, results.plans),
    ]
    return "\n\n".join(parts)


def _as_json(results: _Results, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results, under the names that they have in Python."""
    found = results.explanation
    return {
        "target": options.target,
        "assumed": list(results.target.assumed),
        "notes": results.notes,
        "explanation": {**asdict(found), "least": asdict(found.least)},
        "plans": [_plan_as_json(plan) for plan in results.plans],
        "error": results.error or None,
        "least_budget": found.least.budget if results.least is None else results.least,
    }


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    names = (
        "mode planner budget whole_step peak_plain peak allocated_plain allocated activations_plain"
        " activations extra_time lower_bound optimal complete clones checkpoints packed loops"
        " attention"
    )
    return {
        **{name: getattr(plan, name) for name in names.split()},
        "decisions": [asdict(decision) for decision in plan.decisions],
        "at_peak": [asdict(alive) for alive in plan.at_peak],
    }


@contextlib.contextmanager
def _noting(notes: list[str], debug: bool) -> Iterator[None]:
    """Turn our own warnings in a block into notes; show others for debugging only."""
    ours = tuple(
        kind
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, Warning)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default" if debug else "ignore")
        for kind in ours:
            warnings.simplefilter("always", kind)
        shown = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, ours):
                notes.append(" ".join(str(message).split()))
            else:
                shown(message, category, *rest, **more)

        warnings.showwarning = show
        yield


def _say(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr)
