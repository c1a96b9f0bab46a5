"""The arguments of the command line. The module imports nothing but argparse, so that help and
usage errors do not wait for TensorFlow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["PROGRAM", "USAGE_ERROR", "parse"]

PROGRAM = "python -m memsaving_gradients"
#: Fact: the exit status for arguments that cannot be used.
USAGE_ERROR = 2

_EXAMPLES = f"""\
examples:
  {PROGRAM} explain model.keras
  {PROGRAM} explain model.keras --budget 0.5 --batch 64
  {PROGRAM} explain my_package.models:resnet --optimizer sgd --budget 2GiB --html report.html
  {PROGRAM} explain train:make_step --json > explained.json

exit status:
  0  fine
  1  the budget cannot be met; the message says the least one
  2  wrong usage, or a model that cannot be imported, loaded or built
"""

_TARGET = """\
a saved Keras model (model.keras), or package.module:name of a Keras model, a function that returns
one, or a function that returns (train_step, args); it is traced, and nothing is run"""

_DESCRIPTION = (
    "Explain where the memory of a training step goes and what each budget costs, before a step"
    " runs."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit."""
        self.exit(USAGE_ERROR, f"{PROGRAM}: error: {message}; see {self.prog} --help\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line; exit for ``--help`` and wrong usage.

    Examples
    --------
    >>> parse(["explain", "model.keras", "--budget", "0.5"]).budget
    0.5
    """
    # No abbreviations of options: a new option must not change the meaning of another.
    about: dict[str, Any] = {
        "description": _DESCRIPTION,
        "epilog": _EXAMPLES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser = _Parser(PROGRAM, **about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain", help="explain the memory of a model or a training step", **about
    )
    _accept_explain(explain)
    return parser.parse_args(arguments)


def _accept_explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help=_TARGET)
    add(
        "--budget",
        type=_budget,
        metavar="BUDGET",
        help="also plan for this budget: 2GiB, bytes, or a share of plain training such as 0.5",
    )
    add(
        "--batch",
        type=_count,
        metavar="N",
        help="examples in a batch (32, where the model leaves it open)",
    )
    add(
        "--loop-steps",
        type=_count,
        metavar="N",
        help="the most steps of loops that do not show how many they take (256)",
    )
    add(
        "--length",
        type=_count,
        metavar="N",
        help="the size of the other open dimensions of inputs, such as positions",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="a Keras optimizer for a model that is not compiled (adam)",
    )
    add("--loss", metavar="NAME", help="a Keras loss for such a model (one that suits its outputs)")
    add("--xla", action="store_true", help="explain the step as XLA compiles it")
    add(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module first: it registers the classes of a saved model",
    )
    add("--json", action="store_true", help="print the results as JSON")
    add("--html", metavar="FILE", help="write a page with figures and tables")
    add(
        "--plot",
        metavar="FILE",
        help="write the figure (PNG, SVG, PDF): of the explanation, or with --budget of the plan",
    )
    add("--debug", action="store_true", help="show tracebacks, warnings and TensorFlow's log")


def _budget(text: str) -> int | float | str:
    """Return bytes, a share, or a text with a unit, which is parsed later."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return count
