"""Tools for TensorFlow graphs: capture, sizes, separators, bytes over a step, editing, measuring.

The package knows TensorFlow graphs, and nothing of budgets and plans.
"""

from __future__ import annotations

from graph_tools.editing.rewiring import Rewiring as Rewiring
from graph_tools.editing.rewiring import clone as clone
from graph_tools.errors import GraphError as GraphError
from graph_tools.errors import GraphToolsError as GraphToolsError
from graph_tools.graph.capture import OpGraph as OpGraph
from graph_tools.graph.capture import capture as capture
from graph_tools.graph.separators import articulation_points as articulation_points
from graph_tools.graph.separators import frontier as frontier
from graph_tools.graph.separators import frontier_bytes as frontier_bytes
from graph_tools.memory.liveness import timeline as timeline
from graph_tools.memory.measure import EndedBySignalError as EndedBySignalError
from graph_tools.memory.measure import MeasurementError as MeasurementError
from graph_tools.memory.measure import PeakMeasurement as PeakMeasurement
from graph_tools.memory.measure import TimeRatio as TimeRatio
from graph_tools.memory.measure import in_fresh_process as in_fresh_process
from graph_tools.memory.measure import measure_peak as measure_peak
from graph_tools.memory.measure import time_ratio as time_ratio
from graph_tools.ops.sizes import Bytes as Bytes
from graph_tools.ops.sizes import tensor_bytes as tensor_bytes

__all__ = [
    "Bytes",
    "EndedBySignalError",
    "GraphError",
    "GraphToolsError",
    "MeasurementError",
    "OpGraph",
    "PeakMeasurement",
    "Rewiring",
    "TimeRatio",
    "articulation_points",
    "capture",
    "clone",
    "frontier",
    "frontier_bytes",
    "in_fresh_process",
    "measure_peak",
    "tensor_bytes",
    "time_ratio",
    "timeline",
]
