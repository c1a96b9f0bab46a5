"""The code that a user writes for each way to train in less memory; its lines are counted.

Each variant takes a function that builds the network. It returns the network, and a function of a
batch that returns loss and gradients, which ``tf.function`` traces. Each adds to `plain` only the
code that its way needs, in the form that its documentation recommends, and avoids its traps:

- ``tf.recompute_grad`` takes no keyword arguments in a graph (hence ``functools.partial``) and no
  bool tensors (hence a captured mask). It saves memory only inside of each wrapped call, so a call
  is a block. The last block is not wrapped, since its gradient comes at once.
- ``keras.RematScope`` affects layers that are *created* in it, so it surrounds the building of the
  network. A model is a layer as well; it takes ``training`` and would be refused, so it is created
  again outside. In a graph, a layer that is called with ``training`` is refused, so the argument is
  omitted if no layer depends on it.
- Grappler's memory optimizer has no key in ``tf.config.optimizer``: it needs a ``ConfigProto``.
  TensorFlow 2 takes one only when eager execution is switched on again before anything else. It
  recomputes only for gradients in a scope ``gradients/``, as by ``tf.gradients``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.networks.base import Model

Make = Callable[[], Model]
#: A function of inputs and labels that returns the loss, and the gradient of each variable.
Gradients = Callable[[Any, Any], tuple[Any, list[Any]]]
Variant = Callable[..., tuple[Model, Gradients]]


def loss_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the loss of all networks."""
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def plain(make: Make) -> tuple[Model, Gradients]:
    """Use TensorFlow alone."""
    network = make()

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        loss = loss_of(network.layers(x, training=True), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def ours(make: Make, **settings: Any) -> tuple[Model, Gradients]:
    """Use the gradients of this package, with ``budget`` or ``max_slowdown``."""
    import memsaving_gradients as ms

    network = make()

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        loss = loss_of(network.layers(x, training=True), y)
        return loss, ms.gradients(loss, network.variables, **settings)

    return network, gradients


def recompute_chain(make: Make, ends: str) -> tuple[Model, Gradients]:
    """Wrap ``tf.recompute_grad`` around blocks that end with layers whose names match ``ends``."""
    import functools
    import itertools
    import re

    import keras

    network = make()
    layers = network.layers
    outputs = [layer.output for layer in layers.layers if re.fullmatch(ends, layer.name)]
    pairs = itertools.pairwise([layers.inputs[0], *outputs])
    blocks = [keras.Model(first, last) for first, last in pairs]
    blocks = [tf.recompute_grad(functools.partial(block, training=True)) for block in blocks]
    head = keras.Model(outputs[-1], layers.output)

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        for block in blocks:
            x = block(x)
        loss = loss_of(head(x, training=True), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def recompute_encoder(make: Make, ends: str) -> tuple[Model, Gradients]:
    """Wrap ``tf.recompute_grad`` around layers of the encoder, and capture the bool mask."""
    import functools
    import itertools
    import re

    import keras

    network = make()
    layers = network.layers
    tokens, mask = layers.inputs
    embedded = layers.get_layer("positions").output
    outputs = [layer.output for layer in layers.layers if re.fullmatch(ends, layer.name)]
    embed = keras.Model(tokens, embedded)
    pairs = itertools.pairwise([embedded, *outputs])
    blocks = [keras.Model((first, mask), last) for first, last in pairs]
    head = keras.Model((outputs[-1], mask), layers.output)

    def run(block: Any, allowed: Any, h: Any) -> Any:
        return block((h, allowed), training=True)

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        ids, allowed = x
        h = embed(ids, training=True)
        for block in blocks:
            h = tf.recompute_grad(functools.partial(run, block, allowed))(h)
        loss = loss_of(run(head, allowed, h), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def recompute_unet(make: Make) -> tuple[Model, Gradients]:
    """Wrap ``tf.recompute_grad`` around both convolutions of each level; skips are arguments."""
    import functools

    import keras

    network = make()
    layers = network.layers
    names = [layer.name for layer in layers.layers]
    levels = sum(name.endswith("_pool") for name in names)

    def block(inputs: list[str], output: str) -> Any:
        tensors = [layers.get_layer(name).output for name in inputs]
        return keras.Model(tensors, layers.get_layer(output).output)

    def recomputed(block: Any) -> Any:
        call = functools.partial(block, training=True)
        return tf.recompute_grad(lambda *inputs: call(list(inputs)))

    down = [
        recomputed(block([f"down{i - 1}_pool" if i else names[0]], f"down{i}_relu2"))
        for i in range(levels)
    ]
    pools = [layers.get_layer(f"down{i}_pool") for i in range(levels)]
    bottom = recomputed(block([f"down{levels - 1}_pool"], "bottom_relu2"))
    below = [*(f"up{i}_relu2" for i in range(1, levels)), "bottom_relu2"]
    up = [block([below[i], f"down{i}_relu2"], f"up{i}_relu2") for i in range(levels)]
    up = [up[0], *map(recomputed, up[1:])]
    head = layers.get_layer("logits")

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        skips = []
        for level in range(levels):
            skips.append(down[level](x))
            x = pools[level](skips[level])
        x = bottom(x)
        for level in reversed(range(1, levels)):
            x = up[level](x, skips[level])
        loss = loss_of(head(up[0]([x, skips[0]], training=True)), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def recompute_lstm(make: Make, steps: int) -> tuple[Model, Gradients]:
    """Wrap ``tf.recompute_grad`` around ``steps`` steps of the recurrence, which is written out."""
    network = make()
    cell = network.layers.get_layer("lstm").cell
    head = network.layers.get_layer("logits")

    @tf.recompute_grad
    def several(x: Any, h: Any, c: Any) -> Any:
        for step in range(x.shape[1]):
            _, (h, c) = cell(x[:, step], [h, c])
        return h, c

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        h = c = tf.zeros([x.shape[0], cell.units])
        for first in range(0, x.shape[1], steps):
            h, c = several(x[:, first : first + steps], h, c)
        loss = loss_of(head(h), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def remat(make: Make, mode: str, training: bool | None = True) -> tuple[Model, Gradients]:
    """Build layers in a ``keras.RematScope``, and the model outside of it."""
    import keras

    with keras.RematScope(mode=mode):
        network = make()
    model = keras.Model(network.layers.input, network.layers.output)

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        loss = loss_of(model(x, training=training), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def remat_list(make: Make, training: bool | None = True) -> tuple[Model, Gradients]:
    """Use ``keras.RematScope`` for layers that work in a graph: layers without ``training``."""
    import inspect

    import keras

    names = [
        layer.name
        for layer in make().layers.layers
        if training is None or "training" not in inspect.signature(layer.call).parameters
    ]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        network = make()
    model = keras.Model(network.layers.input, network.layers.output)

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        loss = loss_of(model(x, training=training), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def grappler(make: Make, mode: str) -> tuple[Model, Gradients]:
    """Use grappler's memory optimizer, for all functions of the process."""
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.enable_eager_execution(config=grappler_config(mode))
    network = make()

    def gradients(x: Any, y: Any) -> tuple[Any, list[Any]]:
        loss = loss_of(network.layers(x, training=True), y)
        return loss, tf.gradients(loss, network.variables)

    return network, gradients


def grappler_config(mode: str) -> Any:
    """Return grappler's configuration with a mode of its memory optimizer, or ``"NO_MEM_OPT"``."""
    from tensorflow.core.protobuf import rewriter_config_pb2

    config = tf.compat.v1.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.memory_optimization = getattr(rewriter_config_pb2.RewriterConfig, mode)
    return config
