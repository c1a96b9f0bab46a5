"""A comparison of a step with our gradients and TensorFlow's own step, state included.

Op determinism is on and grappler's arithmetic rewriting off. Then every gradient must have the same
bits, and so must the loss and all state after the step (moving averages, seeds). TensorFlow's own
step runs without grappler's memory optimizer, which adds the terms of sums in large graphs in any
order; our step runs with it. Before each step all variables are reset. Each step is a new function,
traced from the same seed, so that random ops draw the same numbers. The step returns gradients
instead of consuming them, because their values are compared, not their bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.networks import build
from benchmarks.networks.base import Array, Model
from graph_tools.tf_private.config import without_memory_optimizer

SEED = 1
#: The difference that default settings always allow, as a share of the largest gradient, and the
#: number of plain runs that measure the spread.
LEAST, PLAIN_RUNS = 1e-6, 5


#: Arguments of ``ms.gradients``, or several to try in turn: a saved plan, then its budget, because
#: some losses are other ops under op determinism and need another plan.
Settings = dict[str, Any] | list[dict[str, Any]]


@dataclass(frozen=True)
class _Outcome:
    """Results of a step: loss, gradients (for slices, values and indices), hashes of variables."""

    loss: Array
    gradients: tuple[tuple[Array, ...] | None, ...]
    state: tuple[bytes, ...]


def compare(model: str, options: dict[str, Any], ours: Sequence[Settings]) -> list[dict[str, Any]]:
    """Compare one step by each of `ours` with TensorFlow's, to the last bit.

    Returns
    -------
    list of dict
        ``"equal"``: whether all bits of all results are the same. ``"differ"``: names of variables
        whose gradients differ. ``"error"``: the largest difference, as a share of the largest
        gradient. ``"state"``, ``"loss"``: whether these have the same bits. ``"largest"``: the
        largest number in any gradient. ``"count"``: the number of gradients. ``"parameters"``,
        ``"inputs"``: the number of weights and the shapes of the batch.
    """
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    steps = _Steps(build(model, **options))
    with without_memory_optimizer():
        plain = steps.run(tf.gradients)
    return [steps.compared(steps.saving(settings), plain) for settings in ours]


def spread(model: str, options: dict[str, Any], ours: Sequence[Settings]) -> list[dict[str, Any]]:
    """Compare under default settings; ``"allowed"`` is the error that plain runs' spread allows."""
    steps = _Steps(build(model, **options))
    plain = [steps.run(tf.gradients) for _ in range(PLAIN_RUNS)]
    apart = max(
        steps.compared(one, other)["error"] for i, one in enumerate(plain) for other in plain[:i]
    )
    allowed = max(LEAST, 2 * apart)
    found = []
    for settings in ours:
        result = steps.compared(steps.saving(settings), plain[0])
        found.append({**result, "allowed": allowed, "equal": result["error"] <= allowed})
    return found


class _Steps:
    """A runner of steps of one network, each from the same state."""

    def __init__(self, network: Model) -> None:
        self.network = network
        self.state = _variables(network)
        self.start = [variable.numpy() for variable in self.state]
        self.batch = [tf.constant(part) for part in network.batch]

    def run(self, differentiate: Callable[..., list[Any]]) -> _Outcome:
        """Trace and run one step."""
        for variable, value in zip(self.state, self.start, strict=True):
            variable.assign(value)
        xs = list(self.network.variables)

        def compute(*batch: tf.Tensor) -> tuple[Any, list[Any]]:
            # The seed is this graph's: its forward ops come first, and get the same op seeds.
            tf.compat.v1.set_random_seed(SEED)
            loss = self.network.loss(*batch)
            return loss, [_opened(g) for g in differentiate(loss, xs)]

        loss, found = tf.function(compute)(*self.batch)
        return _Outcome(
            loss.numpy(),
            tuple(None if g is None else tuple(part.numpy() for part in g) for g in found),
            tuple(hashlib.sha256(v.numpy().tobytes()).digest() for v in self.state),
        )

    def saving(self, settings: Settings) -> _Outcome:
        """Run a step with our gradients, by the first settings that raise no `PlanError`; if the
        last ones' budget is refused, within the least one."""
        import memsaving_gradients as ms

        *others, last = settings if isinstance(settings, list) else [settings]
        for asked in others:
            with contextlib.suppress(ms.errors.PlanError):
                return self.run(partial(ms.gradients, **asked))
        try:
            return self.run(partial(ms.gradients, **last))
        except ms.errors.BudgetError as error:
            # Deterministic ops may take more bytes, but only bits of results are compared.
            return self.run(partial(ms.gradients, **{**last, "budget": error.least}))

    def compared(self, ours: _Outcome, plain: _Outcome) -> dict[str, Any]:
        """Return the figures of `compare`."""
        names = [getattr(v, "path", v.name) for v in self.network.variables]
        differ, far, largest = [], 0.0, 0.0
        for name, a, b in zip(names, ours.gradients, plain.gradients, strict=True):
            if a is None or b is None:
                if a is not b:
                    differ.append(name)
                    far = float("inf")
                continue
            largest = max(largest, float(np.abs(b[0]).max(initial=0)))
            if len(a) != len(b) or any(
                x.shape != y.shape or x.tobytes() != y.tobytes() for x, y in zip(a, b, strict=True)
            ):
                differ.append(name)
                far = max(far, _distance(a, b))
        state = ours.state == plain.state
        loss = ours.loss.tobytes() == plain.loss.tobytes()
        sensible = bool(np.isfinite(largest) and largest > 0)
        return {
            "equal": not differ and state and loss and sensible,
            "differ": differ[:5],
            "error": far / largest if sensible else float("inf"),
            "state": state,
            "loss": loss,
            "largest": largest,
            "count": sum(g is not None for g in plain.gradients),
            "parameters": sum(int(np.prod(v.shape)) for v in self.network.variables),
            "inputs": [list(part.shape) for part in self.network.batch],
        }


def _opened(gradient: Any) -> tuple[Any, ...] | None:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return (gradient,)


def _distance(a: tuple[Array, ...], b: tuple[Array, ...]) -> float:
    """Return the largest difference; infinity if shapes, or the indices of slices, differ."""
    if len(a) != len(b) or a[0].shape != b[0].shape or (len(a) > 1 and (a[1] != b[1]).any()):
        return float("inf")
    far = float(np.abs(a[0].astype(np.float64) - b[0].astype(np.float64)).max(initial=0))
    return far if np.isfinite(far) else float("inf")


def _variables(network: Model) -> list[tf.Variable]:
    """Return all variables that a step may change, of Keras 2 and 3 alike."""
    held = network.layers.variables if network.layers is not None else network.variables
    return [v if isinstance(v, tf.Variable) else v.value for v in held]
