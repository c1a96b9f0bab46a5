"""Tools for TensorFlow graphs: capture, sizes, separators, liveness, cloning, gating, measuring.

The package knows TensorFlow graphs and networkx and nothing about gradients.
"""

from __future__ import annotations

from graph_tools.errors import GraphError as GraphError
from graph_tools.errors import GraphToolsError as GraphToolsError
from graph_tools.graph.capture import OpGraph as OpGraph
from graph_tools.graph.capture import capture as capture
from graph_tools.graph.separators import articulation_points as articulation_points
from graph_tools.graph.separators import frontier as frontier
from graph_tools.graph.separators import frontier_bytes as frontier_bytes
from graph_tools.memory.liveness import timeline as timeline
from graph_tools.ops.sizes import Bytes as Bytes
from graph_tools.ops.sizes import tensor_bytes as tensor_bytes

__all__ = [
    "Bytes",
    "GraphError",
    "GraphToolsError",
    "OpGraph",
    "articulation_points",
    "capture",
    "frontier",
    "frontier_bytes",
    "tensor_bytes",
    "timeline",
]
