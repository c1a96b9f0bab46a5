"""Memory and time of the five strategies of Chen, Xu, Zhang and Guestrin 2016 on one network.

The paper (arXiv 1604.06174, section 5.1) compares, by planning alone:

- ``no optimization``: every result has a buffer of its own, to the end of the step;
- ``inplace``: an elementwise op writes into an input that no later op reads; no other buffer is
  freed;
- ``sharing``: buffers are freed at their last use as well, as by TensorFlow's executor;
- ``drop cheap``: results of cheap ops (normalizations, activations) are dropped and recomputed;
- ``sublinear plan``: segments of a searched budget (:mod:`memsaving_gradients.planners.chen`).

Figures are simulated and nothing runs. As in the paper, they exclude parameters and the scratch
space of kernels, which the table lists separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import Limits, cheap_ops, chen
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

__all__ = ["Strategies", "Strategy", "strategies"]


@dataclass(frozen=True)
class Strategy:
    """One way to save memory, with its peak and its extra time.

    Attributes
    ----------
    name
        Name in the paper.
    peak
        The most bytes of intermediate results, gradients included, at any time of the step.
    extra
        Estimated time of the recomputed ops, as a fraction of the plain step's.
    clones
        Number of recomputed ops.
    """

    name: str
    peak: int
    extra: float = 0.0
    clones: int = 0


@dataclass(frozen=True)
class Strategies:
    """A printable table of strategies on one network.

    Attributes
    ----------
    rows
        The strategies, in the order of the paper.
    parameters
        Bytes of the parameters, which every strategy needs in addition (0 if unknown).
    workspace
        The most scratch bytes of one op, which every strategy needs in addition (0 if unknown).
    """

    rows: tuple[Strategy, ...]
    parameters: int = 0
    workspace: int = 0

    def __getitem__(self, name: str) -> Strategy:
        """Return the strategy of this name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no strategy {name!r}; there are {[row.name for row in self.rows]}")

    def __iter__(self) -> Iterator[Strategy]:
        return iter(self.rows)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [
            f"{'strategy':<{width}}  {'peak bytes':>18}  {'extra time':>10}  {'run again':>10}"
        ]
        lines += [
            f"{row.name:<{width}}  {row.peak:>18,}  {row.extra:>10.1%}  {row.clones:>10,}"
            for row in self.rows
        ]
        lines.append(
            f"besides: parameters {self.parameters:,} bytes, scratch of one op {self.workspace:,}"
            " bytes"
        )
        return "\n".join(lines)


def strategies(
    network: TrainingGraph | Callable[..., Any],
    *arguments: Any,
    variables: Sequence[Any] | None = None,
    parameters: int = 0,
    batch_size: int = 32,
) -> Strategies:
    """Return memory and time of the paper's five strategies on a network.

    Parameters
    ----------
    network
        A training graph, or a function that returns the loss. The function is traced into a graph
        of its own, and never run.
    arguments
        Arguments of the function: tensors, arrays, or ``tf.TensorSpec``.
    variables
        Variables with respect to which the loss of a function is differentiated; by default all
        trainable variables that it reads.
    parameters
        Bytes of the parameters of a training graph; for a function they are counted.
    batch_size
        Value of an unknown batch dimension of ``arguments``.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from benchmarks.planning.strategies import strategies
    >>> weights = [tf.Variable(tf.zeros([256, 256])) for _ in range(16)]
    >>> def loss(x):
    ...     for w in weights:
    ...         x = tf.tanh(x @ w)
    ...     return tf.reduce_sum(x)
    >>> found = strategies(loss, tf.TensorSpec([1024, 256]))
    >>> found["sublinear plan"].peak < found["sharing"].peak < found["no optimization"].peak
    True
    >>> found.parameters
    4194304
    """
    if not isinstance(network, TrainingGraph):
        graph, parameters = _traced(network, arguments, variables, batch_size)
    elif arguments or variables is not None:
        raise ArgumentError(
            "network", "a TrainingGraph", "takes neither arguments nor variables; give a function"
        )
    else:
        graph = network
    workspace = 0 if graph.workspace is None else int(graph.workspace.max(initial=0))
    graph = replace(graph, workspace=None)
    whole = max(graph.total_seconds, 1e-12)
    rows = [
        Strategy("no optimization", int(graph.size.sum())),
        Strategy("inplace", _in_place(graph)),
        Strategy("sharing", simulate(graph, plain(graph)).peak),
    ]
    for name, plan in (("drop cheap", cheap_ops.plan), ("sublinear plan", chen.plan)):
        proposal = plan(graph, Limits())
        clones = proposal.schedule.clones
        rows.append(Strategy(name, proposal.peak, proposal.extra_seconds / whole, clones))
    return Strategies(tuple(rows), parameters, workspace)


def _in_place(graph: TrainingGraph) -> int:
    """Return the bytes of all buffers, if ops that can overwrite an input do so at its last use."""
    storage, size = graph.storage.tolist(), graph.size.tolist()
    forwards, source = graph.forwards.tolist(), graph.source.tolist()
    last = [-1] * len(storage)
    for op, reads in enumerate(graph.reads):
        for value in reads:
            last[storage[value]] = op
    for value in graph.targets:
        last[storage[value]] = graph.length
    total = int(graph.size.sum())
    for op in range(graph.length):
        if not forwards[op]:
            continue
        free = [
            root
            for root in dict.fromkeys(storage[v] for v in graph.reads[op])
            if last[root] == op and not source[root]
        ]
        for value in graph.writes[op]:
            taken = next((root for root in free if size[value] and size[root] == size[value]), None)
            if taken is not None:
                free.remove(taken)
                total -= size[value]
    return total


def _traced(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    variables: Sequence[Any] | None,
    batch_size: int,
) -> tuple[TrainingGraph, int]:
    """Return the training graph of a loss, and the bytes of the variables of its gradients."""
    import tensorflow as tf

    from graph_tools.tf_private import graphs
    from memsaving_gradients.capture.training_step import capture_step
    from memsaving_gradients.engine.differentiate import paused

    found: list[tuple[TrainingGraph, int]] = []

    def step(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = function(*inputs)
        xs = list(tape.watched_variables() if variables is None else variables)
        if not xs:
            raise ArgumentError(
                "variables", variables, "nothing to differentiate with respect to; give some"
            )
        # The next op is the first backward op.
        border = graphs.creation_index(tf.no_op()) + 1
        with paused():
            grads = [g for g in tf.gradients(loss, xs) if g is not None]
        flat = [t for g in grads for t in tf.nest.flatten(g, expand_composites=True)]
        if not flat:
            raise ArgumentError("network", function, "the loss depends on none of the variables")
        captured = capture_step(
            border,
            tf.nest.flatten(loss),
            flat,
            batch=batch_size,
            hold_gradients=False,
            may_chain=False,
        )
        bytes_of = (x.dtype.base_dtype.size * (x.shape.num_elements() or 0) for x in xs)
        found.append((captured.graph, sum(bytes_of)))
        return loss

    tf.function(step, autograph=False).get_concrete_function(*arguments)
    return found[0]
