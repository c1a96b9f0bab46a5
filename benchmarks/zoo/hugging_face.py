"""TensorFlow models of ``transformers``, from configurations: Keras 2, with their own losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
import transformers

from benchmarks.networks.base import Array, Model
from benchmarks.zoo.sizes import draw_images, draw_tokens

BATCH, LENGTH, WORDS, WIDTH, LAYERS, HEADS, SIDE, CLASSES = 16, 64, 512, 64, 4, 4, 64, 10

#: Parameters of the configurations that use BERT's names.
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "max_position_embeddings": LENGTH + 8,
}

#: The class of the model, the class of its configuration, the parameters, and the kind of batch.
_MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "gpt2": (
        "TFGPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": LENGTH,
        },
        "language",
    ),
    "bert": ("TFBertForMaskedLM", "BertConfig", _BERT, "language"),
    "roberta": ("TFRobertaForMaskedLM", "RobertaConfig", _BERT, "language"),
    "electra": (
        "TFElectraForMaskedLM",
        "ElectraConfig",
        {**_BERT, "embedding_size": WIDTH},
        "language",
    ),
    "albert": ("TFAlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 32}, "language"),
    "distilbert": (
        "TFDistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": WORDS,
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": 4 * WIDTH,
            "max_position_embeddings": LENGTH,
        },
        "language",
    ),
    "t5": (
        "TFT5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": WIDTH,
            "d_kv": WIDTH // HEADS,
            "d_ff": 4 * WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        "language",
    ),
    "opt": (
        "TFOPTForCausalLM",
        "OPTConfig",
        {**_BERT, "word_embed_proj_dim": WIDTH, "ffn_dim": 4 * WIDTH},
        "language",
    ),
    "vit": (
        "TFViTForImageClassification",
        "ViTConfig",
        {**_BERT, "image_size": SIDE, "patch_size": 8, "num_labels": CLASSES},
        "images",
    ),
}


def names() -> list[str]:
    """Return the names of all models of this module."""
    return list(_MODELS)


def build(name: str) -> Model:
    """Make a model by name, with the loss that it computes itself."""
    tf_keras.utils.set_random_seed(0)
    kind, config, parameters, takes = _MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**parameters))
    inputs, batch = _BATCHES[takes]()
    model({key: tf.constant(value) for key, value in zip(inputs, batch, strict=True)})

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        output = model(dict(zip(inputs, tensors, strict=True)), training=True)
        return tf.reduce_mean(output.loss)

    return Model(name, loss, tuple(model.trainable_variables), batch, model)


def _language() -> tuple[tuple[str, ...], tuple[Array, ...]]:
    ids = draw_tokens((BATCH, LENGTH), WORDS)
    return ("input_ids", "attention_mask", "labels"), (
        ids,
        np.ones_like(ids),
        draw_tokens((BATCH, LENGTH), WORDS, seed=1),
    )


def _images() -> tuple[tuple[str, ...], tuple[Array, ...]]:
    labels = np.random.default_rng(1).integers(0, CLASSES, BATCH).astype(np.int32)
    return ("pixel_values", "labels"), (draw_images((BATCH, 3, SIDE, SIDE)), labels)


_BATCHES: dict[str, Callable[[], tuple[tuple[str, ...], tuple[Array, ...]]]] = {
    "language": _language,
    "images": _images,
}
