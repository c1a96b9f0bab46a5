"""The loop over microbatches: one trace of the step, one buffer for each of its outputs.

The step is traced once for each shape of a microbatch, as a function of its own, in which gradients
are planned as in any other step. The loop calls it and adds up its outputs, with
``parallel_iterations=1``: else TensorFlow begins the next forward pass while a backward pass still
runs, and holds the activations of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from memsaving_gradients.training.microbatches.buffers import Reducer
from memsaving_gradients.training.microbatches.reducing import reducer
from memsaving_gradients.training.microbatches.splitting import Batch, Stretch

__all__ = ["Traced", "added_up"]


@dataclass(frozen=True, eq=False)
class Traced:
    """The traced function of a microbatch.

    Attributes
    ----------
    run
        A function from the rows of a microbatch to its outputs, flat.
    outputs
        The symbolic outputs of the trace; ``None`` where there is no output.
    ways
        The reduction of each output.
    counts
        Whether the last output is the weight of the microbatch in means; else its share of the
        examples is.
    """

    run: Callable[..., Sequence[Any]]
    outputs: Sequence[Any]
    ways: Sequence[str]
    counts: bool = False


def added_up(
    batch: Batch, stretches: Sequence[Stretch], traced: Sequence[Traced], buffer: str
) -> list[Any]:
    """Return the reduced outputs of all microbatches; ``traced`` has one function for each stretch.
    ``buffer``: as for `reducer`."""
    there = [k for k, output in enumerate(traced[0].outputs) if output is not None]
    results: list[Any] = [None] * len(there)
    reducers: list[Reducer] = []
    for stretch, one in zip(stretches, traced, strict=True):
        # Stretches differ in rows, and so do the shapes of concatenated outputs.
        reducers = [reducer(one.ways[k], one.outputs[k], buffer) for k in there]
        results = _run(batch, stretch, one, reducers, there, results)
    total = reducers[-1].give(results[-1], None) if traced[0].counts else None
    found: list[Any] = [None] * len(traced[0].outputs)
    for k, how, result in zip(there, reducers, results, strict=True):
        found[k] = how.give(result, total)
    return found


def _run(
    batch: Batch,
    stretch: Stretch,
    traced: Traced,
    reducers: Sequence[Reducer],
    there: Sequence[int],
    before: Sequence[Any],
) -> list[Any]:
    begun = [one.begin(old, stretch.count) for one, old in zip(reducers, before, strict=True)]

    def body(k: tf.Tensor, state: list[list[Any]]) -> tuple[tf.Tensor, list[list[Any]]]:
        start, end = stretch.start_of(k), stretch.start_of(k + 1)
        given = traced.run(*batch.cut(start, end, stretch.rows))
        share = given[-1] if traced.counts else _share(batch, stretch, end - start)
        pairs = zip(reducers, state, there, strict=True)
        return k + 1, [one.take(old, k, given[i], share) for one, old, i in pairs]

    _, state = tf.while_loop(
        lambda k, _: k < stretch.count,
        body,
        (tf.constant(0), begun),
        parallel_iterations=1,
        maximum_iterations=stretch.count if isinstance(stretch.count, int) else None,
    )
    return [one.end(new, old) for one, new, old in zip(reducers, state, before, strict=True)]


def _share(batch: Batch, stretch: Stretch, rows: tf.Tensor) -> tf.Tensor:
    """Return a microbatch's share of the examples, in 64 bits."""
    if isinstance(stretch.rows, int) and batch.rows is not None:
        return tf.constant(stretch.rows / max(batch.rows, 1), tf.float64)
    examples = batch.examples if batch.rows is None else tf.constant(batch.rows)
    return rows / tf.maximum(examples, 1)
