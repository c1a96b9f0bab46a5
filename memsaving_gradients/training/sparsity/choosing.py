"""Choose the layers of a model that become sparse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from memsaving_gradients._keras import layers_of
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.layers import SPARSE

__all__ = ["chosen_layers", "is_graph_of_layers"]

#: Methods that a model's class may define itself: a copy loses nothing by them.
ITS_OWN = {"build", "from_config", "get_config"}


def chosen_layers(model: Any, layers: Sequence[str] | None, dense: Sequence[str]) -> list[Any]:
    """Return the layers to make sparse, or raise an error that names layers that can be."""
    _check_model(model)
    inside = [layer for layer in layers_of(model) if type(layer) in SPARSE]
    reached = {id(layer) for layer in _reached(model)}
    trained = {id(variable) for variable in model.trainable_variables}
    why_not = {
        id(layer): problem
        for layer in inside
        if (problem := _problem(layer, id(layer) in reached, trained))
    }
    able = [layer for layer in inside if id(layer) not in why_not]
    shown = ", ".join(dict.fromkeys(repr(layer.name) for layer in able)) or "none"
    for argument, names in (("layers", layers), ("dense", dense)):
        for name in _checked_names(argument, names):
            called = [layer for layer in inside if layer.name == name]
            if not called:
                raise ArgumentError(
                    argument,
                    name,
                    f"no layer of that name can be sparse; layers that can be: {shown}",
                )
            for one in called:
                if id(one) in why_not and argument == "layers":
                    raise ArgumentError(
                        argument, name, f"{why_not[id(one)]}; layers that can be sparse: {shown}"
                    )
    if layers is None:
        convolutions = [one for one in able if not isinstance(one, keras.layers.Dense)]
        chosen = convolutions or able
    else:
        chosen = [one for one in able if one.name in set(layers)]
    chosen = [one for one in chosen if one.name not in set(dense or ())]
    if not chosen:
        left = "".join(
            f"; layer {layer.name!r} {why_not[id(layer)]}"
            for layer in inside
            if id(layer) in why_not
        )
        raise ArgumentError(
            "model",
            model.name,
            f"has no layer to make sparse; layers that can be: {shown}{left}",
        )
    return chosen


def is_graph_of_layers(model: Any) -> bool:
    """Return whether a model is functional or sequential."""
    return isinstance(model, keras.Sequential) or (
        isinstance(model, keras.Model) and hasattr(model, "_operations")
    )


def _check_model(model: Any) -> None:
    if not is_graph_of_layers(model):
        raise ArgumentError(
            "model",
            model,
            "is not a functional or sequential Keras model, and only these can be copied with"
            " other layers; build it with keras.Model(inputs, outputs)",
        )
    if not model.built:
        raise ArgumentError("model", model.name, "was not built; call model.build(input_shape)")
    if own := _own_code(type(model)):
        raise ArgumentError(
            "model",
            model.name,
            f"its class {type(model).__name__} has its own {', '.join(own)}, which the copy would"
            " not have; put it around a sparse network: " + _around(model),
        )


def _around(model: Any) -> str:
    kind = type(model).__name__
    single = len(model.inputs) == len(model.outputs) == 1
    given, made = ("inputs[0]", "outputs[0]") if single else ("input", "output")
    network = f"network = sparsify(keras.Model(model.{given}, model.{made}), ...)"
    if isinstance(model, keras.Sequential):
        return f"{network}; model = {kind}([network])"
    return f"{network}; model = {kind}(model.{given}, network(model.{given}))"


def _own_code(kind: type) -> list[str]:
    """Return the public members of Keras' models that a user's class defines itself."""
    users = [
        one
        for one in kind.__mro__
        if one not in keras.Model.__mro__ and one.__module__.partition(".")[0] != "keras"
    ]
    names = {name for one in users for name in vars(one) if not name.startswith("_")}
    return sorted(name for name in names - ITS_OWN if hasattr(keras.Model, name))


def _reached(model: Any) -> Iterator[Any]:
    """Yield layers that models call, at any depth; not layers that other layers call, as these
    cannot be copied with other layers inside."""
    for layer in model.layers:
        if is_graph_of_layers(layer):
            yield from _reached(layer)
        else:
            yield layer


def _problem(layer: Any, reached: bool, trained: set[int]) -> str:
    """Return why a layer stays dense; empty, if it can be sparse."""
    if not reached:
        return "is called by another layer, which cannot be copied with a sparse layer inside"
    if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
        return "is quantized or has LoRA weights, and stays dense"
    if id(layer._kernel) not in trained:
        return "is frozen, and stays dense; set trainable = True to make it sparse"
    return ""


def _checked_names(argument: str, names: Any) -> Iterable[str]:
    if isinstance(names, str):
        raise ArgumentError(argument, names, f"give a list of names: [{names!r}]")
    if names is None:
        return ()
    if not isinstance(names, Sequence | set) or not all(isinstance(one, str) for one in names):
        raise ArgumentError(argument, names, "give a list of names of layers")
    return names
