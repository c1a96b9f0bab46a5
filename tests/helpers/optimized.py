"""What grappler leaves of functions."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

__all__ = ["optimized_nodes"]


def optimized_nodes(run: Callable[[], object]) -> list[tf.compat.v1.NodeDef]:
    """Return the nodes of all functions that ``run`` calls, as grappler leaves them."""
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    try:
        run()
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    return [
        node for graphs in metadata.function_graphs for node in graphs.post_optimization_graph.node
    ]
