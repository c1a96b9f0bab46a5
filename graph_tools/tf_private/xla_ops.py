"""Ops that only XLA can run; TensorFlow has no public names for them.

Seen in TensorFlow 2.16 to 2.21.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla import xla_data_pb2

__all__ = ["convolution"]


def convolution(
    images: tf.Tensor,
    filters: tf.Tensor,
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    filter_dilation: Sequence[int],
) -> tf.Tensor:
    """Return XLA's general convolution of images with channels last and filters with outputs last.

    ``dilation``: one more than the number of zeros between elements of the images.
    (``tf.nn.convolution`` has no such zeros; `XlaConvV2`, 2.16 to 2.21.)
    """
    spatial = len(strides)
    numbers = xla_data_pb2.ConvolutionDimensionNumbers(
        input_batch_dimension=0,
        input_spatial_dimensions=range(1, spatial + 1),
        input_feature_dimension=spatial + 1,
        kernel_spatial_dimensions=range(spatial),
        kernel_input_feature_dimension=spatial,
        kernel_output_feature_dimension=spatial + 1,
        output_batch_dimension=0,
        output_spatial_dimensions=range(1, spatial + 1),
        output_feature_dimension=spatial + 1,
    )
    return gen_xla_ops.xla_conv_v2(
        images,
        filters,
        np.asarray(strides, np.int32),
        np.asarray(padding, np.int32),
        np.asarray(dilation, np.int32),
        np.asarray(filter_dilation, np.int32),
        np.int32(1),
        dimension_numbers=numbers.SerializeToString(),
        precision_config="",
        preferred_element_type=images.dtype,
    )
