"""The regions in which TensorFlow's allocator takes a device's memory.

On a GPU, it takes nearly all of the memory as one region before the first step. With memory growth
(`tf.config.experimental.set_memory_growth`), and on a CPU, it begins with a small region, and each
further region is twice as large (``bfc_allocator.cc``, ``gpu_bfc_allocator.cc``, TensorFlow 2.16 to
2.21). In one large region, chunks exceed their buffers only where they fill the holes of others:
one plan of MobileNetV2 takes 223 MB there on average, and 259 MB in growing regions (simulated; 234
to 236 MB measured in one region).
"""

from __future__ import annotations

import os

import tensorflow as tf

from graph_tools.memory.bfc_allocator import GROWING, WHOLE

__all__ = ["first_region"]


def first_region() -> int:
    """Return the bytes of the first region of the first visible GPU, or of the CPU without one."""
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return GROWING
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower()
    if forced in ("true", "false"):
        grows = forced == "true"
    else:
        grows = bool(tf.config.experimental.get_memory_growth(gpus[0]))
    return GROWING if grows else WHOLE
