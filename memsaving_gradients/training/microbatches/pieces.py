"""A call in microbatches: trace one microbatch, run the loop, pass the gradients on.

If the function gives gradients to an optimizer, the optimizer gets the batch's gradients, once,
after the loop. If it returns a scalar and gives nothing to an optimizer, it is a loss, and the loop
computes its gradients. Otherwise the call only returns the reduced results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graph_tools.tf_private import autodiff, graphs
from graph_tools.warn import warn
from memsaving_gradients import patching
from memsaving_gradients.budget import is_integer
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
    """The arguments of `microbatch` that say how batches are cut, checked."""

    size: int
    reduce: Any = "mean"
    whole: Sequence[str] = ()
    batch_norm: str | None = None
    buffer: str = "float32"

    def __post_init__(self) -> None:
        if not is_integer(self.size, 1):
            raise ArgumentError("size", self.size, "give a number of examples, 1 or more")
        object.__setattr__(self, "size", int(self.size))
        if self.batch_norm not in POLICIES:
            raise ArgumentError(
                "batch_norm", self.batch_norm, f"give one of {', '.join(map(repr, POLICIES))}"
            )
        check_one_of("buffer", self.buffer, BUFFERS)
        if isinstance(self.whole, str):
            raise ArgumentError("whole", self.whole, f"give a list of names: [{self.whole!r}]")


@dataclass(eq=False)
class _Found:
    """The findings of the trace of a microbatch.

    Attributes
    ----------
    results
        The results of the function.
    applied
        The applications of gradients that optimizers were asked for.
    is_loss
        Whether the function is a loss, to be differentiated.
    read
        The variables, and uncut tensors from outside, with respect to which a loss may be
        differentiated.
    counts
        Whether the last output is the weight of a microbatch.
    outputs
        All outputs of the trace: results, then gradients, then the weight of a microbatch.
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
    """Return ``function`` in microbatches, whose gradients save memory by ``options``, or else by
    the options of a patch in force."""

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
            f"microbatch: a batch of {rows} is smaller than size={cut.size}, so it is not cut;"
            " give a size smaller than the batch",
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
    # Results that are no loss are differentiated outside, through the loop.
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
    """Return the Python function behind a ``tf.function``: optimizers in an earlier trace would not
    note their updates."""
    return getattr(function, "python_function", function)


def _differentiable(parts: Sequence[tf.Tensor]) -> list[int]:
    """Return the numbers of the parts that a gradient may be asked for: the parts that a tape
    watches, or all without a tape."""
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
    """Trace the function for one of ``count`` microbatches, of ``rows`` examples."""
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
                # Tapes around the loop must not record this.
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
    """Warn if results compare the examples of a microbatch. ``statistics``: as for `mixing_op`; not
    if losses or layers report them. ``is_loss``: whether the first result is a loss."""
    found = [t for t in results if isinstance(t, tf.Tensor) and t.graph is given[0].graph]
    stop = [t for t in tf.nest.flatten(grads, expand_composites=True) if t is not None]
    losses = found[:1] if is_loss else ()
    op = mixing_op(found, given, stop=stop, statistics=statistics, losses=losses)
    if op is not None:
        warn(
            f"microbatch: {op.name!r} ({source_line(op)}) compares examples, or normalizes by"
            " statistics of them, and sees only those of its microbatch, so that gradients are not"
            " those of the whole batch. Compute this loss on the whole batch, within a budget"
            " instead of microbatches, or use a loss that treats each example by itself.",
            BatchStatisticsWarning,
        )


def _read(graph: tf.Graph) -> tuple[list[Any], list[Any]]:
    """Return the variables and outside tensors that a function's graph reads and gradients may be
    asked for, and the counterpart of each inside.

    If a tape records, it must watch the tensors, and the variables that are not trainable.
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
    """Return ``value`` as a loop can return it: a tensor, slices of a gradient, or ``None``."""
    if value is None or isinstance(value, tf.IndexedSlices):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        raise ArgumentError(
            "function", value, f"returns a {type(value).__name__}; return tensors, or None"
        ) from None


def _is_loss(results: Any) -> bool:
    """Return whether the results of a function that applies no gradients are a loss."""
    return isinstance(results, tf.Tensor) and not results.shape.rank and results.dtype.is_floating


@contextmanager
def _saving(size: int, options: Options | None) -> Iterator[None]:
    """Put ``options`` in force inside; without options, set a patch's batch size to ``size``."""
    if options is None:
        with patching.for_batches_of(size):
            yield
        return
    with patching.scoped(options, eager_is_error=False) as check:
        yield
        check()
