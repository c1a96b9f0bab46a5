"""`gradient_error`: the error of a loss's gradients under options, against TensorFlow's own.

Only encodings that are asked for by name change gradients by more than rounding. How much depends
on the network. If a residual is off by 2⁻⁹ of itself, a weight's gradient, a sum of many products,
is off by about as much of its largest number. Each layer on its way adds as much, and errors of
many layers add up like random ones. That is an estimate; this module measures the error.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from memsaving_gradients.api import gradients
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.reports.plan_text import MOST_LINES, NAME_WIDTH, columns, shorten

__all__ = ["GradientError", "VariableError", "gradient_error"]

#: Gradients whose largest number is below this share of the largest of all do not count. They are
#: zero except for rounding, such as gradients of biases in front of a normalization.
TINY = 1e-4


@dataclass(frozen=True)
class VariableError:
    """The error of one variable's gradient.

    Attributes
    ----------
    name
        The name of the variable.
    largest
        The largest absolute value in TensorFlow's gradient.
    error
        The largest absolute difference, as a share of ``largest``.
    control
        The same difference between two runs of TensorFlow's own gradients: more than rounding where
        something is drawn at random.
    """

    name: str
    largest: float
    error: float
    control: float


@dataclass(frozen=True)
class GradientError:
    """The errors of gradients. It prints as a table.

    Attributes
    ----------
    variables
        The errors of all variables whose gradients count, the worst first.
    left_out
        Names of variables whose gradients are zero except for rounding.
    """

    variables: tuple[VariableError, ...]
    left_out: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest error of a variable."""
        return max((found.error for found in self.variables), default=0.0)

    @property
    def median(self) -> float:
        """The median of the variables' errors."""
        return statistics.median([found.error for found in self.variables] or [0.0])

    @property
    def control(self) -> float:
        """The largest difference between two runs of TensorFlow's own gradients."""
        return max((found.control for found in self.variables), default=0.0)

    def __str__(self) -> str:
        said = (
            f"gradients of {len(self.variables)} variables differ from TensorFlow's by at most"
            f" {self.worst:.1e} of their largest number, {self.median:.1e} in the median; two runs"
            f" of TensorFlow's own differ by {self.control:.1e}"
        )
        rows = [
            (f"{found.error:.1e}", f"{found.control:.1e}", shorten(found.name, NAME_WIDTH))
            for found in self.variables[:MOST_LINES]
        ]
        lines = [said, *columns([("error", "control", "variable"), *rows])]
        if (more := len(self.variables) - MOST_LINES) > 0:
            lines.append(f"… and {more} with smaller errors")
        if self.left_out:
            lines.append(
                f"gradients that are zero except for rounding: {len(self.left_out)} variables"
            )
        return "\n".join(lines)


def gradient_error(
    loss: Callable[..., tf.Tensor], variables: Sequence[Any], *batch: Any, **options: Any
) -> GradientError:
    """Compare gradients under options with TensorFlow's own, on one batch.

    Parameters
    ----------
    loss
        A function of a batch that returns a scalar. Random ops draw the same numbers in all runs.
        Switch off layers that draw from a state of their own, as in Keras. Otherwise the control
        shows differences that do not come from the options.
    variables
        The variables to differentiate with respect to.
    *batch
        Tensors or arrays, passed on to ``loss``.
    **options
        As in `memsaving_gradients.gradients`, such as ``encode="bfloat16"``.

    Returns
    -------
    GradientError
        Errors of each variable as shares of its gradient's largest number, and two runs of plain
        gradients as a control.

    Raises
    ------
    ArgumentError
        If ``loss`` is no function that returns a scalar, or no variable has a gradient.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> w = tf.Variable(tf.linspace(0.1, 0.9, 4096))
    >>> def loss(x):
    ...     for _ in range(4):
    ...         x = tf.sin(w * x)
    ...     return tf.reduce_sum(x)
    >>> found = ms.gradient_error(loss, [w], tf.ones([4096]), encode="bfloat16", planner="keep")
    >>> 0 < found.worst < 0.02, found.control
    (True, 0.0)
    """
    _check(loss, variables)
    made = list(variables)
    fed = [tf.convert_to_tensor(part) for part in batch]

    def computed(differentiate: Callable[..., list[Any]]) -> list[Any]:
        @tf.function(autograph=False)
        def step(*inputs: tf.Tensor) -> list[Any]:
            # The seed of this graph alone. The forward pass is built first, so that its ops get
            # the same seeds in each graph.
            tf.compat.v1.set_random_seed(1)
            value = loss(*inputs)
            if not isinstance(value, tf.Tensor) or value.shape.rank:
                raise ArgumentError(
                    "loss", value, "is not a scalar; return one tensor without axes"
                )
            found = differentiate(value, made)
            return [g if g is None else tf.convert_to_tensor(g) for g in found]

        return [g if g is None else np.asarray(g, np.float64) for g in step(*fed)]

    plain, again, ours = (
        computed(differentiate)
        for differentiate in (
            tf.gradients,
            tf.gradients,
            lambda y, xs: gradients(y, xs, **options),
        )
    )
    sizes = [0.0 if g is None else float(np.abs(g).max(initial=0.0)) for g in plain]
    if not any(sizes):
        raise ArgumentError(
            "variables",
            variables,
            "none of them has a gradient; give variables that the loss depends on",
        )
    names = [getattr(v, "path", v.name) for v in made]
    counts = [size > TINY * max(sizes) for size in sizes]
    found = [
        VariableError(
            names[k],
            sizes[k],
            float(np.abs(ours[k] - plain[k]).max()) / sizes[k],
            float(np.abs(again[k] - plain[k]).max()) / sizes[k],
        )
        for k in range(len(made))
        if counts[k]
    ]
    found.sort(key=lambda one: -one.error)
    tiny = (k for k in range(len(made)) if plain[k] is not None and not counts[k])
    return GradientError(tuple(found), tuple(names[k] for k in tiny))


def _check(loss: Any, variables: Any) -> None:
    if not callable(loss):
        raise ArgumentError(
            "loss", loss, "is not a function; give one that computes a loss from a batch"
        )
    if not isinstance(variables, list | tuple):
        raise ArgumentError("variables", variables, "is not a list; give a list of variables")
    if tf.inside_function():
        raise ArgumentError(
            "loss",
            loss,
            "cannot run while a tf.function is traced; call gradient_error outside of it",
        )
