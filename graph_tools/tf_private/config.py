"""Private calls that set TensorFlow options temporarily: op determinism, and grappler options
without a public key.

``tf.config.optimizer`` has no key for the memory optimizer, and the config that
``tf.compat.v1.enable_eager_execution`` takes holds for the whole process. To time functions with
and without the memory optimizer in one process, the options must change from call to call.
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
    """Optimize functions that this thread calls by ``config``, merged into the options in force.

    Private: `Context.function_call_options` (2.16 to 2.21), which
    ``context.function_executor_type`` sets in the same way. TensorFlow optimizes a function once
    for each set of options that it is called with.
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
    """Optimize functions that this thread calls without grappler's memory optimizer, which adds the
    addends of sums in large graphs in any order."""
    config = tf.compat.v1.ConfigProto()
    off = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    config.graph_options.rewrite_options.memory_optimization = off
    return function_config(config)


@contextmanager
def deterministic() -> Iterator[None]:
    """Turn op determinism on and grappler's arithmetic rewriting off in a context.

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
