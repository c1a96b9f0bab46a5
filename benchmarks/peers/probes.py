"""Probes for fresh processes: a peak, the numbers of one step, times of several ways."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from benchmarks.networks import Model
from benchmarks.peers import variants
from benchmarks.peers.cells import differences, nearest
from benchmarks.peers.networks import NETWORKS, settings_of
from graph_tools.memory.measure import measure_peak
from graph_tools.tf_private.config import function_config

#: The number of plain steps to compare with each other.
PLAIN_STEPS = 8
#: A way to train: a peer (or plain), or ours with these arguments.
Way = dict[str, Any]


def peak(network: str, way: Way, *, save: str | None = None) -> dict[str, Any]:
    """Measure the transient peak of a way, and save the plan of ours as ``save``.

    An error of tracing or running is the result ``"failed"``; a budget that no plan fits is the
    result ``"refused"``.
    """
    start = time.perf_counter()
    try:
        run, graph = _step(_made(network, way))
        found = measure_peak(run)
    except Exception as error:
        return _failure(error)
    result: dict[str, Any] = {
        "peak": found.peak,
        "peaks": found.peaks,
        "seconds": time.perf_counter() - start,
    }
    if "ours" in way:
        result["plan"] = _plan(graph, save)
    return result


def numbers(network: str, ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
    """Compare one step of each way with plain training's, under op determinism.

    Even then some plain training does not repeat its bits. So the comparison is with the nearest of
    several plain steps; ``"spread"`` is their largest difference from the first one.
    """
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    plain = _numbers(network, {"peer": "plain"}, PLAIN_STEPS)
    apart = [differences(plain[0], other) for other in plain[1:]]
    spread = {kind: max(one[kind] for one in apart) for kind in ("gradient", "state")}
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        try:
            (made,) = _numbers(network, way)
            found[name] = {**nearest(plain, made), "spread": spread}
        except Exception as error:
            found[name] = _failure(error)
    return found


def _numbers(network: str, way: Way, steps: int = 1) -> list[dict[str, Any]]:
    """Return loss, gradients and moving averages of steps that start from the same state."""
    made = _made(network, way, together=True)
    x, y = _batch(made.network)
    step = tf.function(made.gradients)
    state = made.network.layers.non_trainable_variables
    begun = [variable.numpy() for variable in state]
    found = []
    for _ in range(steps):
        for variable, value in zip(state, begun, strict=True):
            variable.assign(value)
        with made.scope():
            loss, grads = step(x, y)
        moving = [v for v in state if "seed" not in v.path]
        arrays = {f"gradient {i}": tf.convert_to_tensor(g) for i, g in enumerate(grads)}
        arrays |= {f"state {i}": v.value for i, v in enumerate(moving)}
        found.append({name: array.numpy() for name, array in {"loss": loss, **arrays}.items()})
    return found


def times(
    network: str, groups: Sequence[Sequence[tuple[str, Way]]], pairs: int
) -> dict[str, dict[str, float]]:
    """Return the ratio of each way's time to plain training's, and as a control plain's to itself.

    Each round runs plain, a group, plain, the next group, plain. Ways of a group take turns in
    coming first. They are compared with the plain steps on both sides of the group; the control
    compares these with each other. One round before warms up.
    """
    steps = {
        name: _step(_made(network, way, together=True))[0]
        for group in groups
        for name, way in group
    }
    base = _step(_made(network, {"peer": "plain"}))[0]
    taken: dict[str, list[float]] = {name: [] for name in steps}
    sides: list[tuple[list[float], list[float]]] = [([], []) for _ in groups]
    for round_ in range(-1, pairs):
        before = _seconds(base)
        for number, group in enumerate(groups):
            turn = round_ % len(group)
            found = {name: _seconds(steps[name]) for name, _ in [*group[turn:], *group[:turn]]}
            after = _seconds(base)
            if round_ >= 0:
                for name, seconds in found.items():
                    taken[name].append(seconds)
                sides[number][round_ % 2].append(before)
                sides[number][(round_ + 1) % 2].append(after)
            before = after
    result = {}
    for group, (first, second) in zip(groups, sides, strict=True):
        control = statistics.median(first) / statistics.median(second)
        plain = statistics.median(first + second)
        for name, _ in group:
            seconds = statistics.median(taken[name])
            result[name] = {
                "ratio": seconds / plain,
                "control": control,
                "seconds": seconds,
                "plain": plain,
            }
    return result


@dataclass(frozen=True)
class _Made:
    """A network, the function that differentiates it on a batch, and the context to run it in."""

    network: Model
    gradients: variants.Gradients
    scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def _made(network: str, way: Way, *, together: bool = False) -> _Made:
    """Build a way; ``together``: leave the configuration of the process to other ways in it."""
    make = NETWORKS[network].make
    if "ours" in way:
        return _Made(*variants.ours(make, **way["ours"]))
    function, settings = settings_of(network, way["peer"])
    if together and function is variants.grappler:
        config = variants.grappler_config(**settings)
        return _Made(*variants.plain(make), lambda: function_config(config))
    return _Made(*function(make, **settings))


def _batch(network: Model) -> tuple[Any, Any]:
    """Return the inputs as the model takes them, and the labels."""
    *inputs, labels = (tf.constant(array) for array in network.batch)
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), labels


def _step(made: _Made) -> tuple[Callable[[], Any], tf.Graph]:
    """Return a step that returns the sum of squares of each gradient, and its graph."""
    x, y = _batch(made.network)

    def squares(x: Any, y: Any) -> tf.Tensor:
        _, grads = made.gradients(x, y)
        return tf.stack([tf.reduce_sum(tf.square(tf.convert_to_tensor(g))) for g in grads])

    step = tf.function(squares)
    graph = step.get_concrete_function(x, y).graph

    def run() -> Any:
        with made.scope():
            return step(x, y).numpy()

    return run, graph


def _plan(graph: tf.Graph, save: str | None) -> dict[str, Any] | None:
    """Return the promises of the plan; ``None`` for plain gradients."""
    # A late import: peers run without the package that they are compared with.
    import memsaving_gradients as ms

    plans = ms.plans(graph)
    if not plans:
        return None
    newest = plans[-1]
    if save is not None:
        newest.save(save)
    names = ("allocated", "allocated_plain", "extra_time", "clones", "budget", "planner")
    return {name: getattr(newest, name) for name in names}


def _failure(error: Exception) -> dict[str, Any]:
    """Return the least budget that an error names, or its last line, in place of a measurement."""
    if type(error).__name__ == "BudgetError":
        refused: Any = error
        return {"refused": {"least": refused.least, "budget": refused.budget}}
    return {"failed": f"{type(error).__name__}: {_told(str(error))}"}


def _told(message: str) -> str:
    """Return an error in a line: for Keras' the layer and the reason, for others the last line."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in message.splitlines()]
    lines = [line for line in lines if line]
    for number, line in enumerate(lines):
        if "Exception encountered when calling " in line:
            where = line.rpartition("when calling ")[2].rstrip(".")
            return f"{where}: {lines[number + 1] if number + 1 < len(lines) else ''}"
    return lines[-1] if lines else ""


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
