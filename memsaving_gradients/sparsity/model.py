"""`sparsify`: a model like another one, with sparse kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.sparsity.layers import SPARSE
from memsaving_gradients.sparsity.store import SparseStore

__all__ = ["SparseModel", "sparsify"]


@keras.saving.register_keras_serializable(package="memsaving_gradients")
class SparseModel(keras.Model):
    """A model that opens the store of its layers' weights while it is called; made by `sparsify`.

    Attributes
    ----------
    inner
        The model with sparse layers.
    store
        Their weights.
    """

    def __init__(self, inner: Any, total: int, policy: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.inner = inner
        found = _sparse_layers(inner)
        self.store = SparseStore([layer._kernel.shape for layer in found], total, dtype=policy)
        for number, layer in enumerate(found):
            layer._kernel.store, layer._kernel.number = self.store, number
        self.built = True

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Call the model inside."""
        with self.store.opened():
            return self.inner(inputs, training=training, mask=mask)

    def compute_output_spec(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """As the model inside."""
        return self.inner.compute_output_spec(inputs)

    def get_config(self) -> dict[str, Any]:
        """The model inside, and how many weights there are."""
        inner = keras.saving.serialize_keras_object(self.inner)
        policy = keras.saving.serialize_keras_object(self.store.dtype_policy)
        return {"inner": inner, "total": self.store.total, "policy": policy, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SparseModel:
        """Make a model of the same architecture."""
        config = dict(config)
        for name in ("inner", "policy"):
            config[name] = keras.saving.deserialize_keras_object(config[name], custom_objects)
        return cls(**config)


def sparsify(
    model: Any,
    sparsity: float,
    *,
    layers: Sequence[str] | None = None,
    dense: Sequence[str] = (),
    seed: int = 0,
) -> SparseModel:
    """A model of the same architecture, in which kernels are sparse; its weights are new.

    Parameters
    ----------
    model
        Functional or sequential, and built.
    sparsity
        The share of weights that are not there, from 0 to below 1, in each sparse layer to begin with.
    layers
        Names of the layers to make sparse: dense and convolutional ones. ``None``: all convolutions; where there are none, all dense layers.
    dense
        Names of layers to leave out.
    seed
        Of the places; values are drawn by the layers' initializers. Biases and all other layers keep the weights of ``model``.

    Returns
    -------
    SparseModel
        To be compiled and trained like any other, with `Reparameterize` as a callback if places are to move.

    Raises
    ------
    ArgumentError
        If an argument cannot be used, or a layer cannot be sparse; it names those that can.

    Examples
    --------
    >>> import keras
    >>> import memsaving_gradients as ms
    >>> model = keras.Sequential([keras.Input([100]), keras.layers.Dense(50)])
    >>> sparse = ms.keras.sparsify(model, 0.9)
    >>> [(weight.name, *weight.shape) for weight in sparse.trainable_weights]
    [('bias', 50), ('values', 500)]
    """
    number = isinstance(sparsity, float | int) and not isinstance(sparsity, bool)
    if not number or not 0 <= sparsity < 1:
        raise ArgumentError("sparsity", sparsity, "give a share of weights from 0 to below 1")
    chosen = _chosen(model, layers, dense)

    def clone(layer: Any) -> Any:
        kind = SPARSE[type(layer)] if layer.name in chosen else type(layer)
        return kind.from_config(layer.get_config())

    inner = keras.models.clone_model(model, clone_function=clone, recursive=True)
    draw = np.random.default_rng(seed)
    masks, values = [], []
    for layer in _sparse_layers(inner):
        shape = layer._kernel.shape
        places = math.prod(shape)
        count = max(1, round(places * (1 - sparsity)))
        mask = np.zeros(places, bool)
        mask[draw.choice(places, count, replace=False)] = True
        masks.append(mask)
        values.append(np.asarray(layer.kernel_initializer(shape, "float32")).reshape(-1)[mask])
    made = SparseModel(
        inner,
        sum(map(len, values)),
        _sparse_layers(inner)[0].dtype_policy,
        name=f"sparse_{model.name}",
    )
    made.store.set_masks(masks)
    made.store.values.assign(np.concatenate(values))
    _carry_over(model, inner)
    return made


def _sparse_layers(model: Any) -> list[Any]:
    kinds = tuple(SPARSE.values())
    return [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]


def _chosen(model: Any, layers: Sequence[str] | None, dense: Sequence[str]) -> set[str]:
    """Names of the layers to make sparse."""
    if not isinstance(model, keras.Model) or not (
        isinstance(model, keras.Sequential) or hasattr(model, "_operations")
    ):
        raise ArgumentError(
            "model",
            model,
            "is no functional or sequential Keras model, of which a copy with other layers can be made; build it with keras.Model(inputs, "
            "outputs)",
        )
    if not model.built:
        raise ArgumentError("model", model.name, "was not built; call model.build(input_shape)")
    able = {layer.name: layer for layer in model._flatten_layers() if type(layer) in SPARSE}
    shown = ", ".join(map(repr, able)) or "none"
    for argument, names in (("layers", layers), ("dense", dense)):
        if isinstance(names, str):
            raise ArgumentError(argument, names, f"give a list of names: [{names!r}]")
        for name in names or ():
            if name not in able:
                raise ArgumentError(
                    argument,
                    name,
                    f"no layer of that name can be sparse; those that can are {shown}",
                )
    if layers is None:
        convolutions = [n for n, layer in able.items() if not isinstance(layer, keras.layers.Dense)]
        layers = convolutions or [*able]
    chosen = set(layers) - set(dense)
    if not chosen:
        raise ArgumentError(
            "model", model.name, f"has no layer to make sparse; those that can be are {shown}"
        )
    return chosen


def _carry_over(model: Any, inner: Any) -> None:
    """Weights of what is not sparse: biases, normalizations, embeddings."""
    for old, new in zip(model._flatten_layers(), inner._flatten_layers(), strict=True):
        known = {
            variable.name: variable
            for variable in new._trainable_variables + new._non_trainable_variables
        }
        for variable in old._trainable_variables + old._non_trainable_variables:
            if variable.name in known:
                known[variable.name].assign(variable)
