"""Small backbones of KerasHub, by a rule about names of their parameters.

A backbone is included if `SIZES` has all its required parameters, or if `STAGES` describes its
stages (convolutional backbones take lists, whose lengths must agree). Backbones that take other
models as arguments are left out.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from benchmarks.networks.base import Array, Model, tensors
from benchmarks.zoo.sizes import draw_images, draw_tokens, square_error

BATCH, LENGTH, WORDS, WIDTH, SIDE = 16, 64, 512, 64, 64

#: Values of parameters in a small network.
SIZES: dict[str, Any] = {
    "vocabulary_size": WORDS,
    "vocab_size": WORDS,
    "num_layers": 4,
    "num_layers_enc": 2,
    "num_layers_dec": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "head_size": 16,
    "hidden_dim": WIDTH,
    "hidden_size": WIDTH,
    "embedding_dim": WIDTH,
    "intermediate_dim": 4 * WIDTH,
    "mlp_dim": 4 * WIDTH,
    "moe_intermediate_dim": WIDTH,
    "shared_expert_intermediate_dim": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
    "num_experts": 4,
    "top_k": 2,
    "patch_size": 8,
    "image_size": SIDE,
    "image_shape": (SIDE, SIDE, 3),
    "global_attention_layer_indices": [1, 3],
}
#: Optional parameters that are set, too, because they must agree with other sizes.
ALSO = ("image_shape", "top_k")
#: Lists that describe stages.
STAGES: dict[str, dict[str, Any]] = {
    "CSPNetBackbone": {
        "stem_filters": 16,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 2, 2],
        "stackwise_strides": [1, 2, 2],
        "stackwise_num_filters": [32, 64, 128],
        "block_type": "bottleneck_block",
        "stage_type": "csp",
        # Blocks get half of a stage's channels.
        "block_ratio": [0.5],
    },
    "DenseNetBackbone": {"stackwise_num_repeats": [2, 4, 4]},
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64, 128],
        "stackwise_num_blocks": [2, 2, 2],
        "stackwise_num_strides": [1, 2, 2],
        "block_type": "bottleneck_block",
    },
    "SwinTransformerBackbone": {
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "VGGBackbone": {"stackwise_num_repeats": [2, 2, 2], "stackwise_num_filters": [32, 64, 128]},
    "XceptionBackbone": {
        "stackwise_conv_filters": [[16, 32], [64, 64], [64, 64]],
        "stackwise_pooling": [False, True, False],
    },
}


def names() -> list[str]:
    """Return all backbones that the rules can make, one name for each class."""
    base = keras_hub.models.Backbone
    found = {
        value: name
        for name, value in sorted(vars(keras_hub.models).items(), reverse=True)
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    return sorted(name for kind, name in found.items() if _arguments(kind) is not None)


def build(name: str) -> Model:
    """Make a backbone by name; its loss is the mean square of its outputs."""
    keras.utils.set_random_seed(0)
    kind = getattr(keras_hub.models, name)
    arguments = _arguments(kind)
    if arguments is None:
        raise ValueError(
            f"name={name!r}: SIZES and STAGES of benchmarks/zoo/hub.py have no arguments for this"
            " backbone; add them there"
        )
    layers = kind(**arguments)
    specs = layers.input
    names_ = sorted(specs) if isinstance(specs, dict) else None
    flat = [specs[key] for key in names_] if names_ else [specs]
    batch = tuple(_draw(spec, place) for place, spec in enumerate(flat))

    def loss(*inputs: tf.Tensor) -> tf.Tensor:
        fed = dict(zip(names_, inputs, strict=True)) if names_ else inputs[0]
        outputs = layers(fed, training=True)
        return tf.add_n([square_error(outputs), *layers.losses])

    return Model(name, loss, tensors(layers), batch, layers)


def _arguments(kind: type) -> dict[str, Any] | None:
    """Return the arguments of a backbone; ``None`` if no rule has a required parameter."""
    stages = STAGES.get(kind.__name__, {})
    known = {**SIZES, **stages}
    found = {}
    for parameter in list(inspect.signature(kind).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        needed = parameter.default is parameter.empty
        if needed and parameter.name not in known:
            return None
        if needed or parameter.name in ALSO or parameter.name in stages:
            found[parameter.name] = known[parameter.name]
    return found or None


def _draw(spec: Any, seed: int) -> Array:
    """Return an input: images and sounds are normal, masks 1, segments 0, other integers words."""
    shape = (BATCH, *(LENGTH if n is None else n for n in spec.shape[1:]))
    name = spec.name.split("/")[-1]
    if "mask" in name:
        return np.ones(shape, spec.dtype)
    if spec.dtype.startswith("float"):
        return draw_images(shape, seed).astype(spec.dtype)
    if "segment" in name:
        return np.zeros(shape, spec.dtype)
    return draw_tokens(shape, WORDS, seed).astype(spec.dtype)
