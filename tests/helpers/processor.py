"""What the processor that runs the tests can do."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest


def _has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 on this CPU; nothing public in TensorFlow
    tells."""
    flags = Path("/proc/cpuinfo")
    return not flags.exists() or platform.machine() != "x86_64" or "avx512f" in flags.read_text()


#: What is measured in bfloat16 is measured with oneDNN's kernels. Eigen's round sums of products
#: otherwise, and take scratch space.
needs_bfloat16 = pytest.mark.skipif(
    not _has_bfloat16_products(), reason="oneDNN has no kernels for bfloat16 without AVX512"
)
