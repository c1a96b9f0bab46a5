"""Keras' dense and convolutional layers with kernels in a store of sparse weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.store import SparseStore

__all__ = ["SPARSE"]

if TYPE_CHECKING:
    from keras.layers import Layer as _Layer
else:
    # A mixin: the layer's class follows it in the method resolution order.
    _Layer = object


class _Kernel:
    """A placeholder for a kernel's variable: its shape, its store, and its number in the store."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.store: SparseStore | None = None
        self.number = 0


class _Sparse(_Layer):
    """A mixin that gives a class of layers a sparse kernel."""

    _made: tf.Tensor | None = None

    def add_weight(self, *args: Any, name: str | None = None, **options: Any) -> Any:
        """Make a variable, or a placeholder for the kernel."""
        if name != "kernel":
            return super().add_weight(*args, name=name, **options)
        if options.get("constraint") is not None:
            raise ArgumentError(
                "kernel_constraint",
                self.name,
                "kernels with constraints cannot be sparse; name this layer in dense=",
            )
        return _Kernel(tuple(options["shape"]))

    @property
    def kernel(self) -> tf.Tensor:
        """The dense kernel, computed at each access outside of a call."""
        store, number = self._kernel.store, self._kernel.number
        if store is None:
            raise ArgumentError("layer", self.name, "has no weights yet; make it with sparsify")
        return store.kernel(number, self.compute_dtype) if self._made is None else self._made

    def call(self, inputs: Any, training: Any = None, **options: Any) -> Any:
        """Call the layer. Its kernel waits for the inputs: without that edge, it would be computed
        at the beginning of the step."""
        store = self._kernel.store
        if training and store is not None and not store.is_open:
            # Training would leave the kernel out, which is no variable of the layer.
            raise ArgumentError(
                "layer",
                self.name,
                "the weights of this layer belong to a sparse model; train that, not the layer or"
                " the model inside",
            )
        with tf.control_dependencies([inputs]):
            made = self.kernel
        self._made = made
        try:
            return super().call(inputs, **options)
        finally:
            self._made = None

    def save_own_variables(self, store: Any) -> None:
        """Save the variables that are not in the store."""
        keras.layers.Layer.save_own_variables(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables that are not in the store."""
        keras.layers.Layer.load_own_variables(self, store)


def _sparse(kind: type) -> Any:
    name = f"Sparse{kind.__name__}"
    made = type(name, (_Sparse, kind), {"__doc__": f"{kind.__name__} with a sparse kernel."})
    return keras.saving.register_keras_serializable("memsaving_gradients", name)(made)


#: For each class of layers that can be sparse, its sparse class.
SPARSE: dict[type, Any] = {
    kind: _sparse(kind)
    for kind in (keras.layers.Dense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
}
