"""The time of one kernel by itself on this device, and its workspace: bytes that are not outputs.

A graph of its own runs a few copies of an op, one after the other, on fed inputs. Grappler is off,
because it would merge the copies. TensorFlow's step statistics time each copy from the start of its
kernel to the end, without dispatch and without other processes between the copies. The allocator's
account of a copy gives its workspace: its peak, less the bytes that it leaves behind. The shortest
time of all copies in several runs counts, because other processes only ever add.

A kernel is timed with the device to itself. In a step, the executor runs kernels in parallel, and
each is slower, by about as much as they overlap. The sum of the isolated times is therefore closer
to the step's duration than the sum of the times inside the step. Inputs are in the caches as far as
they fit: gradients of filters take up to 40 % longer in a step, where they read old forward values.

Reading the clock and accounting take some microseconds, and on a GPU the step statistics cover only
the start of a kernel. For short kernels and GPUs, the time is therefore the slope of a run's
duration over the number of copies. Each duration is the shortest of several.

Floating point inputs are drawn from [0.1, 1), valid for every elementwise function. Integer inputs
have the op's own values where these are known before the step (axes, sizes, paddings), else zeros,
which are valid indices.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_tools.tf_private import graphs

__all__ = ["ROUNDS", "Input", "Kernel", "Measured", "default_device", "measure", "threads"]

#: Copies of an op in one run. Chosen by judgement.
COPIES = 6
#: Rounds of a measurement, of which the shortest time counts, and the seconds after which no round
#: starts. An op that takes longer than a round's share runs in two copies only. Chosen by
#: judgement: a hundred kernels take 15 seconds.
ROUNDS, SECONDS = 3, 0.15
#: Seconds below which a time is the slope over the number of copies, and the most copies for it.
SHORT = 2e-4
QUEUED = 32

Feed = dict[tf.Tensor, npt.NDArray[Any]]


class Measured(NamedTuple):
    """The seconds of one run of a kernel, and the bytes that it allocates while it runs in addition
    to its outputs."""

    seconds: float
    workspace: int


@dataclass(frozen=True)
class Input:
    """An input of a kernel: its dtype, its shape, and its value if the kernel's work depends on
    that."""

    dtype: tf.DType
    shape: tuple[int, ...]
    value: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class Kernel:
    """The properties of an op that decide its time.

    Attributes
    ----------
    kind, attributes, definition
        Op type, attributes (protos) and op definition.
    inputs, outputs
        Inputs in order; dtypes and shapes (``None`` if unknown) of the outputs.
    """

    kind: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[tf.DType, tuple[int, ...] | None], ...]
    attributes: Mapping[str, Any] = field(repr=False)
    definition: Any = field(repr=False)


def default_device() -> str:
    """Return the device on which TensorFlow places ops: the first GPU, or the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def threads() -> int:
    """Return the number of threads that a kernel may use."""
    return tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1


def measure(kernel: Kernel, device: str) -> Measured | None:
    """Run ``kernel`` on ``device`` and return its costs; ``None`` if it rejects its inputs, or its
    outputs have other shapes than expected.

    Examples
    --------
    >>> import tensorflow as tf
    >>> with tf.Graph().as_default():
    ...     op = tf.matmul(tf.ones([64, 64]), tf.ones([64, 64])).op
    >>> square = Input(tf.float32, (64, 64))
    >>> outputs = ((tf.float32, (64, 64)),)
    >>> kernel = Kernel("MatMul", (square, square), outputs, op.node_def.attr, op.op_def)
    >>> 0 < measure(kernel, "CPU:0").seconds < 1
    True
    """
    try:
        graph, ops, feed = _copies(kernel, device)
        with _session(graph) as session:
            found = _by_statistics(session, ops, feed)
            if not _fits(kernel, _statistics(session, ops[0], feed), ops[0].name):
                return None
            if found.seconds < SHORT or "GPU" in device.upper():
                # On a busy machine, many copies may seem to take no longer than one.
                return found._replace(seconds=_by_slope(session, ops, feed) or found.seconds)
            return found
    except (tf.errors.OpError, ValueError, TypeError):
        return None


def _fastest(session: tf.compat.v1.Session, fetch: Any, feed: Feed) -> float:
    session.run(fetch, feed)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(fetch, feed)
        times.append(time.perf_counter() - start)
    return min(times)


def _by_statistics(
    session: tf.compat.v1.Session, ops: Sequence[tf.Operation], feed: Feed
) -> Measured:
    start = time.perf_counter()
    session.run(ops[0], feed)  # warm-up: oneDNN prepares its kernels
    many = 2 if time.perf_counter() - start > SECONDS / ROUNDS else COPIES
    names = {op.name for op in ops[:many]}
    seconds: list[float] = []
    workspace = 0
    start = time.perf_counter()
    while len(seconds) < ROUNDS * COPIES and time.perf_counter() - start < SECONDS:
        for stats in _statistics(session, ops[many - 1], feed):
            if stats.node_name in names:
                seconds.append((stats.op_end_rel_nanos - stats.op_start_rel_nanos) / 1e9)
                workspace = max(workspace, _workspace(stats))
    return Measured(min(seconds), workspace)


def _by_slope(session: tf.compat.v1.Session, ops: Sequence[tf.Operation], feed: Feed) -> float:
    one = _fastest(session, ops[0], feed)
    many = 2 if one > SECONDS / ROUNDS else len(ops)
    return max(_fastest(session, ops[many - 1], feed) - one, 0.0) / (many - 1)


def _copies(kernel: Kernel, device: str) -> tuple[tf.Graph, list[tf.Operation], Feed]:
    graph = tf.Graph()
    feed: Feed = {}
    with graph.as_default(), tf.device(device):
        tensors = []
        for given in kernel.inputs:
            if given.value is not None:
                tensors.append(tf.constant(given.value, given.dtype))
                continue
            tensors.append(tf.compat.v1.placeholder(given.dtype, given.shape))
            feed[tensors[-1]] = _numbers(given)
        if kernel.kind == "MaxPoolGrad":
            # In a graph with its forward op, oneDNN's layout pass gives it another kernel, which is
            # thirty times faster.
            tensors[1] = _pooled(tensors[0], kernel.attributes)
        ops: list[tf.Operation] = []
        for _ in range(QUEUED):
            with tf.control_dependencies(ops[-1:]):
                ops.append(
                    graphs.create_in(
                        graph,
                        kernel.kind,
                        tensors,
                        [dtype for dtype, _ in kernel.outputs],
                        kernel.attributes,
                        kernel.definition,
                    )
                )
    return graph, ops, feed


def _pooled(x: tf.Tensor, attributes: Mapping[str, Any]) -> tf.Tensor:
    return tf.raw_ops.MaxPool(
        input=x,
        ksize=list(attributes["ksize"].list.i),
        strides=list(attributes["strides"].list.i),
        padding=attributes["padding"].s.decode(),
        explicit_paddings=list(attributes["explicit_paddings"].list.i),
        data_format=attributes["data_format"].s.decode(),
    )


def _numbers(given: Input) -> npt.NDArray[Any]:
    dtype = given.dtype.as_numpy_dtype
    if not (given.dtype.is_floating or given.dtype.is_complex):
        return np.zeros(given.shape, dtype)
    block = np.random.default_rng(0).uniform(0.1, 1.0, min(math.prod(given.shape), 1 << 16))
    return np.resize(block.astype(dtype), given.shape)


def _session(graph: tf.Graph) -> tf.compat.v1.Session:
    config = tf.compat.v1.ConfigProto(
        allow_soft_placement=True,
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
    )
    config.gpu_options.allow_growth = True
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1  # it merges equal ops as well
    return tf.compat.v1.Session(graph=graph, config=config)


def _statistics(session: tf.compat.v1.Session, fetch: Any, feed: Feed) -> list[Any]:
    found = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.SOFTWARE_TRACE)
    session.run(fetch, feed, options=options, run_metadata=found)
    return [stats for device in found.step_stats.dev_stats for stats in device.node_stats]


def _fits(kernel: Kernel, statistics: Sequence[Any], name: str) -> bool:
    """Return whether the outputs have the shapes that are known from the step."""
    (stats,) = (stats for stats in statistics if stats.node_name == name)
    for output in stats.output:
        # Layout passes add outputs of their own.
        if output.slot < len(kernel.outputs):
            made = tuple(dim.size for dim in output.tensor_description.shape.dim)
            expected = kernel.outputs[output.slot][1]
            if expected is not None and expected != made:
                return False
    return True


def _workspace(stats: Any) -> int:
    return int(sum(max(used.peak_bytes - used.live_bytes, 0) for used in stats.memory))
