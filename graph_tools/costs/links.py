"""How long it takes to copy a tensor from one device to another.

A tensor goes there and back, one of a byte and a large one: half of the first one's time is the
latency, and what the large one takes beyond that is bandwidth. Measured once for a pair of devices
in a process, with what else goes on there meanwhile.
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

#: Bytes of the large tensor that is sent: bandwidth decides how long that takes. Chosen by
#: judgement.
LARGE = 2**25


@dataclass(frozen=True)
class Link:
    """The way between two devices.

    Attributes
    ----------
    bandwidth
        Bytes in a second, either way.
    latency
        Seconds before a transfer begins.
    """

    bandwidth: float
    latency: float


@functools.cache
def measured_link(here: str, there: str) -> Link:
    """Measure the way between two devices, which takes about a second at PCIe's speed.

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
    # Devices that share their memory hand a tensor over, faster than the clock can tell.
    beyond = max(large - small, time.get_clock_info("perf_counter").resolution)
    # Two digits, so that the same machine plans the same more often than not.
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
