"""Gradients of convolutions in the form that XLA runs fast on a CPU, in branches as well.

XLA's fast kernel for CPUs takes images with channels last, and filters with outputs last. A pass
brings other convolutions into this form, but only in the entry computation of a program. In the
branch of a conditional, the gradients of a convolution run thirty times longer. This module
therefore writes their copies in branches in the fast form, as the pass would write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from graph_tools.tf_private import xla_ops

__all__ = ["fast_copy", "is_slow"]

#: Fact: gradients of convolutions, by the number of spatial dimensions.
_INPUT_GRADIENTS = {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 3}
_FILTER_GRADIENTS = {"Conv2DBackpropFilter": 2, "Conv3DBackpropFilterV2": 3}
_FORWARD = {"Conv2D": 2, "Conv3D": 3}
_DEPTHWISE_FILTER_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"


def is_slow(op: tf.Operation) -> bool:
    """Return whether XLA runs ``op`` slowly in a branch on a CPU, and `fast_copy` cannot help."""
    if op.type == _DEPTHWISE_FILTER_GRADIENT:
        return not _channels_last(op) or _windows(op, 2) is None
    spatial = (_INPUT_GRADIENTS | _FILTER_GRADIENTS | _FORWARD).get(op.type)
    if spatial is None:
        return False
    return not _channels_last(op) or (op.type not in _FORWARD and _windows(op, spatial) is None)


def fast_copy(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Return the output of a fast copy of ``op``, or ``None`` if a plain copy is as good.

    Parameters
    ----------
    op
        Any op; its own inputs give the shapes.
    inputs
        The tensors that the copy reads.
    """
    if op.type in _INPUT_GRADIENTS and not is_slow(op):
        return _input_gradient(op, inputs, _INPUT_GRADIENTS[op.type])
    if op.type in _FILTER_GRADIENTS and not is_slow(op):
        return _filter_gradient(op, inputs, _FILTER_GRADIENTS[op.type])
    if op.type == _DEPTHWISE_FILTER_GRADIENT and not is_slow(op):
        return _depthwise_filter_gradient(op, inputs)
    return None


def _depthwise_filter_gradient(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return one sum for each element of a filter; this takes no longer than XLA's convolution."""
    windows = _windows(op, 2)
    assert windows is not None
    shape = op.outputs[0].shape.as_list()
    sides = [(window.before, max(window.after, 0)) for window in windows]
    # In 16 bits, each product and sum would be rounded, while XLA's convolution rounds once.
    wide = tf.float32 if inputs[0].dtype.size < tf.float32.size else inputs[0].dtype
    images = tf.pad(tf.cast(inputs[0], wide), [(0, 0), *sides, (0, 0)])[..., tf.newaxis]
    grad = tf.cast(inputs[2], wide)
    grad = tf.reshape(grad, [-1, *(window.results for window in windows), *shape[2:]])
    reach = [(window.results - 1) * window.stride + 1 for window in windows]
    sums = []
    for row in range(0, windows[0].extent, windows[0].dilation):
        for column in range(0, windows[1].extent, windows[1].dilation):
            part = images[
                :,
                row : row + reach[0] : windows[0].stride,
                column : column + reach[1] : windows[1].stride,
            ]
            sums.append(tf.reduce_sum(part * grad, [0, 1, 2]))
    return tf.cast(tf.reshape(tf.stack(sums), shape), inputs[0].dtype)


def _input_gradient(op: tf.Operation, inputs: Sequence[tf.Tensor], spatial: int) -> tf.Tensor:
    windows = _windows(op, spatial)
    assert windows is not None
    last = [*range(spatial), spatial + 1, spatial]
    turned = tf.transpose(tf.reverse(inputs[1], list(range(spatial))), last)
    made = xla_ops.convolution(
        inputs[2],
        turned,
        strides=[1] * spatial,
        padding=[
            (
                window.extent - 1 - window.before,
                window.size + window.before - (window.results - 1) * window.stride - 1,
            )
            for window in windows
        ],
        dilation=[window.stride for window in windows],
        filter_dilation=[window.dilation for window in windows],
    )
    made.set_shape(op.outputs[0].shape)
    return made


def _filter_gradient(op: tf.Operation, inputs: Sequence[tf.Tensor], spatial: int) -> tf.Tensor:
    windows = _windows(op, spatial)
    assert windows is not None
    middle = list(range(1, spatial + 1))
    made = xla_ops.convolution(
        tf.transpose(inputs[0], [spatial + 1, *middle, 0]),
        tf.transpose(inputs[2], [*middle, 0, spatial + 1]),
        strides=[window.dilation for window in windows],
        padding=[(window.before, window.after) for window in windows],
        dilation=[1] * spatial,
        filter_dilation=[window.stride for window in windows],
    )
    made = tf.transpose(made, [*middle, 0, spatial + 1])
    made.set_shape(op.outputs[0].shape)
    return made


class _Window:
    """One spatial dimension of a convolution.

    Attributes
    ----------
    size, results
        The lengths of the image, and of the convolution's result.
    extent
        The length of the filter, with its gaps.
    stride, dilation
        As in TensorFlow.
    before, after
        The numbers of zeros around the image; ``after`` is negative if its end is not read.
    """

    def __init__(
        self, size: int, results: int, extent: int, stride: int, dilation: int, before: int
    ) -> None:
        self.size, self.results, self.extent = size, results, extent
        self.stride, self.dilation, self.before = stride, dilation, before
        self.after = (results - 1) * stride + extent - size - before


def _windows(op: tf.Operation, spatial: int) -> list[_Window] | None:
    """Return the spatial dimensions of a gradient; ``None`` if they are unknown, or if channels are
    in groups."""
    filters = op.type in (*_FILTER_GRADIENTS, _DEPTHWISE_FILTER_GRADIENT)
    images = op.inputs[0] if filters else op.outputs[0]
    kernel = op.outputs[0] if filters else op.inputs[1]
    shapes = [t.shape for t in (images, kernel, op.inputs[2])]
    if any(shape.rank != spatial + 2 for shape in shapes):
        return None
    sizes, extents, results = (
        shapes[0].as_list()[1:],
        shapes[1].as_list()[:-1],
        shapes[2].as_list()[1:-1],
    )
    known = [*sizes, *extents, *results]
    if None in known or sizes[-1] != extents[-1]:
        return None
    return list(_each_window(op, sizes[:-1], extents[:-1], results))


def _each_window(
    op: tf.Operation, sizes: Sequence[int], kernel: Sequence[int], results: Sequence[int]
) -> Iterator[_Window]:
    strides, dilations = op.get_attr("strides")[1:-1], op.get_attr("dilations")[1:-1]
    padding = op.get_attr("padding").decode()
    explicit = op.get_attr("explicit_paddings") if padding == "EXPLICIT" else ()
    for k, (size, width, made) in enumerate(zip(sizes, kernel, results, strict=True)):
        extent = (width - 1) * dilations[k] + 1
        before = 0
        if padding == "SAME":
            before = max((made - 1) * strides[k] + extent - size, 0) // 2
        elif padding == "EXPLICIT":
            before = explicit[2 * (k + 1)]
        yield _Window(size, made, extent, strides[k], dilations[k], before)


def _channels_last(op: tf.Operation) -> bool:
    return op.get_attr("data_format").decode().endswith("C")
