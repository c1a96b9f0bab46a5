"""A call in pieces: trace one microbatch, run the loop, hand the gradients on.

What the function does decides what becomes of it. If it hands gradients to an optimizer, that gets the batch's, once, after the loop. If it
returns a scalar and hands on nothing, it is a loss, whose gradients are computed in the loop. Else its results are all there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from graph_tools import _tf, _tf_autodiff
from graph_tools.warn import warn
from memsaving_gradients import patching, registry, whole_step
from memsaving_gradients.errors import ArgumentError, NothingSavedWarning
from memsaving_gradients.microbatches.applying import Application, check_no_other_updates, noted
from memsaving_gradients.microbatches.loop import Traced, added_up
from memsaving_gradients.microbatches.losses import loss_with
from memsaving_gradients.microbatches.normalization import POLICIES, normalizing
from memsaving_gradients.microbatches.reducing import ways_of
from memsaving_gradients.microbatches.splitting import Batch, batch_of, stretches
from memsaving_gradients.options import Options

__all__ = ["Cut", "in_pieces"]


@dataclass(frozen=True)
class Cut:
    """How batches are cut, as for `microbatch`; checked when it is made."""

    size: int
    reduce: Any = "mean"
    whole: Sequence[str] = ()
    batch_norm: str | None = None

    def __post_init__(self) -> None:
        size = self.size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ArgumentError("size", size, "give a number of examples from 1 on")
        object.__setattr__(self, "size", int(size))
        if self.batch_norm not in POLICIES:
            raise ArgumentError(
                "batch_norm", self.batch_norm, f"give one of {', '.join(map(repr, POLICIES))}"
            )
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
        The variables that it may be differentiated with respect to.
    outputs
        All that the trace gives: results, then gradients.
    """

    results: Any = None
    applied: list[Application] = field(default_factory=list)
    is_loss: bool = False
    read: list[tf.Variable] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def in_pieces(
    function: Callable[..., Any], cut: Cut, options: Options | None = None
) -> Callable[..., Any]:
    """``function`` in microbatches, whose gradients save memory as ``options`` say, or else a patch in force."""

    @functools.wraps(function)
    def in_microbatches(*args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return compiled(*args, **kwargs)
        return _built(function, cut, options, args, kwargs)

    result = _tf.left_by_autograph(in_microbatches)
    compiled = tf.function(result)
    return result


@_tf.left_by_autograph
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
            f"microbatch: a batch of {rows} is smaller than size={cut.size}, and is not cut; give a size that is a part of the batch",
            NothingSavedWarning,
        )
    parts = _differentiable(batch.parts)
    pieces = stretches(batch, cut.size, static=_tf_autodiff.compiled_by_xla())
    count = sum((one.count for one in pieces), tf.constant(0))
    found, traced = _Found(), []
    for stretch in pieces:
        static = stretch.rows if isinstance(stretch.rows, int) else None
        found, one = _trace(function, cut, options, batch, static, count, parts)
        traced.append(one)
    with _tf.unrecorded():
        flat = added_up(batch, pieces, traced)
    results = len(tf.nest.flatten(found.results))
    grads = flat[results:]
    if dense := [grad for grad in grads if isinstance(grad, tf.Tensor)]:
        whole_step.note_added_up(dense)
    if found.is_loss:
        sources = [*found.read, *(batch.parts[k] for k in parts)]
        loss = loss_with(flat[0], grads, sources)
        registry.differentiated(loss)
        return loss
    for application in found.applied:
        application.apply(grads[: len(application.grads)])
        del grads[: len(application.grads)]
    return tf.nest.pack_sequence_as(found.results, flat[:results])


def _traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function behind a ``tf.function``: what was traced before would not hand its updates over."""
    return getattr(function, "python_function", function)


def _differentiable(parts: Sequence[tf.Tensor]) -> list[int]:
    """Which rows a gradient may be asked for: those that a tape watches; where there is no tape, all."""
    real = [k for k, part in enumerate(parts) if part.dtype.is_floating or part.dtype.is_complex]
    return [k for k in real if not _tf.tape_is_recording() or _tf.is_watched(parts[k])]


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
    converted = _tf.as_autograph_would(_traceable(function))

    def one(count: tf.Tensor, *given: tf.Tensor) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        args, kwargs = batch.with_parts(given)
        with ExitStack() as stack:
            stack.enter_context(normalizing(cut.batch_norm, count, cut.size))
            stack.enter_context(_saving(cut.size, options))
            with noted() as found.applied:
                found.results = converted(*args, **kwargs)
            flat = [_as_tensor(value) for value in tf.nest.flatten(found.results)]
            grads = [grad for application in found.applied for grad in application.grads]
            found.is_loss = not found.applied and _is_loss(found.results)
            if found.is_loss:
                found.read = [v for v in _tf_autodiff.weights_in(graph) if v.dtype.is_floating]
                # Tapes around the loop have nothing to see here.
                with _tf.unrecorded():
                    grads = tf.gradients(flat[0], [*found.read, *(given[k] for k in parts)])
        found.outputs = [*flat, *grads]
        return found.outputs

    specs = [tf.TensorSpec([], tf.int32), *batch.specs(rows)]
    with whole_step.consumed_at_once():
        concrete = tf.function(one, autograph=False).get_concrete_function(*specs)
    if len(found.applied) > 1:
        raise ArgumentError(
            "function",
            function,
            f"hands gradients to optimizers {len(found.applied)} times, of which later ones would not see what earlier ones did; make "
            "several functions of it, each in microbatches",
        )
    check_no_other_updates(concrete.graph)
    ways = ways_of(cut.reduce, found.results)
    way = "sum" if cut.reduce == "sum" else "mean"
    ways += [way] * (len(found.outputs) - len(ways))
    if found.is_loss and found.outputs[1:]:
        ways[len(ways) - len(parts) :] = ["concat" if way == "sum" else "weighted"] * len(parts)
    return found, Traced(lambda *given: concrete(count, *given), found.outputs, ways)


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
