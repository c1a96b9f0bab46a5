"""Private calls behind options of TensorFlow for a while: op determinism, and those of grappler
that have no public key.

``tf.config.optimizer`` knows no memory optimizer, and what ``tf.compat.v1.enable_eager_execution``
takes holds for the whole process. To time a function with it beside one without, both in one
process, the options of a call have to change from call to call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.util import _pywrap_determinism

__all__ = ["deterministic", "function_config", "without_memory_optimizer"]


@contextmanager
def function_config(config: tf.compat.v1.ConfigProto) -> Iterator[None]:
    """Functions that this thread calls are optimized by ``config``, merged into what holds
    otherwise.

    Private: `Context.function_call_options` (2.16 to 2.21), which
    ``context.function_executor_type`` sets in the same way. A function is optimized once for each
    of the options that it is called with.
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


def without_memory_optimizer() -> AbstractContextManager[None]:
    """Functions that this thread calls are optimized without grappler's memory optimizer, which
    adds up sums of large graphs in any order."""
    config = tf.compat.v1.ConfigProto()
    off = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    config.graph_options.rewrite_options.memory_optimization = off
    return function_config(config)


@contextmanager
def deterministic() -> Iterator[None]:
    """Op determinism is on and grappler's arithmetic rewriting is off.

    Determinism can be switched on, but not off, by a public call (2.16 to 2.21).
    """
    was_on = bool(_pywrap_determinism.is_enabled())
    options = tf.config.optimizer.get_experimental_options()
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        yield
    finally:
        rewrites = options.get("arithmetic_optimization", True)
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": rewrites})
        if not was_on:
            _pywrap_determinism.enable(False)
