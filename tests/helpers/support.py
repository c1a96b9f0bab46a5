"""Comparing memory-saving gradients with TensorFlow's own, bit for bit.

A *program* is a function of `Inputs` and of ``gradients`` (``tf.gradients``, or ``ms.gradients``
with a mode bound to it). It builds ops in the current graph and returns any structure of results.
It is built once with each, in separate graphs, and all results must be the same.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.tf_private.config import deterministic
from memsaving_gradients.engine.driver.attempts import Attempts
from tests.helpers.sampling import sample

v1 = tf.compat.v1

MODES = ("auto", "memory", "speed", "collection", "list", None)
KINDS = ("session", "function", "tape")

_CLONE = re.compile(r"_recomputed(_\d+)?$")


def numbers(name: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normally distributed numbers that depend on the name alone."""
    return (np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * scale).astype(
        np.float32
    )


class Inputs:
    """The inputs of a program: data by name, weights, marks.

    ``dynamic``: data have an unknown batch dimension. ``use_resource``: the kind of variables in
    sessions.
    """

    def __init__(
        self, data: dict[str, np.ndarray], *, dynamic: bool = False, use_resource: bool = True
    ) -> None:
        self.arrays = data
        self.dynamic, self.use_resource = dynamic, use_resource
        self.kept: dict[str, tf.Variable] = {}
        self.restart({})

    def restart(self, tensors: dict[str, tf.Tensor]) -> None:
        self.tensors = tensors
        self.weights: dict[str, Any] = {}
        self.marks: list[tf.Tensor] = []

    def __getitem__(self, name: str) -> tf.Tensor:
        return self.tensors[name]

    def shape(self, name: str) -> list[int | None]:
        shape = self.arrays[name].shape
        return [None, *shape[1:]] if self.dynamic and shape else list(shape)

    def weight(self, name: str, *shape: int, scale: float | None = None) -> Any:
        """Return the variable of this name, made by the first call."""
        if name in self.weights:
            return self.weights[name]
        fan = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        value = numbers(name, *shape, scale=fan**-0.5 if scale is None else scale)
        if isinstance(tf.compat.v1.get_default_graph(), _function_graph_type()):
            with tf.init_scope():
                if name not in self.kept:
                    self.kept[name] = tf.Variable(value, name=name)
            self.weights[name] = self.kept[name]
        else:
            self.weights[name] = v1.get_variable(
                name, initializer=value, use_resource=self.use_resource
            )
        return self.weights[name]

    def mark(self, tensor: tf.Tensor) -> tf.Tensor:
        """Mark a tensor to keep in the modes ``"collection"`` and ``"list"``, with the same ops in
        every mode."""
        tensor = tf.identity(tensor, name=f"mark_{len(self.marks)}")
        self.marks.append(tensor)
        return tensor

    @property
    def all(self) -> list[Any]:
        """All floating data and all weights."""
        return [t for t in self.tensors.values() if t.dtype.is_floating] + list(
            self.weights.values()
        )


def _function_graph_type() -> type:
    from tensorflow.python.framework.func_graph import FuncGraph

    return FuncGraph


Program = Callable[[Inputs, Callable[..., Any]], Any]


def bound(mode: Any, inputs: Inputs) -> Callable[..., Any]:
    """Return ``ms.gradients`` in a mode, or with options from `asking`; a call passes the marks."""

    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, tuple):
            return ms.gradients(ys, xs, *args, **kwargs, **dict(mode))
        return ms.gradients(ys, xs, *args, checkpoints=as_checkpoints(mode, inputs), **kwargs)

    return gradients


def asking(**options: Any) -> tuple[tuple[str, Any], ...]:
    """Return options of ``ms.gradients`` in place of a mode."""
    return tuple(options.items())


def as_checkpoints(mode: Any, inputs: Inputs) -> Any:
    if mode == "collection":
        for tensor in inputs.marks:
            v1.add_to_collection("checkpoints", tensor)
    if mode == "list":
        assert inputs.marks
        return list(inputs.marks)
    return mode


def names(mode: Any, count: int) -> Any:
    """Return checkpoints for `ms.patched`, which needs names because no tensor exists yet."""
    return [f"mark_{i}" for i in range(count)] if mode == "list" else mode


@dataclass
class Outcome:
    """The outcome of a program: results, plans, names of clones before and after grappler."""

    results: Any
    plans: tuple[ms.Plan, ...] = ()
    clones: list[str] = field(default_factory=list)
    surviving: list[str] = field(default_factory=list)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Op determinism on, grappler's arithmetic rewriting off."""
    # Plans are followed even if they save nothing: only results are compared.
    followed = mock.patch.object(Attempts, "if_it_saves", lambda _, found: found)
    with deterministic(), followed:
        yield


@contextmanager
def arithmetic_rewriting(on: bool) -> Iterator[None]:
    """Switch grappler's arithmetic rewriting on or off, for functions; sessions have
    `session_config`."""
    before = tf.config.optimizer.get_experimental_options().get("arithmetic_optimization", True)
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": on})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": before})


def normalized_network(layers: int = 6) -> tuple[tf.Tensor, tf.Tensor]:
    """Build products and normalizations of 1024 rows of 64 numbers in the current graph; return x,
    and the sum of the last layer."""
    x = y = v1.placeholder(tf.float32, [1024, 64])
    for _ in range(layers):
        y = tf.matmul(y, v1.placeholder(tf.float32, [64, 64]))
        mean, variance = tf.nn.moments(y, [0])
        y = tf.nn.relu(tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3))
    return x, tf.reduce_sum(y)


def session_config(arithmetic: bool = False) -> v1.ConfigProto:
    config = v1.ConfigProto()
    if not arithmetic:
        rewriting = config.graph_options.rewrite_options
        rewriting.arithmetic_optimization = type(rewriting).OFF
    return config


def in_session(program: Program, inputs: Inputs, mode: Any = "plain", *, steps: int = 1) -> Outcome:
    """Run a program in a graph and a session of its own."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        inputs.restart({})
        inputs.restart(
            {
                name: v1.placeholder(array.dtype, inputs.shape(name), name=name)
                for name, array in inputs.arrays.items()
            }
        )
        results = program(inputs, tf.gradients if mode == "plain" else bound(mode, inputs))
        feed = {inputs[name]: array for name, array in inputs.arrays.items()}
        fetches = _opened(results)
        tensors = [t for t in tf.nest.flatten(fetches) if isinstance(t, tf.Tensor)]
        metadata = v1.RunMetadata()
        with v1.Session(config=session_config()) as session:
            session.run(v1.global_variables_initializer())
            for _ in range(steps):
                values = session.run(
                    tensors,
                    feed,
                    options=v1.RunOptions(output_partition_graphs=True),
                    run_metadata=metadata,
                )
    left = iter(values)
    filled = tf.nest.map_structure(
        lambda t: np.asarray(next(left)) if isinstance(t, tf.Tensor) else t, fetches
    )
    nodes = [node.name for part in metadata.partition_graphs for node in part.node]
    return Outcome(
        filled,
        ms.plans(graph),
        [op.name for op in graph.get_operations() if _CLONE.search(op.name)],
        [name for name in nodes if _CLONE.search(name)],
    )


def in_function(
    program: Program, inputs: Inputs, mode: Any = "plain", *, steps: int = 1, **options: Any
) -> Outcome:
    """Run a program in a ``tf.function`` of its own."""
    tf.random.set_seed(7)
    signature = {n: tf.TensorSpec(inputs.shape(n), a.dtype) for n, a in inputs.arrays.items()}

    @tf.function(input_signature=[signature], autograph=False, **options)
    def function(tensors: dict[str, tf.Tensor]) -> Any:
        inputs.restart(tensors)
        return _opened(program(inputs, tf.gradients if mode == "plain" else bound(mode, inputs)))

    data = {name: tf.constant(array) for name, array in inputs.arrays.items()}
    for _ in range(steps):
        results = function(data)
    return Outcome(
        tf.nest.map_structure(lambda t: t if t is None else t.numpy(), results), ms.plans(function)
    )


def _opened(results: Any) -> Any:
    """Return results with slices as dictionaries of tensors, and with values of variables."""
    if isinstance(results, tf.IndexedSlices):
        parts = {"values": results.values, "indices": results.indices}
        return parts | ({} if results.dense_shape is None else {"shape": results.dense_shape})
    if isinstance(results, dict):
        return {key: _opened(value) for key, value in results.items()}
    if isinstance(results, list | tuple):
        return [_opened(value) for value in results]
    if isinstance(results, tf.Variable):
        return tf.identity(results)
    return results


def assert_identical(found: Any, expected: Any, what: str) -> None:
    """Assert the same structure and the same bits."""
    tf.nest.assert_same_structure(found, expected)
    for place, (a, b) in enumerate(
        zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    ):
        if b is None or a is None:
            assert a is None and b is None, f"{what}: result {place} is None on one side only"
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what}: result {place}"
        if a.tobytes() != b.tobytes():
            far = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
            raise AssertionError(f"{what}: result {place} of shape {a.shape} differs by {far:.3g}")


def assert_same(
    program: Program,
    inputs: Inputs,
    *,
    modes: Iterable[Any] = MODES,
    kinds: Sequence[str] = ("session", "function"),
    steps: int = 1,
) -> dict[tuple[str, Any], Outcome]:
    """Assert that a program returns the same bits with ``ms.gradients`` as with ``tf.gradients``.

    In the fast suite, each mode is tried in one of the kinds, and each kind with one of the modes
    (`sampling.sample`).
    """
    return _compared(program, inputs, sample([*kinds], [*modes]), steps)


def _compared(
    program: Program, inputs: Inputs, cases: Sequence[tuple[str, Any]], steps: int = 1
) -> dict[tuple[str, Any], Outcome]:
    runners = {"session": in_session, "function": in_function}
    outcomes: dict[tuple[str, Any], Outcome] = {}
    for kind, mode in cases:
        if (kind, "plain") not in outcomes:
            outcomes[kind, "plain"] = runners[kind](program, inputs, steps=steps)
        ours = runners[kind](program, inputs, mode, steps=steps)
        expected = outcomes[kind, "plain"].results
        assert_identical(ours.results, expected, f"{kind}, checkpoints={mode!r}")
        outcomes[kind, mode] = ours
    return outcomes


@dataclass
class Net:
    """Arguments of a gradient computation: ``ys``, ``xs`` (by default all floating inputs and
    weights), options."""

    ys: Any
    xs: Any = None
    options: dict[str, Any] = field(default_factory=dict)


Build = Callable[[Inputs], Net | list[Net]]


def assert_same_gradients(
    build: Build,
    inputs: Inputs,
    *,
    modes: Sequence[Any] = MODES,
    kinds: Sequence[str] = KINDS,
    recomputed: Iterable[Any] = (),
) -> dict[tuple[str, Any], Outcome]:
    """Assert that gradients of the nets of ``build`` are TensorFlow's own, in a session, in a
    function and from tapes.

    In the fast suite, each mode is tried in one of the kinds, and each kind with one of the modes
    (`sampling.sample`). ``recomputed``: modes in which every gradient computation must recompute
    something.
    """
    marks = 0

    def program(p: Inputs, gradients: Callable[..., Any]) -> Any:
        nonlocal marks
        nets = _listed(build(p))
        marks = len(p.marks)
        return [[n.ys, gradients(n.ys, _xs(n, p), **n.options)] for n in nets]

    cases = sample([*kinds], [*modes])
    outcomes = _compared(program, inputs, [case for case in cases if case[0] != "tape"])

    def taped(p: Inputs, _: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([t for t in p.tensors.values() if t.dtype.is_floating])
            nets = _listed(build(p))
        if p.marked:
            for tensor in p.marks:
                v1.add_to_collection("checkpoints", tensor)
        return [[n.ys, tape.gradient(n.ys, _xs(n, p), **_for_tape(n.options))] for n in nets]

    taken = [mode for kind, mode in cases if kind == "tape"]
    if taken:
        inputs.marked = False
        plain = in_function(taped, inputs)
        marks = len(inputs.marks)
        for mode in taken:
            inputs.marked = mode == "collection"
            with ms.patched(checkpoints=names(mode, marks)):
                ours = in_function(taped, inputs)
            assert_identical(ours.results, plain.results, f"tape, checkpoints={mode!r}")
            outcomes["tape", mode] = ours
    for (kind, mode), outcome in outcomes.items():
        if mode in recomputed:
            clones = [plan.clones for plan in outcome.plans]
            assert clones and all(clones), f"{kind}, checkpoints={mode!r}: nothing recomputed"
    return outcomes


def _listed(nets: Net | list[Net]) -> list[Net]:
    return nets if isinstance(nets, list) else [nets]


def _xs(net: Net, p: Inputs) -> Any:
    return p.all if net.xs is None else net.xs


def _for_tape(options: dict[str, Any]) -> dict[str, Any]:
    known = {"grad_ys": "output_gradients", "unconnected_gradients": "unconnected_gradients"}
    return {known[key]: value for key, value in options.items()}


def check_error(error: ms.errors.ArgumentError, argument: str, value: str, way_out: str) -> None:
    """Assert that an error names the argument first, the offending value, and the way out."""
    text = str(error)
    assert error.argument == argument
    assert text.startswith(f"{argument}=")
    assert value in text
    assert way_out in text


#: Modes of tests with long programs.
SHORT = ("memory", "list", None)


def data(**more):
    """Return inputs of programs made of `layers`: ``x`` of 16 rows of 32 numbers."""
    return Inputs({"x": numbers("x", 16, 32)} | more)


def layers(p, h, first, last, between=None):
    """Add tanh layers ``first`` … ``last - 1``, with ``between`` applied to each output."""
    for i in range(first, last):
        h = tf.tanh(tf.matmul(h, p.weight(f"w{i}", 32, 32)))
        h = h if between is None else between(i, h)
    return h


def tall(p):
    """Build seven layers with a mark after the third; return the marked tensor and the output."""
    h = p.mark(layers(p, p["x"], 0, 3))
    return h, layers(p, h, 3, 7)
