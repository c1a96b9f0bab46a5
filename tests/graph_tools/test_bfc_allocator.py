"""Simulated arenas, which differ in how the buffers from before the step were allocated."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools.memory.bfc_allocator import irregular_peaks
from graph_tools.memory.liveness import timeline
from tests.helpers.sampling import examples

_sizes = st.integers(1, 9 << 18)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), _sizes), min_size=1, max_size=20),
    st.lists(_sizes, max_size=6),
)
def test_more_arenas_find_no_less(lives, before):
    born, lasts, size = map(np.array, zip(*lives, strict=True))
    step = born, born + lasts, size
    peaks = [irregular_peaks([step], before=before, steps=4, arenas=k) for k in (1, 2, 3)]
    asked = timeline(*step, 20).max()
    assert asked <= peaks[0].worst <= peaks[1].worst <= peaks[2].worst
    assert all(asked <= found.average for found in peaks)
