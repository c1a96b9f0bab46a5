"""Keras' attention layers, computed in blocks: the same constructors, weights, masks and results.

Each layer is a subclass of Keras' own, which it overrides in one place: where Keras computes the
scores of all queries and keys, or the sums behind them. If a call cannot be computed in blocks, the
layer leaves it to Keras and warns once; it says nothing if the user asked for scores or for Keras'
flash attention. Masks that Keras would broadcast to queries × keys (of
queries, of values, the causal one) stay as small as they are.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from graph_tools.warn import warn
from memsaving_gradients import _keras
from memsaving_gradients.errors import NothingSavedWarning
from memsaving_gradients.transforms.attention.additive import additive_scores
from memsaving_gradients.transforms.attention.arguments import block_pair
from memsaving_gradients.transforms.attention.attend import attend
from memsaving_gradients.transforms.attention.dot_product import dot_product
from memsaving_gradients.transforms.attention.grid import Options

__all__ = ["AdditiveAttention", "Attention", "MultiHeadAttention"]

_registered = keras.saving.register_keras_serializable(package="memsaving_gradients")


class _InBlocks:
    """The common part of the layers: the argument ``block``, and a warning if it has no use."""

    def __init__(self, *args: Any, block: Any = None, **kwargs: Any) -> None:
        _keras.check_backend("attention in blocks needs Keras with TensorFlow as its backend")
        super().__init__(*args, **kwargs)
        self.block = block
        self._pair = block_pair(block)
        self._has_warned = False

    def get_config(self) -> dict[str, Any]:
        """Return Keras' configuration, with ``block``."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**config, "block": self.block}

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(self).__name__} {self.name!r}: "  # type: ignore[attr-defined]
                f"{reason}, which is not supported in blocks; "
                "Keras computes all scores at once, and saves no memory",
                NothingSavedWarning,
            )


@dataclass(frozen=True)
class _Masks:
    """The masks of one call, not broadcast: of queries, values, keys, and of their pairs."""

    query: Any = None
    value: Any = None
    key: Any = None
    pairs: Any = None
    causal: bool = False

    def parts(self) -> list[tf.Tensor]:
        """Return each mask with the axes of scores: batch, heads, queries, keys."""
        found = []
        if self.query is not None:
            found.append(tf.cast(self.query, tf.bool)[:, tf.newaxis, :, tf.newaxis])
        for mask in (self.value, self.key):
            if mask is not None:
                found.append(tf.cast(mask, tf.bool)[:, tf.newaxis, tf.newaxis])
        if self.pairs is not None:
            mask = tf.cast(self.pairs, tf.bool)
            while mask.shape.rank < 4:
                mask = tf.expand_dims(mask, -min(mask.shape.rank + 1, 3))
            found.append(mask)
        return found


@_registered
class MultiHeadAttention(_InBlocks, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` that needs memory for queries and keys, not for pairs.

    Weights, masks (also those that layers pass on), ``use_causal_mask``, ``sliding_window``,
    dropout and policies of mixed precision work as in Keras' layer; the two can exchange weights.
    With the same seed, dropout drops as many weights as Keras' layer, but different ones. With
    ``return_attention_scores=True``, or attention over several axes, Keras computes all scores.

    Parameters
    ----------
    *args, **kwargs
        As for Keras' layer.
    block
        The most queries and keys of a block: one number, two, or ``None`` to choose them by bytes.

    Raises
    ------
    ArgumentError
        ``block`` is not positive, or Keras runs on another backend than TensorFlow.

    Examples
    --------
    >>> import keras, numpy as np
    >>> from memsaving_gradients.transforms.attention.layers import MultiHeadAttention
    >>> ours, plain = MultiHeadAttention(4, 16), keras.layers.MultiHeadAttention(4, 16)
    >>> x = np.random.default_rng(0).normal(size=(2, 100, 32)).astype("float32")
    >>> y = plain(x, x, use_causal_mask=True)
    >>> ours.build(x.shape, x.shape)
    >>> ours.set_weights(plain.get_weights())
    >>> bool(np.allclose(ours(x, x, use_causal_mask=True), y, atol=1e-5))
    True
    """

    _wants_scores = False

    if not _keras.ASKS_FOR_SCORES:

        @wraps(keras.layers.MultiHeadAttention.call)
        def call(self, *args: Any, **options: Any) -> Any:
            """Call the layer as Keras does."""
            given = inspect.signature(super().call).bind(*args, **options).arguments
            self._wants_scores = bool(given.get("return_attention_scores"))
            return super().call(*args, **options)

    def _compute_attention_mask(
        self,
        query: Any,
        value: Any,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        return _Masks(query_mask, value_mask, key_mask, attention_mask, bool(use_causal_mask))

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: Any = None,
        return_attention_scores: bool = False,
        **options: Any,
    ) -> Any:
        masks = attention_mask
        if not isinstance(masks, _Masks):
            masks = _Masks(pairs=masks, causal=bool(options.get("use_causal_mask")))
        reason = self._reason(query)
        if reason:
            self._warn_once(reason)
        return_attention_scores = return_attention_scores or self._wants_scores
        if reason or return_attention_scores or getattr(self, "_flash_attention", None):
            mask = super()._compute_attention_mask(
                query, value, masks.query, masks.value, masks.key, masks.pairs, masks.causal
            )
            scores = [return_attention_scores] if _keras.ASKS_FOR_SCORES else []
            return super()._compute_attention(query, key, value, mask, training, *scores)
        rate = self._dropout if training else 0.0
        kind = dot_product(
            Options(
                axis=-3,
                causal=masks.causal,
                window=getattr(self, "_sliding_window", None),  # Not in older versions.
                dropout=rate,
                block=self._pair,
            )
        )
        query = tf.multiply(query, tf.cast(self._inverse_sqrt_key_dim, query.dtype))
        output = attend(
            kind,
            [query, key, value],
            masks=masks.parts(),
            seed=_seed(self._dropout_layer) if rate else None,
            # Keras computes this in two ways, which may differ for a query that sees no key.
            mean=not (self._dropout and _keras.zero_if_all_is_masked()),
        )
        return output, None

    def _reason(self, query: Any) -> str:
        if query.shape.rank != 4 or self._attention_axes != (1,):
            return f"attention_axes={self._attention_axes} of {query.shape.rank - 2} axes"
        return "dropout=1 drops all weights" if self._dropout >= 1 else ""


@_registered
class Attention(_InBlocks, keras.layers.Attention):
    """`keras.layers.Attention` that needs memory for queries and keys, not for their pairs.

    With ``score_mode="dot"`` it never holds all scores; with ``"concat"`` it holds them, but not
    the sums behind them. With ``return_attention_scores=True`` Keras computes all scores. In mode
    ``"dot"``, dropout drops as many weights as Keras' layer with the same seed, but different ones.
    A query whose keys are all masked gets the mean of all values, as in Keras (without dropout). It
    passes no gradient to scores; Keras computes a gradient of rounded scores there.

    Parameters
    ----------
    *args, **kwargs
        As for Keras' layer.
    block
        The most queries and keys of a block: one number, two, or ``None`` to choose them by bytes.

    Raises
    ------
    ArgumentError
        ``block`` is not positive, or Keras runs on another backend than TensorFlow.

    Examples
    --------
    >>> import keras, numpy as np
    >>> from memsaving_gradients.transforms.attention.layers import Attention
    >>> query, value = np.ones([2, 100, 16], "float32"), np.ones([2, 300, 16], "float32")
    >>> Attention(block=64)([query, value]).shape
    TensorShape([2, 100, 16])
    """

    def call(
        self,
        inputs: Any,
        mask: Any = None,
        training: bool = False,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        """Call the layer as Keras does."""
        reason = ""
        if self.score_mode == "dot" and not return_attention_scores:
            self._validate_inputs(inputs=inputs, mask=mask)
            reason = self._reason(*inputs)
            if not reason:
                return self._blockwise(inputs, mask or [None, None], training, use_causal_mask)
            self._warn_once(reason)
        return super().call(
            inputs,
            mask=mask,
            training=training,
            return_attention_scores=return_attention_scores,
            use_causal_mask=use_causal_mask,
        )

    def _reason(self, query: Any, value: Any, key: Any = None) -> str:
        if self.dropout >= 1:
            return "dropout=1 drops all weights"
        return _mismatch(query, value if key is None else key, value)

    def _blockwise(self, inputs: Any, mask: Any, training: bool, causal: bool) -> Any:
        query, value = map(tf.convert_to_tensor, inputs[:2])
        key = tf.convert_to_tensor(inputs[2]) if len(inputs) > 2 else value
        masks = []
        if mask[1] is not None:
            seen = tf.cast(mask[1], tf.bool)
            masks.append(seen[:, tf.newaxis] if seen.shape.rank == 2 else seen)
        if self.scale is not None:
            query = tf.multiply(query, keras.ops.cast(self.scale, query.dtype))
        rate = self.dropout if training else 0.0
        kind = dot_product(Options(causal=bool(causal), dropout=rate, block=self._pair))
        seed = _seed(self) if rate else None
        output = attend(kind, [query, key, value], masks=masks, seed=seed)
        if mask[0] is not None:
            output = tf.where(tf.cast(mask[0], tf.bool)[..., tf.newaxis], output, 0)
        return output

    def _calculate_scores(self, query: Any, key: Any) -> Any:
        if self.score_mode == "dot":
            return super()._calculate_scores(query, key)
        reason = _mismatch(query, key, key)
        if reason:
            self._warn_once(reason)
            return super()._calculate_scores(query, key)
        if self.scale is not None:
            scale = keras.ops.cast(self.scale, query.dtype)
            query, key = scale * query, scale * key
        scores = additive_scores(query, key, block=self._pair)
        return keras.ops.cast(self.concat_score_weight, scores.dtype) * scores


@_registered
class AdditiveAttention(_InBlocks, keras.layers.AdditiveAttention):
    """`keras.layers.AdditiveAttention` that never holds the sums of all queries and keys.

    Only these sums, ``[batch, queries, keys, width]``, are computed in blocks, forward and in the
    gradient. Keras computes everything else, dropout included.

    Parameters
    ----------
    *args, **kwargs
        As for Keras' layer.
    block
        The most queries and keys of a block: one number, two, or ``None`` to choose them by bytes.

    Raises
    ------
    ArgumentError
        ``block`` is not positive, or Keras runs on another backend than TensorFlow.

    Examples
    --------
    >>> import keras, numpy as np
    >>> from memsaving_gradients.transforms.attention.layers import AdditiveAttention
    >>> query, value = np.ones([2, 100, 16], "float32"), np.ones([2, 300, 16], "float32")
    >>> context, weights = AdditiveAttention()([query, value], return_attention_scores=True)
    >>> context.shape, weights.shape
    (TensorShape([2, 100, 16]), TensorShape([2, 100, 300]))
    """

    def _calculate_scores(self, query: Any, key: Any) -> Any:
        reason = _mismatch(query, key, key)
        if reason:
            self._warn_once(reason)
            return super()._calculate_scores(query, key)
        scale = keras.ops.cast(self.scale, query.dtype) if self.use_scale else None
        return additive_scores(query, key, scale, self._pair)


def _mismatch(query: Any, key: Any, value: Any) -> str:
    """Return why blocks cannot be made of queries, keys and values; empty if they can."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != 3 for shape in shapes):
        return f"attention of inputs with {len(shapes[0])} axes"
    batches = {shape[0] for shape in shapes} - {None}
    if len(batches) > 1:
        return f"attention between batches of {sorted(batches)} examples"
    if shapes[0][2] != shapes[1][2]:
        return f"attention between queries of width {shapes[0][2]} and keys of width {shapes[1][2]}"
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (query, key, value)}
    return f"attention of inputs in {' and '.join(sorted(dtypes))}" if len(dtypes) > 1 else ""


def _seed(layer: Any) -> tf.Tensor:
    """Return two integers; the layer draws others for its next call."""
    return tf.cast(layer.seed_generator.next(), tf.int64)
