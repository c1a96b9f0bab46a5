"""`sparsify`: make a model like another one, with sparse kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from memsaving_gradients._keras import export, layers_of
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.arguments import real, seed_of
from memsaving_gradients.training.sparsity.carrying import carry_over
from memsaving_gradients.training.sparsity.choosing import chosen_layers
from memsaving_gradients.training.sparsity.layers import SPARSE
from memsaving_gradients.training.sparsity.penalties import Penalties
from memsaving_gradients.training.sparsity.store import SparseStore

__all__ = ["SparseModel", "sparse_model_in", "sparsify"]


@keras.saving.register_keras_serializable(package="memsaving_gradients")
class SparseModel(keras.Model):
    """A model that opens the store of its layers' weights while it is called; made by `sparsify`.

    ``keras.models.load_model`` loads it from a ``.keras`` file once ``memsaving_gradients.keras``
    is imported.

    Attributes
    ----------
    inner
        The model with sparse layers. It can be called, and its parts can be used in other models,
        but it cannot be trained.
    store
        The weights of the sparse layers.
    """

    def __init__(self, inner: Any, total: int, policy: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.inner = inner
        found = _sparse_layers(inner)
        self.store = SparseStore([layer._kernel.shape for layer in found], total, dtype=policy)
        for number, layer in enumerate(found):
            layer._kernel.store, layer._kernel.number = self.store, number
        penalties = {
            number: layer.kernel_regularizer
            for number, layer in enumerate(found)
            if layer.kernel_regularizer is not None
        }
        if penalties:
            self.store.values.regularizer = Penalties(self.store, penalties)
        self.built = True

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Call the model inside."""
        if training:
            self._check_frozen()
        with self.store.opened():
            return self.inner(inputs, training=training, mask=mask)

    def compute_output_spec(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return the output spec of the model inside."""
        return self.inner.compute_output_spec(inputs)

    @property
    def output_names(self) -> list[str] | None:
        """Names of the outputs, by which Keras assigns losses and metrics to several outputs."""
        return getattr(self.inner, "output_names", None)

    @property
    def trainable_variables(self) -> list[Any]:
        """Variables that are trained."""
        self._check_frozen()
        found: list[Any] = super().trainable_variables
        return found

    def _check_frozen(self) -> None:
        """Raise an error if a sparse layer is frozen, but the variable with the weights of all
        sparse layers is not."""
        if not (self.trainable and self.store.values.trainable):
            return
        for layer in _sparse_layers(self.inner):
            if not layer.trainable:
                raise ArgumentError(
                    "trainable",
                    False,
                    f"the sparse layer {layer.name!r} is frozen, but its weights are trained with"
                    " those of all sparse layers; freeze the whole sparse model, or this layer"
                    " before sparsify, which then leaves it dense",
                )

    def get_config(self) -> dict[str, Any]:
        """Return the config: the model inside, the number of sparse weights, the dtype policy."""
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

    def save(self, filepath: Any, *args: Any, **options: Any) -> None:
        """Save the model, in any format of Keras but the legacy one."""
        if str(filepath).endswith((".h5", ".hdf5")):
            raise ArgumentError(
                "filepath",
                filepath,
                "the legacy format cannot hold sparse weights; save as .keras",
            )
        super().save(filepath, *args, **options)

    def export(
        self,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: Any = None,
        input_signature: Any = None,
        **options: Any,
    ) -> None:
        """Export the model; without a signature, its inputs are the inputs of the model inside."""
        if input_signature is None:
            of = self.inner
            inputs = of.inputs[0] if isinstance(of, keras.Sequential) else of.input
            input_signature = [keras.tree.map_structure(_any_batch, inputs)]
        export(self, filepath, format, verbose, input_signature, **options)


def sparsify(
    model: Any,
    sparsity: float,
    *,
    layers: Sequence[str] | None = None,
    dense: Sequence[str] = (),
    seed: int = 0,
) -> SparseModel:
    """Return a model of the same architecture with sparse kernels, whose weights are new.

    Parameters
    ----------
    model
        A functional or sequential model that is built.
    sparsity
        The share of weights that each sparse layer lacks at the beginning, from 0 to below 1.
    layers
        Names of the dense and convolutional layers to make sparse. ``None``: all convolutions; in a
        model without convolutions, all dense layers. Layers that are frozen, or inside of other
        layers (not models), stay dense; so do layers of other classes, derived classes included.
    dense
        Names of layers to leave out.
    seed
        The seed of the places; the layers' initializers draw the values. Biases and all other
        layers keep the weights, and all other state, of ``model``.

    Returns
    -------
    SparseModel
        A model to compile and train like any other, with `Reparameterize` as a callback if places
        should move.

    Raises
    ------
    ArgumentError
        If an argument cannot be used, or a layer cannot be sparse; the error names layers that can.
        If the model's class trains or computes in its own way; the error says how to put it around
        a sparse network. When training begins, if a sparse layer was frozen and others were not.

    Notes
    -----
    All sparse kernels are one variable: ``clipnorm`` clips them together, and optimizers that scale
    by norms of variables see one. XLA cannot compile weights that move: Keras trains without XLA,
    and says so if ``jit_compile=True``; in a ``tf.function`` of your own it is an error.

    Examples
    --------
    >>> import keras
    >>> import memsaving_gradients as ms
    >>> model = keras.Sequential([keras.Input([100]), keras.layers.Dense(50)])
    >>> sparse = ms.keras.sparsify(model, 0.9)
    >>> [(weight.name, *weight.shape) for weight in sparse.trainable_weights]
    [('bias', 50), ('values', 500)]
    """
    sparsity = real(
        "sparsity", sparsity, lambda s: 0 <= s < 1, "give a share of weights from 0 to below 1"
    )
    seed = seed_of(seed)
    chosen = {id(layer) for layer in chosen_layers(model, layers, dense)}

    def clone(layer: Any) -> Any:
        kind = SPARSE[type(layer)] if id(layer) in chosen else type(layer)
        return kind.from_config(layer.get_config())

    inner = keras.models.clone_model(model, clone_function=clone, recursive=True)
    _forget_compilation(inner)
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
    carry_over(model, inner)
    return made


def sparse_model_in(model: Any) -> SparseModel:
    """Return the sparse model that ``model`` is or contains; raise if there is none or several."""
    layers = layers_of(model) if isinstance(model, keras.Model) else ()
    found = [layer for layer in layers if isinstance(layer, SparseModel)]
    if len(found) == 1:
        return found[0]
    name = getattr(model, "name", model)
    if not found:
        raise ArgumentError("model", name, "is not sparse; train the model that sparsify returns")
    raise ArgumentError(
        "model", name, f"has {len(found)} sparse models inside; only one is supported"
    )


def _sparse_layers(model: Any) -> list[Any]:
    kinds = tuple(SPARSE.values())
    return [layer for layer in layers_of(model) if isinstance(layer, kinds)]


def _forget_compilation(model: Any) -> None:
    """Undo the compilation that Keras copies with a model, with slots that nothing would use."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model) and layer.compiled:
            layer.compiled, layer.optimizer = False, None


def _any_batch(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, tensor.name)
