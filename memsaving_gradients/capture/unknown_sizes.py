"""Errors that refuse budgets in bytes where bytes are guesses.

Sizes are *fixed + per example × batch*. Without a batch size, or with a second unknown dimension or
an unknown rank, they are guesses. So are the lists of loops whose number of steps is unknown. For
modes, guesses are good enough, because they only steer choices; a promise in bytes needs known
sizes. Only forward tensors are checked: a gradient is as large as its tensor, and users cannot give
it a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from graph_tools.ops import op_types
from graph_tools.ops.sizes import Bytes, is_guess, tensor_bytes
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.schedules.simulate import TIE

__all__ = ["unknown_bytes", "unknown_lists", "unknown_steps"]


def unknown_bytes(
    step: CapturedStep, plain_peak: int, batch_size: int | None, argument: str = "budget"
) -> ArgumentError | None:
    """Return the error for a budget in bytes, if the bytes of a tensor that matters are unknown.

    Parameters
    ----------
    step
        The captured training step.
    plain_peak
        Simulated transient peak of plain training, bytes.
    batch_size
        The batch size that the user gave, if any.
    argument
        The argument by which the budget was given.

    Returns
    -------
        An error that names the tensor, and the way out; ``None``: all bytes are known.
    """
    source, size = step.source, step.graph.size
    matters = (size >= TIE * plain_peak) & (source.bytes_per_example > 0)
    forward = source.producer < step.graph.first_backward
    unknown = np.flatnonzero(matters & forward).tolist()
    guessed = _guessed(step) if unknown else set()
    for value in unknown:
        if value in guessed:
            tensor = _first(step, is_guess, source.tensor(value))
            return ArgumentError(
                argument,
                tensor.name,
                f"the bytes of this tensor, of shape {tensor.shape}, are not known, and a budget in"
                " bytes needs them; give its shape (input_signature, tf.ensure_shape; batch_size="
                " replaces one unknown dimension only), or give the budget as a fraction of plain"
                " training's bytes, such as budget=0.5",
            )
    if unknown and batch_size is None:
        tensor = _first(step, _lacks_batch, source.tensor(unknown[0]))
        return ArgumentError(
            "batch_size",
            batch_size,
            f"a budget in bytes needs the batch size, and tensor {tensor.name!r} has shape"
            f" {tensor.shape}; give batch_size=, the number of examples of a step, here (a callback"
            " does not see the batch size of fit: MemorySavingGradients(..., batch_size=64)), or"
            " give the budget as a fraction of plain training's bytes, such as budget=0.5",
        )
    return None


def unknown_lists(
    guessed: Mapping[tf.Operation, Bytes], plain_peak: int, batch: int
) -> ArgumentError | None:
    """Return the error for a budget in bytes, if bytes that matter depend on an unknown number of
    steps.

    Parameters
    ----------
    guessed
        The loops, and the bytes of their lists (`graph_tools.ops.variant_bytes.guessed_loops`).
    plain_peak
        Simulated transient peak of plain training, bytes.
    batch
        The batch size to plan for.

    Returns
    -------
        An error that names the loop with most bytes, and the way out; ``None``: no loop matters.
    """
    held = {op: size.at(batch) for op, size in guessed.items()}
    if held and max(held.values()) >= TIE * plain_peak:
        return unknown_steps(max(held, key=held.__getitem__).name)
    return None


def unknown_steps(loop: str) -> ArgumentError:
    """Return the error for a budget in bytes that depends on the steps of the loop of this name."""
    return ArgumentError(
        "loop_steps",
        None,
        f"a budget in bytes needs the number of steps, and the loop {loop!r} does not show it"
        " before it runs; give loop_steps=, the most steps that such loops take, or give the loop a"
        " maximum_iterations=, or give the budget as a fraction of plain training's bytes, such as"
        " budget=0.5",
    )


def _guessed(step: CapturedStep) -> set[int]:
    """Return the forward values whose bytes are a guess, and were not derived from the values that
    they are computed from."""
    source, size = step.source, step.graph.size.tolist()
    storage = source.storage.tolist()
    found: set[int] = set()
    for position, op in enumerate(source.ops[: step.graph.first_backward]):
        read = [storage[v] for v in source.inputs[position]]
        largest = max(read, key=lambda root: size[root], default=None)
        for tensor in op.outputs:
            value = source.value(tensor)
            if storage[value] != value or not is_guess(tensor):
                continue
            by_inputs = op.type in op_types.SIZED_BY_INPUTS and largest is not None
            if not (by_inputs and size[largest]) or largest in found:
                found.add(value)
    return found


def _lacks_batch(tensor: tf.Tensor) -> bool:
    return tensor_bytes(tensor).per_example > 0


def _first(
    step: CapturedStep, wanted: Callable[[tf.Tensor], bool], otherwise: tf.Tensor
) -> tf.Tensor:
    """Return the origin of an unknown size: the first ``wanted`` forward tensor, fed ones
    included."""
    for op in step.source.ops[: step.graph.first_backward]:
        for tensor in op.outputs:
            counted = tensor.dtype.base_dtype not in (tf.resource, tf.variant, tf.string)
            if counted and wanted(tensor):
                return tensor
    return otherwise
