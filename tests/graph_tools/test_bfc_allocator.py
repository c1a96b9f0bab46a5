"""Arenas in which a step is simulated, which differ in how what is there before came there."""

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
    peaks = [irregular_peaks([step], before=before, steps=4, arenas=k) for k in (1, 2, 3, 4)]
    asked = timeline(*step, 20).max()
    worst = [asked, *(found.worst for found in peaks)]
    assert worst == sorted(worst)
    assert all(asked <= found.average for found in peaks)


def test_variables_made_while_a_model_first_ran_lie_between_results():
    """Holes between them are of the sizes of results, none of which the others fit into."""
    step = np.array([0, 2]), np.array([2, 3]), np.array([8 << 20, 4 << 20])
    before = [1 << 19, 1 << 20]
    three, four = (irregular_peaks([step], before=before, steps=4, arenas=k) for k in (3, 4))
    assert three.worst == 12 << 20
    assert four.worst == 15 << 20
    assert four.average == three.average
