"""The private call behind running functions with options for grappler that have no public key.

``tf.config.optimizer`` knows no memory optimizer, and what ``tf.compat.v1.enable_eager_execution`` takes holds for the whole process. To time a
function with it beside one without, both in one process, the options of a call have to change from call to call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["function_config"]


@contextmanager
def function_config(config: tf.compat.v1.ConfigProto) -> Iterator[None]:
    """Functions that this thread calls are optimized by ``config``, merged into what holds otherwise.

    Private: `Context.function_call_options` (2.16 to 2.21), which ``context.function_executor_type`` sets in the same way. A function is optimized
    once for each of the options that it is called with.
    """
    active = context.context()
    old = active.function_call_options
    merged = tf.compat.v1.ConfigProto.FromString(old.config_proto_serialized)
    merged.MergeFrom(config)
    options = copy.copy(old)
    options.config_proto_serialized = merged
    active.function_call_options = options
    try:
        yield
    finally:
        active.function_call_options = old
