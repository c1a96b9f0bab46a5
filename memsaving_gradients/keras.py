"""Memory-saving gradients in Keras: a callback for ``fit``, a layer that marks a tensor.

The callback rebuilds the model's training function when training begins, lets it be traced with TensorFlow patched,
and takes it away when training ends or fails; the model itself, its saving and its loading are not touched.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from memsaving_gradients import marks, patching, registry
from memsaving_gradients.errors import ArgumentError, EagerExecutionError, NothingSavedWarning
from memsaving_gradients.options import Options
from memsaving_gradients.plan import Plan

__all__ = ["Checkpoint", "MemorySavingGradients"]


@keras.saving.register_keras_serializable(package="memsaving_gradients")
class Checkpoint(keras.layers.Layer):
    """A layer that marks its input as a tensor to keep, and changes nothing."""

    def call(self, inputs: Any) -> Any:
        """Mark and return ``inputs``."""
        return marks.checkpoint(inputs, name=None)


class MemorySavingGradients(keras.callbacks.Callback):
    """Train with memory-saving gradients: ``model.fit(..., callbacks=[MemorySavingGradients()])``.

    Works with compiled models, custom ``train_step``, XLA, mixed precision, ``steps_per_execution`` and gradient
    accumulation; on models trained before. Training without the callback afterwards is plain again.

    Parameters
    ----------
    checkpoints
        As for `memsaving_gradients.gradients`; names may be those of layers.
    hold_gradients
        Whether all gradients are alive together at the end of a step; ``None`` reads it off the optimizer
        (global norm clipping, loss scaling and accumulation hold them).
    xla
        Whether the step is compiled by XLA; ``None`` finds out.
    batch_size
        Stands in for an unknown batch dimension when bytes are estimated; ``None`` takes that of ``fit`` where Keras
        tells it, else 32.

    Raises
    ------
    ArgumentError
        If Keras runs on another backend than TensorFlow, or an option cannot be used.
    EagerExecutionError
        When training begins, if the model was compiled with ``run_eagerly=True``.
    """

    def __init__(
        self,
        checkpoints: Any = "auto",
        *,
        hold_gradients: bool | None = None,
        xla: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if keras.backend.backend() != "tensorflow":
            raise ArgumentError(
                "keras backend",
                keras.backend.backend(),
                "only the TensorFlow backend has graphs to rewire; set KERAS_BACKEND=tensorflow before importing keras",
            )
        self._asked_hold = hold_gradients
        self._asked_batch = batch_size
        self._options = Options(checkpoints, bool(hold_gradients), xla, batch_size or 32)
        self._watch = registry.Watch()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that training used, newest last."""
        return tuple(self._watch.plans)

    def on_train_begin(self, logs: Any = None) -> None:
        """Give the model a training function that will be traced with memory-saving gradients."""
        model = self.model
        if model.run_eagerly or tf.config.functions_run_eagerly():
            raise EagerExecutionError(
                "run_eagerly=True: there is no graph to rewire in eager execution; compile the model with "
                "run_eagerly=False (and leave tf.config.run_functions_eagerly off), or train without MemorySavingGradients"
            )
        hold = self._asked_hold if self._asked_hold is not None else _holds(model.optimizer)
        batch = self._asked_batch or (self.params or {}).get("batch_size") or 32
        options = Options(self._options.checkpoints, hold, self._options.xla, batch)
        model.make_train_function(force=True)
        function = model.train_function
        watch = self._watch = registry.Watch()

        def step(iterator: Any) -> Any:
            try:
                with patching.scoped(options), registry.watching(watch):
                    return function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise  # the end of the data
            except BaseException:
                model.train_function = None
                raise

        model.train_function = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first step, warn if no gradients were asked for where they could be rewired."""
        if not self._watch.plans and not self._watch.warned:
            self._watch.warned = True
            warnings.warn(
                "MemorySavingGradients: the training step asked for no gradients that could be rewired, so "
                "nothing was saved; compute them in train_step with tf.GradientTape or tf.gradients, not inside "
                "of another tf.function",
                NothingSavedWarning,
                stacklevel=2,
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model back its own training function."""
        self.model.train_function = None


def _holds(optimizer: Any) -> bool:
    """Whether ``optimizer`` reads all gradients before it uses the first."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return bool(
        inner is not None
        or getattr(optimizer, "global_clipnorm", None)
        or getattr(optimizer, "gradient_accumulation_steps", None)
    )
