"""Costs of the ops of a graph: time and workspace (bytes in addition to the outputs), estimated
from shapes or measured on this device.

The type and attributes of an op, and the dtypes and shapes of its inputs, decide its time. So do
the values of the few integers that give axes and sizes. A network of a hundred thousand ops has
some hundred such *kernels*, so each is measured once, by itself, and cached on disk. Those with the
largest share of a step are measured first. The kernels left at the time limit, and negligible ones,
keep their static estimate, scaled by the ratio of measured to estimated time of the measured ones.
So do ops that cannot run alone: stateful ops, ops that read resources, functions, and ops with
unknown dimensions other than the batch.

Other processes slow kernels down for seconds at a time, by a factor of two at worst. The kernels
that take most of a step are therefore measured twice again after all others; the least time counts.

The time of a kernel includes the executor's time to start an op in a step
(`graph_tools.costs.estimates.START_SECONDS`): copies of one op in a row start faster than that.

Cost: at most a quarter of a second for each measurement of a kernel, typically 5 to 50 ms; 25 µs an
op to tell kernels apart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.costs import estimates, kernels
from graph_tools.costs.cache import CostCache, describe
from graph_tools.costs.kernels import ROUNDS, Input, Kernel
from graph_tools.costs.parameters import known_shape, parameters
from graph_tools.graph.capture import OpGraph
from graph_tools.ops import op_types

__all__ = ["Costs", "estimated", "measured"]

#: Seconds after which no further kernel is measured.
LIMIT = 30.0
#: Kernels that together take less than this share of a step, as estimated, are not measured.
NEGLIGIBLE = 0.002
#: A kernel that takes at least this share of a step, as estimated, is measured in several rounds.
#: Chosen by judgement.
WEIGHTY = 0.01
#: A kernel with more bytes of inputs is not run.
LARGEST = 1 << 30


@dataclass(frozen=True, eq=False)
class Costs:
    """The costs of every op of a graph.

    Attributes
    ----------
    seconds
        Time of each op.
    workspace
        Bytes that each op allocates in addition to its outputs while it runs; 0 if unknown.
    """

    seconds: npt.NDArray[np.float64]
    workspace: npt.NDArray[np.int64]


def estimated(graph: OpGraph, batch: int) -> Costs:
    """Return costs from shapes alone (:mod:`graph_tools.costs.estimates`).

    Examples
    --------
    >>> import tensorflow as tf
    >>> from graph_tools import capture
    >>> with tf.Graph().as_default():
    ...     small = tf.compat.v1.placeholder(tf.float32, [8, 8])
    ...     large = tf.compat.v1.placeholder(tf.float32, [512, 512])
    ...     graph = capture([small @ small, large @ large])
    >>> products = [op.type == "MatMul" for op in graph.ops]
    >>> first, second = estimated(graph, batch=1).seconds[products]
    >>> first < second
    np.True_
    """
    return Costs(estimates.op_seconds(graph, batch), estimates.op_workspace(graph, batch))


def measured(graph: OpGraph, batch: int) -> Costs:
    """Return costs measured on the device on which TensorFlow places ops, at a batch of ``batch``
    examples. The graph itself is not run.

    If an exception ends the measurement, the costs measured until then are kept on disk.
    """
    device = kernels.default_device()
    static = estimates.op_seconds(graph, batch)
    found, keys = _kernels(graph, batch, static)
    cache = CostCache(describe(device))
    _measure(_worthwhile(found, keys, static, cache), cache, device)
    seconds, workspace = static.copy(), estimates.op_workspace(graph, batch)
    known = np.zeros(len(graph.ops), np.bool_)
    for i, key in enumerate(keys):
        entry = cache.entries.get(key) if key is not None else None
        if entry is not None:
            seconds[i], workspace[i] = entry.seconds + estimates.START_SECONDS, entry.workspace
            known[i] = True
    expensive = np.array([op.type in op_types.EXPENSIVE for op in graph.ops], np.bool_)
    for group in (expensive, ~expensive):
        scale = _scale(static, seconds, group & known, known)
        seconds[group & ~known] *= scale
    return Costs(seconds, workspace)


def _scale(
    static: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    group: npt.NDArray[np.bool_],
    known: npt.NDArray[np.bool_],
) -> float:
    """Return the ratio of measured to estimated time of the group's measured ops, or of all if it
    has none."""
    group = group if static[group].any() else known
    return float(seconds[group].sum() / static[group].sum()) if static[group].any() else 1.0


def _measure(wanted: list[tuple[str, Kernel]], cache: CostCache, device: str) -> None:
    if not wanted:
        return
    end = time.perf_counter() + LIMIT
    try:
        for key, kernel in wanted:
            if time.perf_counter() > end:
                break
            before, found = cache.entries.get(key), kernels.measure(kernel, device)
            cache.entries[key] = min(filter(None, (before, found)), default=None)
    finally:
        cache.write()


def _worthwhile(
    found: dict[str, Kernel],
    keys: list[str | None],
    static: npt.NDArray[np.float64],
    cache: CostCache,
) -> list[tuple[str, Kernel]]:
    """Return the kernels to measure, in order: those with the largest share of a step first, and
    the weighty ones again after all others."""
    shares = dict.fromkeys(found, 0.0)
    for key, seconds in zip(keys, static.tolist(), strict=True):
        if key is not None:
            shares[key] += seconds
    order = sorted(found, key=lambda key: -shares[key])
    rest = np.cumsum([shares[key] for key in reversed(order)])[::-1]
    total = float(static.sum())
    enough = [key for key, left in zip(order, rest, strict=True) if left > NEGLIGIBLE * total]
    missing = [key for key in enough if key not in cache.entries]
    weighty = [key for key in missing if shares[key] >= WEIGHTY * total]
    return [(key, found[key]) for key in [*missing, *weighty * (ROUNDS - 1)]]


def _kernels(
    graph: OpGraph, batch: int, static: npt.NDArray[np.float64]
) -> tuple[dict[str, Kernel], list[str | None]]:
    """Return the distinct kernels by key; and the key of each op, ``None``: not measurable."""
    found: dict[str, Kernel] = {}
    keys: list[str | None] = []
    integers = parameters(graph, batch)
    for i, seconds in enumerate(static.tolist()):
        alone = seconds > 0 and _runs_alone(graph.ops[i])
        kernel = _kernel(graph, i, batch, integers) if alone else None
        keys.append(None if kernel is None else _key(kernel))
        if kernel is not None and keys[-1] is not None:
            found.setdefault(keys[-1], kernel)
    return found, keys


def _runs_alone(op: tf.Operation) -> bool:
    # A sum of more than two addends is not clonable, but it can run alone.
    return op_types.is_clonable(op) or op.type == "AddN"


def _kernel(
    graph: OpGraph, i: int, batch: int, integers: Mapping[int, npt.NDArray[Any]]
) -> Kernel | None:
    op = graph.ops[i]
    inputs = []
    for value, tensor in zip(graph.inputs[i], op.inputs, strict=True):
        shape = known_shape(tensor, batch)
        if shape is None or tensor.dtype == tf.string:
            return None
        inputs.append(Input(tensor.dtype, shape, integers.get(value)))
    if sum(i.dtype.size * float(np.prod(i.shape)) for i in inputs) > LARGEST:
        return None
    # Attributes with an underscore say where an op belongs, not how it computes.
    attributes = {
        name: value for name, value in op.node_def.attr.items() if not name.startswith("_")
    }
    if any(value.HasField("func") or value.list.func for value in attributes.values()):
        return None
    outputs = tuple((out.dtype, known_shape(out, batch)) for out in op.outputs)
    return Kernel(op.type, tuple(inputs), outputs, attributes, op.op_def)


def _key(kernel: Kernel) -> str:
    def text(given: Input) -> str:
        dims = ",".join(map(str, given.shape))
        value = "" if given.value is None else f"={given.value.tolist()}"
        return f"{given.dtype.name}[{dims}]{value}".replace(" ", "")

    parts = (
        name.encode() + value.SerializeToString(deterministic=True)
        for name, value in sorted(kernel.attributes.items())
    )
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
    return f"{kernel.kind}({', '.join(map(text, kernel.inputs))}) {digest}"
