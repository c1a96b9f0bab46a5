"""Recomputing gradients in all graphs that a test traces, and the callback in each ``fit``.

Eager gradients stay unchanged, as with the callback: `memsaving_gradients.patching.scoped` ignores
them, where `memsaving_gradients.patched` would raise an error. A refused budget is no failure: the
gradients get the least budget that the error names. In networks of a few bytes, plain training may
take the fewest chunks of the allocator; then the gradients get a plan without a budget. Loops are
replayed however few steps they have.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from memsaving_gradients import patching
from memsaving_gradients.engine import differentiate, graph_state, step_budget
from memsaving_gradients.engine.call import Call
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import BudgetError
from memsaving_gradients.transforms.loops import selection
from tests.foreign.tally import Tally

__all__ = ["everywhere"]


@contextmanager
def everywhere(options: Mapping[str, Any] | None) -> Iterator[Tally]:
    """Use ``options`` for all gradients that are traced inside, and count these; ``None``:
    TensorFlow's own gradients."""
    tally = Tally()
    with ExitStack() as stack:
        if options is not None:
            stack.enter_context(graph_state.watching(tally.watch))
            stack.enter_context(patching.scoped(Options.of(options), eager_is_error=False))
            stack.enter_context(_within_the_least_budget(tally))
            # The loops of tests have few steps, and nothing to save.
            short = mock.patch.multiple(selection, LEAST_SAVED=-1e9)
            stack.enter_context(short)
        if (trainer := _trainer()) is not None:
            fit = _fitting(trainer.fit, options, tally)
            stack.enter_context(mock.patch.object(trainer, "fit", fit))
        yield tally


@contextmanager
def _within_the_least_budget(tally: Tally) -> Iterator[None]:
    """Give calls whose budget is refused the least budget, or a plan without a budget.

    A tape can be asked only once, and was asked before. So its ops are planned again.
    """
    at_once, with_step = differentiate.rewire_now, step_budget._plan_on

    def saved(call: Call) -> list[Any]:
        return _tried(lambda change: at_once(change(call)), call.options, tally)

    def planned(graph: tf.Graph, calls: Sequence[Any], *others: Any) -> None:
        def plan(change: Callable[[Call], Call]) -> None:
            changed = [replace(left, call=change(left.call)) for left in calls]
            with_step(graph, changed, *others)

        _tried(plan, calls[0].call.options, tally)

    with (
        mock.patch.object(differentiate, "rewire_now", saved),
        mock.patch.object(step_budget, "_plan_on", planned),
    ):
        yield


def _tried(plan: Callable[[Callable[[Call], Call]], Any], options: Options, tally: Tally) -> Any:
    tally.asked += 1
    try:
        return plan(lambda call: call)
    except BudgetError as error:
        tally.infeasible += 1
        least = error.fraction
    if least < 1:
        # The search may not find it again within its time.
        with suppress(BudgetError):
            return plan(lambda call: replace(call, options=replace(options, budget=least)))
    # The plan of the least bytes, even if plain training takes fewer chunks.
    unlimited = replace(options, budget=None)
    return plan(lambda call: replace(call, options=unlimited, mode="memory", kept=[]))


def _trainer() -> Any:
    """Return the class that defines the ``fit`` of Keras models; ``None`` without Keras, or on
    another backend."""
    if "keras" not in sys.modules:
        return None
    import keras

    with_fit = (base for base in keras.Model.__mro__ if "fit" in vars(base))
    return next((one for one in with_fit if ".backend.tensorflow." in one.__module__), None)


def _fitting(
    fit: Callable[..., Any], options: Mapping[str, Any] | None, tally: Tally
) -> Callable[..., Any]:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fitting(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(model, *args, **kwargs)
        if options is not None and _is_traced(model):
            ours = _with_ours(given.arguments.get("callbacks"), options)
            given.arguments["callbacks"] = ours
        history = fit(*given.args, **given.kwargs)
        tally.trained.append([_size(weight) for weight in model.weights])
        return history

    return fitting


def _is_traced(model: Any) -> bool:
    # A model that was not compiled has no such attribute, and an error of its own to raise.
    return not (getattr(model, "run_eagerly", True) or tf.config.functions_run_eagerly())


def _with_ours(callbacks: Any, options: Mapping[str, Any]) -> Any:
    import keras

    from memsaving_gradients.keras import MemorySavingGradients

    if isinstance(callbacks, keras.callbacks.CallbackList):
        # The list belongs to the test. The step is traced with the options nevertheless.
        return callbacks
    listed = [one for one in keras.tree.flatten(callbacks) if one is not None]
    if any(isinstance(one, MemorySavingGradients) for one in listed):
        return callbacks
    return [*listed, MemorySavingGradients(**options)]


def _size(weight: Any) -> float:
    """Return the mean of the absolute values of a weight; 0 if it is not of floating type, such as
    the state of random generators."""
    if "float" not in str(weight.dtype):
        return 0.0
    return float(np.abs(np.asarray(weight).astype(np.float64)).mean())
