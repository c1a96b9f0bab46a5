"""Abilities of the processor that runs the tests."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest


def _has_bfloat16_products() -> bool:
    """Return whether oneDNN multiplies matrices of bfloat16 on this CPU; TensorFlow has no public
    function for this."""
    flags = Path("/proc/cpuinfo")
    return not flags.exists() or platform.machine() != "x86_64" or "avx512f" in flags.read_text()


#: Measurements in bfloat16 need oneDNN's kernels. Eigen's kernels round sums of products in another
#: way, and take scratch space.
needs_bfloat16 = pytest.mark.skipif(
    not _has_bfloat16_products(), reason="oneDNN has no kernels for bfloat16 without AVX512"
)
