"""Memory-saving gradients in Keras: a callback for ``fit``, and a layer that marks a tensor.

Keras looks up ``model.train_function`` for every step. The callback makes a training function of
its own, which is traced with TensorFlow patched. It replaces the model's function for the duration
of each step only. However training ends, even by an error in another callback, the model has its
own function again, and nothing else has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras

from graph_tools.warn import warn
from memsaving_gradients import patching
from memsaving_gradients._keras import check_backend
from memsaving_gradients.budget import RESERVE, DeviceMemory
from memsaving_gradients.engine import graph_state
from memsaving_gradients.engine.keras_layers import Checkpoint as Checkpoint
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.replicas import per_replica
from memsaving_gradients.errors import ArgumentError, NothingSavedWarning
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.training.keras_models import (
    bytes_of,
    check_has_graph,
    holds_gradients,
    replaced,
    unbuilt_layers,
)
from memsaving_gradients.training.microbatches.pieces import Cut
from memsaving_gradients.training.microbatches.train_step import train_step_of
from memsaving_gradients.training.precision.optimizer import low_precision as low_precision
from memsaving_gradients.training.precision.overflow import Skipped
from memsaving_gradients.training.sparsity import Reparameterize as Reparameterize
from memsaving_gradients.training.sparsity import SparseModel as SparseModel
from memsaving_gradients.training.sparsity import sparse_bytes as sparse_bytes
from memsaving_gradients.training.sparsity import sparsify as sparsify
from memsaving_gradients.transforms.attention.layers import AdditiveAttention as AdditiveAttention
from memsaving_gradients.transforms.attention.layers import Attention as Attention
from memsaving_gradients.transforms.attention.layers import MultiHeadAttention as MultiHeadAttention

__all__ = [
    "RESERVE",
    "AdditiveAttention",
    "Attention",
    "Checkpoint",
    "MemorySavingGradients",
    "MultiHeadAttention",
    "Reparameterize",
    "SparseModel",
    "low_precision",
    "sparse_bytes",
    "sparsify",
]


class MemorySavingGradients(keras.callbacks.Callback):
    """A callback for ``fit`` that trains with memory-saving gradients.

    Works with compiled models, custom ``train_step``, XLA, mixed precision, ``steps_per_execution``
    and gradient accumulation, also if the model was trained before. Later training without the
    callback is plain again. If the model was made in the scope of a
    ``tf.distribute.MirroredStrategy``, each device saves memory by itself, within its own budget.

    Parameters
    ----------
    checkpoints
        As for `memsaving_gradients.gradients`; a list may name layers.
    hold_gradients
        Whether all gradients are alive together at the end of a step; ``None`` reads it off the
        optimizer (global norm clipping, loss scaling and accumulation hold them).
    xla
        Whether XLA compiles the step; ``None`` reads it off the model.
    batch_size
        The size to assume for an unknown batch dimension when bytes are estimated. ``None``: the
        size that Keras passes to callbacks, if any, else 32 (a budget in bytes needs the size).
        With several replicas, the size for all of them together, as for ``fit``.
    verbose
        1 prints each plan when it is made.
    budget
        As for `memsaving_gradients.gradients`: bytes, a string with a unit, or a fraction of plain
        training's bytes.
    device_memory
        The memory of the device (``"16GiB"``, or bytes). The budget is the rest of it, after the
        model's variables, the optimizer's and a reserve of `RESERVE` (a twentieth: inputs, metrics,
        libraries, holes between chunks). Batches are not known before training, so the reserve
        covers them; `memsaving_gradients.fit_to` gets a batch, and counts it.
    microbatch
        The most examples that go through the network at a time. Each step runs in microbatches, and
        the optimizer gets the mean of their gradients, as with `memsaving_gradients.microbatch`. A
        budget applies to one microbatch; a buffer for gradients adds to it (``device_memory``
        counts it). Metrics and moving averages change with each microbatch.
    batch_norm
        How to treat batch normalization in microbatches, as for `memsaving_gradients.microbatch`.
    buffer
        How to add up 16-bit gradients of microbatches, as for `memsaving_gradients.microbatch`.
    log_dir
        A folder for TensorBoard, which gets each plan when it is made, as text, figure and numbers.
        Needs matplotlib.
    **options
        ``loop_steps``, ``planner``, ``max_slowdown``, ``accumulate``, ``profile``, ``plan``,
        ``progress``, ``planning_seconds``, ``loops``, ``attention``, ``encode``, ``offload``, as
        for `memsaving_gradients.gradients`.

    Raises
    ------
    ArgumentError
        If Keras runs on another backend than TensorFlow, or an option cannot be used.
    MissingExtraError
        If ``log_dir`` is given and matplotlib is not installed.
    EagerExecutionError
        When training begins, if the model was compiled with ``run_eagerly=True``.
    SelectionError
        During the first step, if checkpoints name no tensor that can be one.
    BudgetError
        During the first step, if no plan fits. The error names the least budget that works, or the
        least device memory.

    Examples
    --------
    >>> import keras, numpy as np
    >>> import memsaving_gradients as ms
    >>> layers = [keras.layers.Dense(64, activation="gelu") for _ in range(12)]
    >>> model = keras.Sequential([keras.Input([64]), *layers])
    >>> model.compile("sgd", "mse")
    >>> saving = ms.keras.MemorySavingGradients()
    >>> data = np.zeros([256, 64])
    >>> _ = model.fit(data, data, batch_size=256, verbose=0, callbacks=[saving])
    >>> saving.plans[-1].peak < saving.plans[-1].peak_plain
    True
    """

    def __init__(
        self,
        checkpoints: Any = "auto",
        hold_gradients: bool | None = None,
        xla: bool | None = None,
        batch_size: int | None = None,
        verbose: int = 0,
        *,
        budget: int | float | str | None = None,
        device_memory: int | str | None = None,
        microbatch: int | None = None,
        batch_norm: str | None = None,
        buffer: str = "float32",
        log_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_backend("only the TensorFlow backend has graphs to rewire")
        self._reads_hold = hold_gradients is None
        self._reads_batch = batch_size is None
        device = None if device_memory is None else DeviceMemory(device_memory)
        self._device = device
        if device is not None and budget is not None:
            raise ArgumentError(
                "device_memory",
                device_memory,
                f"cannot be combined with budget={budget!r}, which follows from it; leave one of"
                " them out",
            )
        asked = {
            "checkpoints": checkpoints,
            "hold_gradients": False if hold_gradients is None else hold_gradients,
            "xla": xla,
            "batch_size": batch_size,
            "budget": budget if device is None else device,
            **options,
        }
        self._asked = Options.of(asked)
        self._verbose = verbose
        how: dict[str, Any] = {"batch_norm": batch_norm, "buffer": buffer}
        self._cut = None if microbatch is None else Cut(microbatch, **how)
        for name, value in how.items():
            if microbatch is None and value not in (None, "float32"):
                raise ArgumentError(
                    name, value, "applies to microbatches only; also give microbatch="
                )
        self._events: Any = None
        if log_dir is not None:
            from memsaving_gradients.reports.events import Events

            self._events = Events(log_dir)
        self._watch = graph_state.Watch()
        self._plain: Any = None
        self._saving: Callable[[Any], Any] | None = None
        self._check: Callable[[], None] | None = None
        self._skipped: Skipped | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that training uses, newest last."""
        return tuple(self._watch.plans)

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise if the model runs eagerly, without a graph to rewire."""
        check_has_graph(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the count of steps that the optimizer skips."""
        if self._skipped is not None:
            self._skipped.restart()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """If losses are scaled, add the number of skipped steps and the scale to the logs."""
        if self._skipped is not None and logs is not None:
            logs.update(self._skipped.report())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Replace the model's training function by the memory-saving one, for one call.

        The function is made before the first step: by then all callbacks have begun, and may have
        changed which variables are trained.
        """
        self._check, model = None, self.model
        # Keras makes a new function after each compile. While it is the same, ours need not be
        # traced again either.
        if self._plain is None or self._plain is not model.train_function:
            _build_optimizer(model, slots_are_asked=self._device is not None)
            options, watch = self._options(model), graph_state.Watch()
            with model.distribute_strategy.scope():
                self._skipped = Skipped(model.optimizer)
            self._saving = self._function(model, options, watch)
            self._plain, self._watch = model.train_function, watch
        model.train_function = self._saving

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raise if the step had no use for a checkpoint; warn if it had no gradients to rewire."""
        if self._check is not None:
            self._check()
        if not self._watch.plans and not self._watch.warned:
            self._watch.warned = True
            warn(
                "MemorySavingGradients: the training step asked for no gradients that could be"
                " rewired, so nothing was saved; compute them in train_step with tf.GradientTape or"
                " tf.gradients, not inside of another tf.function that was traced before",
                NothingSavedWarning,
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model its own training function back."""
        self.model.train_function = self._plain

    def _function(
        self, model: Any, options: Options, watch: graph_state.Watch
    ) -> Callable[[Any], Any]:
        plain = model.train_function
        train_step = model.train_step if self._cut is None else train_step_of(model, self._cut)
        if self._skipped is not None:
            train_step = self._skipped.counting(train_step)
        with replaced(model, "train_step", train_step):
            model.make_train_function(force=True)
        function, model.train_function = model.train_function, plain

        def step(iterator: Any) -> Any:
            known = len(watch.plans)
            try:
                with (
                    # Keras looks this method up when it makes a training function or, before 3.7,
                    # when it traces that function.
                    replaced(model, "train_step", train_step),
                    # Gradients that eager code computes meanwhile (in a tf.py_function, or a thread
                    # that feeds data) stay TensorFlow's.
                    patching.scoped(options, eager_is_error=False) as self._check,
                    graph_state.watching(watch),
                ):
                    return function(iterator)
            finally:
                model.train_function = plain
                for plan in watch.plans[known:]:
                    if self._verbose:
                        print(plan)
                    if self._events is not None:
                        self._events.write(plan)

        return step

    def _options(self, model: Any) -> Options:
        options = self._asked
        if self._reads_hold:
            # In a loop over microbatches each gradient is added up at once.
            held = self._cut is None and holds_gradients(model.optimizer)
            options = replace(options, hold_gradients=held)
        if self._reads_batch:
            options = replace(options, batch_size=(self.params or {}).get("batch_size") or None)
        if options.batch_size is not None:
            each = per_replica(options.batch_size, model.distribute_strategy)
            options = replace(options, batch_size=each)
        if self._device is not None:
            options = replace(
                options, budget=_with_model(self._device, model, buffers=self._cut is not None)
            )
        if options.xla is None and model.jit_compile:
            options = replace(options, xla=True)
        return options


def _build_optimizer(model: Any, *, slots_are_asked: bool) -> None:
    """Create the optimizer's variables now. If tracing creates them, the step is traced and planned
    twice.

    Skip this if the step may train other variables: layers may create some when they are called,
    and the user's own ``train_step`` may train any (ignored if the bytes of slots are needed).
    """
    own_step = type(model).train_step is not keras.Model.train_step or "train_step" in vars(model)
    variables = model.trainable_variables
    unsure = not variables or unbuilt_layers(model) or (own_step and not slots_are_asked)
    if not unsure and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(variables)


def _with_model(device: DeviceMemory, model: Any, *, buffers: bool) -> DeviceMemory:
    """Return ``device`` with the bytes of the variables of ``model`` and its optimizer and, with
    ``buffers``, of a buffer for gradients."""
    if unbuilt_layers(model):
        raise ArgumentError(
            "device_memory",
            device.value,
            "the bytes of variables are not known, because the model or a layer in it is not"
            " built; call the model on a batch before fit, or give budget=",
        )
    device = replace(
        device,
        weights=bytes_of(model.variables),
        slots=bytes_of(model.optimizer.variables),
        buffers=bytes_of(model.trainable_variables) if buffers else 0,
    )
    device.check_room(
        "device_memory", "use a larger device, a smaller model or an optimizer with fewer slots"
    )
    return device
