"""Simulated arenas, which differ in how the buffers from before the step were allocated."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_tools.memory.bfc_allocator import peaks_in_turn
from graph_tools.memory.liveness import requested_peak, timeline
from graph_tools.memory.timeline import Timeline
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
    peaks = [peaks_in_turn([step], before=before, steps=4, arenas=k) for k in (1, 2, 3)]
    asked = timeline(*step, 20).max()
    assert asked <= peaks[0].worst <= peaks[1].worst <= peaks[2].worst
    assert all(asked <= found.average for found in peaks)


def test_a_step_meets_the_holes_of_another_order():
    """After a step that allocates the small buffer first, a larger chunk is left for it."""
    size = np.array([3 << 19, 4 << 20])
    one_by_one = np.array([1, 3]), np.array([1, 5]), size
    at_once = np.array([3, 2]), np.array([3, 4]), size
    alone = [peaks_in_turn([order], steps=8).worst for order in (one_by_one, at_once)]
    assert alone == [4 << 20, 11 << 19]
    assert peaks_in_turn([one_by_one, at_once], steps=8).worst == 6 << 20


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), _sizes), min_size=1, max_size=20),
)
def test_equal_steps_need_what_one_of_them_needs(lives):
    """Nothing but the orders that are given brings disorder."""
    born, lasts, size = map(np.array, zip(*lives, strict=True))
    step = born, born + lasts, size
    many = peaks_in_turn([step] * 3, steps=12)
    assert many == peaks_in_turn([step], steps=12)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 9 << 18)),
        min_size=1,
        max_size=20,
    ),
    st.lists(_sizes, max_size=6),
)
def test_bounds_of_peaks_in_chunks(lives, before):
    first, other, lasts, size = map(np.array, zip(*lives, strict=True))
    orders = [(born, born + lasts, size) for born in (first, other)]
    alive = timeline(*orders[0], 20)
    step = Timeline(
        alive,
        requested_peak(*orders[0]),
        orders[0],
        other_orders=(orders[1],),
        persistent=tuple(before),
    )
    least, most = step.least_peak, step.allocated_most
    assert least == min(alive.max(), timeline(*orders[1], 20).max())
    assert least <= step.allocated_least <= most
    assert least <= step.allocated_peak <= most
    assert least <= step.allocated_worst <= most
