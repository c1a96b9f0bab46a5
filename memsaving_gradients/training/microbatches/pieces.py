"""A call in pieces: trace one microbatch, run the loop, hand the gradients on.

What the function does decides what becomes of it. If it hands gradients to an optimizer, that gets
the batch's, once, after the loop. If it returns a scalar and hands on nothing, it is a loss, whose
gradients are computed in the loop. Else its results are all there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools.tf_private import autodiff, graphs
from graph_tools.warn import warn
from memsaving_gradients import patching
from memsaving_gradients.engine import graph_state, whole_step
from memsaving_gradients.engine.options import Options, check_one_of
from memsaving_gradients.errors import (
    ArgumentError,
    BatchStatisticsWarning,
    NothingSavedWarning,
)
from memsaving_gradients.reports.describe import source_line
from memsaving_gradients.training.microbatches.applying import (
    Application,
    check_no_other_updates,
    check_updates,
    noted,
)
from memsaving_gradients.training.microbatches.buffers import BUFFERS, is_number
from memsaving_gradients.training.microbatches.denominators import losses_in
from memsaving_gradients.training.microbatches.loop import Traced, added_up
from memsaving_gradients.training.microbatches.losses import (
    loss_with,
    through_the_loop,
    without_gradient,
)
from memsaving_gradients.training.microbatches.mixing import mixing_op
from memsaving_gradients.training.microbatches.normalization import POLICIES, normalizing
from memsaving_gradients.training.microbatches.reducing import ways_of
from memsaving_gradients.training.microbatches.splitting import Batch, batch_of, stretches

__all__ = ["Cut", "in_pieces"]


@dataclass(frozen=True)
class Cut:
    """How batches are cut, as for `microbatch`; checked when it is made."""

    size: int
    reduce: Any = "mean"
    whole: Sequence[str] = ()
    batch_norm: str | None = None
    buffer: str = "float32"

    def __post_init__(self) -> None:
        size = self.size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ArgumentError("size", size, "give a number of examples from 1 on")
        object.__setattr__(self, "size", int(size))
        if self.batch_norm not in POLICIES:
            raise ArgumentError(
                "batch_norm", self.batch_norm, f"give one of {', '.join(map(repr, POLICIES))}"
            )
        check_one_of("buffer", self.buffer, BUFFERS)
        if isinstance(self.whole, str):
            raise ArgumentError("whole", self.whole, f"give a list of names: [{self.whole!r}]")


@dataclass(eq=False)
class _Found:
    """What was seen while a microbatch was traced.

    Attributes
    ----------
    results
        What the function returned.
    applied
        What optimizers were given.
    is_loss
        Whether it is to be differentiated.
    read
        The variables, and tensors from outside that are not cut, with respect to which it may be
        differentiated.
    counts
        Whether it says itself what a microbatch counts.
    outputs
        All that the trace gives: results, then gradients, then what a microbatch counts.
    """

    results: Any = None
    applied: list[Application] = field(default_factory=list)
    is_loss: bool = False
    read: list[Any] = field(default_factory=list)
    counts: bool = False
    outputs: list[Any] = field(default_factory=list)


def in_pieces(
    function: Callable[..., Any], cut: Cut, options: Options | None = None
) -> Callable[..., Any]:
    """``function`` in microbatches, whose gradients save memory as ``options`` say, or else a patch
    in force."""

    @functools.wraps(function)
    def in_microbatches(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return compiled(*args, **kwargs)
        return _built(function, cut, options, args, kwargs)

    result = graphs.left_by_autograph(in_microbatches)
    compiled = tf.function(result)
    return result


@graphs.left_by_autograph
def _built(
    function: Callable[..., Any],
    cut: Cut,
    options: Options | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Build the loop in the current graph."""
    batch = batch_of(function, args, kwargs, cut.whole)
    rows = batch.rows
    if rows is not None and rows < cut.size:
        warn(
            f"microbatch: a batch of {rows} is smaller than size={cut.size}, and is not cut; give a"
            " size that is a part of the batch",
            NothingSavedWarning,
        )
    parts = _differentiable(batch.parts)
    pieces = stretches(batch, cut.size, static=autodiff.compiled_by_xla())
    count = sum((one.count for one in pieces), tf.constant(0))
    found, traced = _Found(), []
    for stretch in pieces:
        static = stretch.rows if isinstance(stretch.rows, int) else None
        found, one = _trace(function, cut, options, batch, static, count, parts)
        traced.append(one)
    # What is differentiated outside, and is no loss, is differentiated through the loop.
    ready = found.is_loss or found.applied
    with graphs.unrecorded() if ready else nullcontext():
        flat = added_up(batch, pieces, traced, cut.buffer)
    if found.counts:
        flat.pop()
    results = len(tf.nest.flatten(found.results))
    grads = flat[results:]
    if dense := [grad for grad in grads if isinstance(grad, tf.Tensor)]:
        whole_step.note_added_up(dense)
    sources = [*found.read, *(batch.parts[k] for k in parts)]
    if found.is_loss:
        loss = loss_with(flat[0], grads, sources)
        graph_state.differentiated(loss)
        return loss
    for application in found.applied:
        application.apply(grads[: len(application.grads)])
        del grads[: len(application.grads)]
    if found.applied:
        given = [without_gradient(one, sources) for one in flat[:results]]
    else:
        given = [through_the_loop(one) for one in flat[:results]]
    return tf.nest.pack_sequence_as(found.results, given)


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function behind a ``tf.function``: what was traced before would not hand its
    updates over."""
    return getattr(function, "python_function", function)


def _differentiable(parts: Sequence[tf.Tensor]) -> list[int]:
    """Which rows a gradient may be asked for: those that a tape watches; where there is no tape,
    all."""
    real = [k for k, part in enumerate(parts) if is_number(part.dtype)]
    return [k for k in real if not graphs.tape_is_recording() or graphs.is_watched(parts[k])]


def _trace(
    function: Callable[..., Any],
    cut: Cut,
    options: Options | None,
    batch: Batch,
    rows: int | None,
    count: tf.Tensor,
    parts: Sequence[int],
) -> tuple[_Found, Traced]:
    """Trace the function for microbatches of ``rows`` examples, one of ``count``."""
    found = _Found()
    converted = graphs.as_autograph_would(_traceable(function))

    def one(count: tf.Tensor, *given: tf.Tensor) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        args, kwargs = batch.with_parts(given)

        def examples_of_batch() -> tf.Tensor:
            return batch.examples / tf.shape(given[0])[0]

        with ExitStack() as stack:
            normalized = stack.enter_context(normalizing(cut.batch_norm, count, cut.size))
            stack.enter_context(_saving(cut.size, options))
            losses = stack.enter_context(losses_in(examples_of_batch))
            with noted() as found.applied:
                found.results = converted(*args, **kwargs)
            flat = [_as_tensor(value) for value in tf.nest.flatten(found.results)]
            grads = [grad for application in found.applied for grad in application.grads]
            found.is_loss = not found.applied and _is_loss(found.results)
            found.read, inside = _read(graph)
            if found.is_loss:
                # Tapes around the loop have nothing to see here.
                with graphs.unrecorded():
                    grads = tf.gradients(flat[0], [*inside, *(given[k] for k in parts)])
        _check_mixing(
            flat,
            given,
            grads,
            statistics=not normalized and not losses.weighted,
            is_loss=found.is_loss,
        )
        counts = losses.counts() if cut.reduce != "sum" else None
        found.counts = counts is not None
        found.outputs = [*flat, *grads, *([counts] if found.counts else [])]
        return found.outputs

    specs = [tf.TensorSpec([], tf.int32), *batch.specs(rows)]
    with whole_step.consumed_at_once():
        concrete = tf.function(one, autograph=False).get_concrete_function(*specs)
    check_updates(function, found.applied)
    check_no_other_updates(concrete.graph)
    ways = ways_of(cut.reduce, found.results)
    way = "sum" if cut.reduce == "sum" else "mean"
    grads = len(found.outputs) - len(ways) - found.counts
    of_rows = len(parts) if found.is_loss else 0
    ways += [way] * (grads - of_rows)
    ways += ["concat" if way == "sum" else "weighted"] * of_rows
    ways += ["sum"] * found.counts
    outputs, counts = found.outputs, found.counts
    return found, Traced(lambda *given: concrete(count, *given), outputs, ways, counts)


def _check_mixing(
    results: Sequence[Any],
    given: Sequence[tf.Tensor],
    grads: Sequence[Any],
    *,
    statistics: bool,
    is_loss: bool,
) -> None:
    """Warn if results of a microbatch compare its examples; losses and layers that say so
    themselves are no ``statistics``, and of a loss the first result ``is_loss``."""
    found = [t for t in results if isinstance(t, tf.Tensor) and t.graph is given[0].graph]
    stop = [t for t in tf.nest.flatten(grads, expand_composites=True) if t is not None]
    losses = found[:1] if is_loss else ()
    op = mixing_op(found, given, stop=stop, statistics=statistics, losses=losses)
    if op is not None:
        warn(
            f"microbatch: {op.name!r} ({source_line(op)}) compares examples, or normalizes by"
            " statistics of them, and a microbatch has only its own, so that gradients are not"
            " those of the whole batch. Compute this loss on the whole batch, within a budget"
            " instead of microbatches, or take one that treats each example by itself.",
            BatchStatisticsWarning,
        )


def _read(graph: tf.Graph) -> tuple[list[Any], list[Any]]:
    """What a function's graph has read from outside and may be differentiated by: variables, and
    tensors; and what stands for each inside.

    Where a tape records, of tensors and of variables that are not trained those that it watches.
    """
    variables = [v for v in autodiff.variables_in(graph) if is_number(v.dtype)]
    tapes = graphs.tape_is_recording()
    variables = [v for v in variables if v.trainable or (tapes and graphs.is_watched(v.handle))]
    pairs = [
        (outer, inner)
        for outer, inner in graph.captures
        if is_number(outer.dtype)
        and (graphs.is_watched(outer) if tapes else tf.is_symbolic_tensor(outer))
    ]
    return [*variables, *(o for o, _ in pairs)], [*variables, *(i for _, i in pairs)]


def _as_tensor(value: Any) -> Any:
    """What can be given by a loop: tensors, slices of gradients, or nothing."""
    if value is None or isinstance(value, tf.IndexedSlices):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        raise ArgumentError(
            "function", value, f"returns a {type(value).__name__}; return tensors, or None"
        ) from None


def _is_loss(results: Any) -> bool:
    """Whether a function that applies nothing returned something to differentiate."""
    return isinstance(results, tf.Tensor) and not results.shape.rank and results.dtype.is_floating


@contextmanager
def _saving(size: int, options: Options | None) -> Iterator[None]:
    """``options`` in force, or else those of a patch, for microbatches."""
    if options is None:
        with patching.for_batches_of(size):
            yield
        return
    with patching.scoped(options, eager_is_error=False) as check:
        yield
        check()
