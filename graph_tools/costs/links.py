"""The time to copy a tensor from one device to another.

A tensor of one byte and a large tensor are sent there and back. Half of the small one's time is the
latency; the additional time of the large one gives the bandwidth. A process measures each pair of
devices once, under the load that the devices have at that time.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.ops.device_copies import copy_back, copy_out, stays_elsewhere

__all__ = ["Link", "measured_link"]

#: Bytes of the large tensor: so many that bandwidth decides its time. Chosen by judgement.
LARGE = 2**25


@dataclass(frozen=True)
class Link:
    """A connection between two devices.

    Attributes
    ----------
    bandwidth
        Bytes per second, in either direction.
    latency
        Seconds before a transfer begins.
    """

    bandwidth: float
    latency: float


@functools.cache
def measured_link(here: str, there: str) -> Link:
    """Measure the connection between two devices, which takes about a second at PCIe's speed.

    Raises
    ------
    GraphError
        If one of them cannot be reached from this process.

    Examples
    --------
    >>> measured_link("/device:CPU:0", "/device:CPU:0").bandwidth > 1e6
    True
    """
    try:
        with tf.init_scope():
            small, large = (_round_trip(here, there, size) for size in (1, LARGE))
    except tf.errors.OpError as error:
        reason = str(error).splitlines()[0]
        raise GraphError(f"no tensor can be sent to {there}: {reason}") from None
    # Devices that share their memory pass a tensor on, faster than the clock can measure.
    beyond = max(large - small, time.get_clock_info("perf_counter").resolution)
    # Two digits, so that plans on the same machine are usually the same.
    return Link(float(f"{2 * LARGE / beyond:.1e}"), float(f"{small / 2:.1e}"))


def _round_trip(here: str, there: str, size: int) -> float:
    with tf.device(here):
        tensor = tf.zeros([size], tf.uint8)

    @tf.function(autograph=False)
    def trip(x: tf.Tensor) -> tf.Tensor:
        back = copy_back(stays_elsewhere(copy_out(x, there, "out")), here, "back")
        with tf.device(here):
            return back[-1]

    return statistics.median(_seconds(lambda: trip(tensor).numpy()) for _ in range(8))


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
