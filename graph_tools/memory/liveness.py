"""Bytes alive over an order of execution.

A buffer lives from the step that makes it to the last step that reads it. TensorFlow's executor
likewise frees a tensor when the last holder of its buffer has finished. The bytes alive at each
step are one running sum over births and deaths. The computation is linear and vectorized.
"""

from __future__ import annotations

import numpy as np

from graph_tools.graph.separators import IntArray

__all__ = ["requested_peak", "timeline"]


def timeline(born: IntArray, dies: IntArray, size: IntArray, steps: int) -> IntArray:
    """Return the bytes alive during each of ``steps`` steps.

    Parameters
    ----------
    born, dies
        For each buffer, its first and its last step, both included.
    size
        For each buffer, its bytes.
    steps
        The number of steps.

    Examples
    --------
    >>> import numpy as np
    >>> timeline(np.array([0, 1, 2]), np.array([1, 2, 2]), np.array([10, 20, 5]), 3)
    array([10, 30, 25])
    """
    delta = np.zeros(steps + 1, np.int64)
    np.add.at(delta, born, size)
    np.add.at(delta, dies + 1, -size)
    return np.cumsum(delta[:steps])


def requested_peak(born: IntArray, dies: IntArray, size: IntArray) -> int:
    """Return the most bytes alive during a step, for buffers as `timeline` takes them.

    Examples
    --------
    >>> import numpy as np
    >>> requested_peak(np.array([0, 1, 2]), np.array([1, 2, 2]), np.array([10, 20, 5]))
    30
    """
    return int(timeline(born, dies, size, int(dies.max(initial=0)) + 1).max(initial=0))
