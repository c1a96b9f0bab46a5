"""Preparation of a Keras model for ``explain``: inputs and labels of the right shapes, and an
optimizer and a loss where it has none.

The formula of a loss matters little to the memory of a step, but the shape of its labels must be
right. So the activation of the last layer decides the loss. Labels are integers for losses that are
called sparse, and like the outputs for all others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from memsaving_gradients.cli.target import Target, cause
from memsaving_gradients.engine.options import USUAL_BATCH
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.keras_models import holds_gradients, unbuilt_layers

__all__ = ["ready"]

#: The optimizer for a model that is not compiled.
OPTIMIZER = "adam"
_WAY_OUT = "or name a function that returns (train_step, args)"


def ready(model: Any, options: argparse.Namespace) -> Target:
    """Return the model, compiled, with the specs of a batch.

    Raises
    ------
    ArgumentError
        If the inputs of the model are not known, or an option does not suit it.
    """
    assumed: list[str] = []
    x = _inputs(model, options, assumed)
    y_pred = _outputs(model, x, options.target)
    if not model.compiled or options.optimizer or options.loss:
        _compile(model, y_pred, options, assumed)
    elif options.xla:
        model.jit_compile = True
    if model.optimizer is None:
        raise ArgumentError(
            "TARGET", options.target, "is compiled without an optimizer; give --optimizer"
        )
    if not model.trainable_variables and not unbuilt_layers(model):
        raise ArgumentError(
            "TARGET",
            options.target,
            "has no trainable variables; set trainable=True on it, or on its layers",
        )
    y = _labels(model, y_pred)
    held = holds_gradients(model.optimizer)
    looked = {"hold_gradients": held, "loop_steps": options.loop_steps}
    return Target(model, (x, y), looked, tuple(assumed))


def _inputs(model: Any, options: argparse.Namespace, assumed: list[str]) -> Any:
    """Return specs of a batch of inputs."""
    batch = options.batch
    if batch is None:
        batch = USUAL_BATCH

    def spec(tensor: Any) -> tf.TensorSpec:
        shape = list(tensor.shape)
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise ArgumentError(
                "TARGET",
                options.target,
                f"the input {tensor.name!r} is sparse or ragged; {_WAY_OUT[3:]}",
            )
        if shape and shape[0] is None:
            shape[0] = batch
            said.add(f"batches of {batch} (--batch)")
        elif shape and options.batch is not None and shape[0] != options.batch:
            raise ArgumentError(
                "--batch",
                options.batch,
                f"the model was built for batches of {shape[0]}; leave it out",
            )
        if None in shape and options.length is None:
            raise ArgumentError(
                "TARGET",
                options.target,
                f"the input {tensor.name!r} has the shape {tuple(tensor.shape)}; give a number for"
                " None with --length",
            )
        return tf.TensorSpec([options.length if n is None else n for n in shape], tensor.dtype)

    said: set[str] = set()
    specs = keras.tree.map_structure(spec, _structure(model, options.target))
    if options.batch is None:
        assumed += sorted(said)
    return specs


def _structure(model: Any, target: str) -> Any:
    """Return the inputs of a model, as it was built."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        try:
            return model.input
        except AttributeError:
            return inputs[0] if len(inputs) == 1 else inputs
    shape = (model.get_build_config() or {}).get("input_shape") if model.built else None
    if not isinstance(shape, (list, tuple)) or not all(
        n is None or isinstance(n, int) for n in shape
    ):
        raise ArgumentError(
            "TARGET",
            target,
            "is a model whose inputs are not known; begin it with keras.Input, call"
            f" model.build(shape), {_WAY_OUT}",
        )
    # The model was built with a batch of some size, but takes batches of any size.
    return keras.KerasTensor((None, *shape[1:]), model.input_dtype or "float32", name="input")


def _outputs(model: Any, x: Any, target: str) -> Any:
    """Return specs of the model's outputs for a batch."""
    try:
        function = tf.function(lambda x: model(x, training=True)).get_concrete_function(x)
    except Exception as error:
        shapes = ", ".join(str(tuple(spec.shape)) for spec in tf.nest.flatten(x))
        raise ArgumentError(
            "TARGET", target, f"fails for inputs of {shapes}: {cause(error)}; {_WAY_OUT[3:]}"
        ) from error
    return function.structured_outputs


def _compile(model: Any, y_pred: Any, options: argparse.Namespace, assumed: list[str]) -> None:
    optimizer = options.optimizer
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        optimizer = OPTIMIZER
        assumed.append(f"optimizer {OPTIMIZER} (--optimizer)")
    optimizer = _known("--optimizer", keras.optimizers, keras.optimizers.Optimizer, optimizer)
    loss = options.loss
    if loss is not None:
        _known("--loss", keras.losses, keras.losses.Loss, loss)
        loss = _packed(y_pred, [loss] * len(tf.nest.flatten(y_pred)))
    elif model.compiled:
        loss = model.loss
    if loss is None:
        chosen = _losses(model, y_pred, options.target)
        assumed.append(f"loss {', '.join(dict.fromkeys(chosen))} (--loss)")
        loss = _packed(y_pred, chosen)
    xla = options.xla or bool(model.compiled and model.jit_compile)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=xla)


def _known(argument: str, module: Any, kind: type, name: Any) -> Any:
    """Return the Keras object of a name; raise an error that lists all names if none matches."""
    if not isinstance(name, str):
        return name
    try:
        return module.get(name)
    except (TypeError, ValueError) as error:
        names = [
            known
            for known, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, kind) and value is not kind
        ]
        raise ArgumentError(
            argument, name, f"Keras has no such name; give one of {', '.join(sorted(names))}"
        ) from error


def _losses(model: Any, y_pred: Any, target: str) -> list[str]:
    """Return, for each output, a loss that suits it."""
    specs = tf.nest.flatten(y_pred)
    for spec in specs:
        if not spec.dtype.is_floating:
            raise ArgumentError(
                "TARGET",
                target,
                f"has an output of type {spec.dtype.name}, which no loss can train; {_WAY_OUT[3:]}",
            )
    outputs = list(getattr(model, "outputs", None) or [])
    if len(outputs) != len(specs):
        outputs = [None] * len(specs)
    return [
        _loss(_activation(output), spec.shape) for output, spec in zip(outputs, specs, strict=True)
    ]


def _loss(activation: str, shape: tf.TensorShape) -> str:
    """Return the loss for an output.

    Examples
    --------
    >>> _loss("softmax", tf.TensorShape([32, 10])), _loss("sigmoid", tf.TensorShape([32, 1]))
    ('sparse_categorical_crossentropy', 'binary_crossentropy')
    >>> _loss("", tf.TensorShape([32, 10]))
    'mean_squared_error'
    """
    if activation == "softmax" and shape.rank and shape.rank > 1:
        return "sparse_categorical_crossentropy"
    return "binary_crossentropy" if activation == "sigmoid" else "mean_squared_error"


def _activation(output: Any) -> str:
    """Return the name of the activation that an output comes from, or an empty string."""
    history = getattr(output, "_keras_history", None)
    if history is None:
        return ""
    layer = history.operation
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    return str(activation or type(layer).__name__).lower()


def _labels(model: Any, y_pred: Any) -> Any:
    """Return specs of labels for the model's losses."""
    specs = tf.nest.flatten(y_pred)
    sparse = _are_sparse(model.loss, y_pred, len(specs), list(getattr(model, "output_names", ())))
    labels = [
        tf.TensorSpec(spec.shape[:-1], tf.int32) if one else tf.TensorSpec(spec.shape, spec.dtype)
        for spec, one in zip(specs, sparse, strict=True)
    ]
    return _packed(y_pred, labels)


def _are_sparse(loss: Any, y_pred: Any, count: int, names: Sequence[str]) -> list[bool]:
    """Return, for each output, whether its loss takes class numbers as labels."""
    if isinstance(loss, dict):
        keys = sorted(y_pred) if isinstance(y_pred, dict) else names
        if len(keys) == count:
            return [_is_sparse(loss.get(key)) for key in keys]
    each = keras.tree.flatten(loss)
    if len(each) != count:
        each = each[:1] * count if each else [None] * count
    return [_is_sparse(one) for one in each]


def _is_sparse(loss: Any) -> bool:
    names = (loss, getattr(loss, "name", ""), getattr(loss, "__name__", ""), type(loss).__name__)
    return any("sparse" in name.lower() for name in names if isinstance(name, str))


def _packed(structure: Any, flat: list[Any]) -> Any:
    return tf.nest.pack_sequence_as(structure, flat)
