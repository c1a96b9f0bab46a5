"""One training step as a callable: loss, gradients, and every gradient consumed at once.

Variables are updated only if an optimizer is named. Otherwise a step returns the sum of the squares
of each gradient. The sum consumes the gradient as soon as it exists, like an optimizer that updates
one variable after another. An unread gradient would be pruned; a returned one would live to the end
of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from benchmarks.networks import build
from benchmarks.networks.base import Model
from graph_tools.tf_private import hooks


@dataclass
class Step:
    """A step that is ready to run.

    Attributes
    ----------
    run
        Runs the step once and waits; returns the sums of squares, or the loss with an optimizer.
    graph
        The graph of the step.
    function, batch
        The ``tf.function`` that runs, and its arguments; ``None`` and empty for a session.
    seconds
        Wall time of ``"forward"`` (building the forward ops), ``"gradients"`` (the whole call
        for gradients) and ``"tensorflow"`` (the part of that call in TensorFlow's own code).
    """

    run: Callable[[], Any]
    graph: tf.Graph
    seconds: dict[str, float] = field(default_factory=dict)
    function: Any = None
    batch: tuple[tf.Tensor, ...] = ()


def make_step(
    model: str,
    options: dict[str, Any],
    checkpoints: Any = None,
    *,
    ours: bool,
    how: str = "function",
    settings: Mapping[str, Any] | None = None,
) -> Step:
    """Build a step of a network of the zoo.

    Parameters
    ----------
    model, options
        Arguments of `benchmarks.networks.build`. In addition, the option ``optimizer``: ``"sgd"``
        (with momentum), ``"adam"`` or ``"adamw"`` updates the variables.
    checkpoints
        Argument of ``memsaving_gradients.gradients``.
    ours
        Whether to use ``memsaving_gradients.gradients``; else ``tf.gradients``.
    how
        ``"function"``, ``"xla"`` (a ``tf.function`` with ``jit_compile=True``) or ``"session"``.
    settings
        Arguments of ``memsaving_gradients.gradients`` in place of `checkpoints`: ``{"budget":
        0.5}``.
    """
    asked = {"checkpoints": checkpoints} if settings is None else dict(settings)
    options = dict(options)
    optimizer_name = options.pop("optimizer", None)
    seconds: dict[str, float] = {}
    optimizer: Any = None

    def sums(network: Model, *batch: tf.Tensor) -> tf.Tensor:
        start = time.perf_counter()
        loss = network.loss(*batch)
        seconds["forward"] = time.perf_counter() - start
        grads = _gradients(loss, list(network.variables), asked, ours, seconds)
        if optimizer is not None:
            optimizer.apply_gradients(zip(grads, network.variables, strict=True))
            return tf.stack([loss])
        # Variables that the loss does not need have no gradient.
        made = [tf.convert_to_tensor(g) for g in grads if g is not None]
        return tf.stack([tf.reduce_sum(tf.square(g)) for g in made])

    if how == "session":
        return _session_step(lambda: build(model, **options), sums, seconds)
    network = build(model, **options)
    if optimizer_name is not None:
        optimizer = make_optimizer(optimizer_name, network)
    batch = [tf.constant(b) for b in network.batch]

    def compute(*batch: tf.Tensor) -> tf.Tensor:
        return sums(network, *batch)

    step = tf.function(compute, jit_compile=how == "xla")
    graph = step.get_concrete_function(*batch).graph
    return Step(lambda: step(*batch).numpy(), graph, seconds, step, tuple(batch))


def _session_step(
    make: Callable[[], Model], sums: Callable[..., tf.Tensor], seconds: dict[str, float]
) -> Step:
    graph = tf.Graph()
    with graph.as_default():
        network = make()
        fed = [tf.compat.v1.placeholder(b.dtype, b.shape) for b in network.batch]
        fetch = sums(network, *fed)
        session = tf.compat.v1.Session(graph=graph)
        session.run(tf.compat.v1.global_variables_initializer())
    feed = dict(zip(fed, network.batch, strict=True))
    return Step(lambda: session.run(fetch, feed), graph, seconds)


def make_optimizer(name: str, network: Model) -> Any:
    """Return a Keras optimizer with slots, with so low a rate that variables hardly change."""
    import keras

    make = {
        "sgd": lambda: keras.optimizers.SGD(1e-6, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-7),
        "adamw": lambda: keras.optimizers.AdamW(1e-7),
    }
    found = make[name]()
    found.build(list(network.variables))
    return found


def _gradients(
    loss: tf.Tensor, xs: list[Any], asked: dict[str, Any], ours: bool, seconds: dict[str, float]
) -> list[Any]:
    """Return the gradients; add the whole time, and TensorFlow's share of it, to ``seconds``."""
    spent = 0.0

    def timed(inner: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent += time.perf_counter() - start

    end = hooks.differentiation.wrap(timed, innermost=True)
    try:
        start = time.perf_counter()
        if ours:
            import memsaving_gradients as ms

            grads = ms.gradients(loss, xs, **asked)
        else:
            grads = tf.gradients(loss, xs)
        seconds["gradients"] = time.perf_counter() - start
    finally:
        end()
    seconds["tensorflow"] = spent
    return list(grads)
