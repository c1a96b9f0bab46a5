"""Where the states of a replayed loop are kept, compared with a scheme written out."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memsaving_gradients.transforms.loops.checkpoint_positions import (
    Division,
    leaf_for,
    states_for,
    steps_for,
)
from tests.helpers.sampling import examples

pytestmark = pytest.mark.sampled

_fast = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def cuts(division, steps, bound):
    """Return the cut of the whole loop, and a function that cuts a segment at a level."""
    outer = division.cut(tf.constant(bound))

    def inner(first, stop, level):
        return division.inner(tf.constant(first), tf.constant(stop), level)

    return outer, inner


def ends(cut, first, stop):
    """Return where the segments of a range begin and end, going forward."""
    found = [first]
    while found[-1] < stop:
        found.append(min(int(cut.after(tf.constant(found[-1]))), stop))
        assert found[-1] > found[-2], "an empty segment"
    return found


def check_cut(cut, first, stop):
    """Check that the segments partition the range, and are the same backwards."""
    marks = ends(cut, first, stop)
    for start, end in itertools.pairwise(marks):
        # The cut is the same for each step of a segment.
        for step in {start, end - 1}:
            assert min(int(cut.after(tf.constant(step))), stop) == end
            assert int(cut.before(tf.constant(step + 1))) == start
    return marks


@dataclass
class Scheme:
    """A run of a loop of ``steps``, forward and reversed with a division, by an independent reader.

    It counts how often each step runs again, and the most states held at once, with the first one,
    the loop's input. It also counts the longest stretch of steps whose values are held at once.
    """

    division: Division
    steps: int
    bound: int

    def __post_init__(self):
        self.runs, self.most_held, self.longest = [0] * self.steps, 0, 0
        self.reversed_from = self.steps
        self.outer, self.inner = cuts(self.division, self.steps, self.bound)
        marks = check_cut(self.outer, 0, self.steps)
        self.outermost = len(marks) - 1
        self._segments(marks, 1, 0)
        assert self.reversed_from == 0

    def _segments(self, marks, level, held):
        """Reverse segments whose first states are held, together with ``held`` other states."""
        kept = list(marks[:-1])
        self.most_held = max(self.most_held, held + len(kept))
        for start, stop in reversed(list(itertools.pairwise(marks))):
            assert kept.pop() == start
            self._reverse(start, stop, level, held + len(kept))

    def _reverse(self, start, stop, level, held):
        if level == self.division.repeats:
            self._run(start, stop)
            self.longest = max(self.longest, stop - start)
            self.most_held = max(self.most_held, held + 1)
            assert self.reversed_from == stop, "out of turn"
            self.reversed_from = start
            return
        marks = check_cut(self.inner(start, stop, level), start, stop)
        self._run(start, marks[-2])
        self._segments(marks, level + 1, held)

    def _run(self, start, stop):
        for step in range(start, stop):
            self.runs[step] += 1


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
@pytest.mark.parametrize("leaf", [1, 2, 5])
def test_a_known_number_of_steps(leaf, repeats):
    full = [steps_for(states, repeats, leaf) for states in range(5)]
    around = {n + more for n in full for more in (-1, 0, 1)}
    for steps in sorted(n for n in {1, 3, 17, *around} if 0 < n <= 60):
        scheme = Scheme(Division(repeats, steps, leaf), steps, -1)
        states = states_for(steps, repeats, leaf)
        assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
        assert scheme.longest <= leaf
        # The first state is included.
        assert scheme.most_held <= states + 1
        assert scheme.outermost - 1 <= states
        assert scheme.outermost <= Division(repeats, steps, leaf).most_states
        if steps == steps_for(states, repeats, leaf):
            assert scheme.outermost - 1 == states and scheme.most_held == states + 1
            assert max(scheme.runs) == repeats or states == 0


@given(st.integers(1, 400), st.integers(1, 4), st.integers(1, 30))
@settings(_fast, max_examples=examples(25))
def test_random_divisions(steps, repeats, leaf):
    scheme = Scheme(Division(repeats, steps, leaf), steps, -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    assert scheme.longest <= leaf
    assert scheme.most_held <= states_for(steps, repeats, leaf) + 1


@given(st.integers(1, 300), st.integers(1, 3), st.booleans(), st.sampled_from([0.1, 0.5, 1, 2, 30]))
@settings(_fast, max_examples=examples(20))
def test_a_number_of_steps_known_at_run_time(steps, repeats, bounded, ratio):
    scheme = Scheme(Division(repeats, None, 1, ratio), steps, steps if bounded else -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    if repeats == 1 and ratio == 1:
        assert scheme.most_held + scheme.longest <= 4 + 3 * math.sqrt(steps)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 3))
@settings(_fast, max_examples=examples(15))
def test_a_loop_that_ends_before_its_bound(steps, more, repeats):
    for division, bound in (
        (Division(repeats, steps + more, 3), -1),
        (Division(repeats, None, 1), steps + more),
    ):
        scheme = Scheme(division, steps, bound)
        assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1


@given(st.integers(1, 60), st.integers(1, 150), st.integers(1, 3), st.integers(1, 7))
@settings(_fast, max_examples=examples(300))
def test_a_number_of_steps_that_was_told(told, steps, repeats, leaf):
    """States and stretches are as for the given number, also for fewer steps; more steps are
    reversed, too."""
    scheme = Scheme(Division(repeats, None, leaf, told=told), steps, -1)
    assert max(scheme.runs) <= repeats and min(scheme.runs) >= 1
    assert scheme.longest <= leaf
    blocks = -(-steps // told)
    assert scheme.outermost <= blocks * (states_for(told, repeats, leaf) + 1)
    if blocks == 1:
        assert scheme.most_held <= states_for(told, repeats, leaf) + 1


def test_long_loops_are_divided_without_overflow():
    for repeats in (1, 2, 3):
        steps = 2**31 - 2
        leaf = leaf_for(10**6, repeats, 1.0, 1.0) * 1000
        division = Division(repeats, steps, leaf)
        cut = division.cut(tf.constant(-1))
        for step in (0, 1, leaf, steps // 3, steps - 2, steps - 1):
            start = int(cut.before(tf.constant(step + 1)))
            assert 0 <= start <= step
            assert int(cut.before(tf.constant(start + 1))) == start
    # Without a bound, segment number c has c + 1 steps.
    cut = Division(1, None, 1).cut(tf.constant(-1))
    for number in (1, 2, 3, 1000, 32767, 60000):
        first = number * (number + 1) // 2
        assert int(cut.before(tf.constant(first))) == first - number
        assert int(cut.before(tf.constant(first + 1))) == first


@functools.cache
def _longest(states, repeats):
    """Return the most steps that any scheme reverses after a complete forward pass. Each step runs
    again at most ``repeats`` times, one step at a time.

    ``states`` may be held in addition to the first one. The last segment is never crossed to keep a
    state behind it.
    """

    @functools.cache
    def fresh(states, repeats):
        """Return the most steps of a segment with only its first state held: cross it, keep states,
        reverse from its end."""
        if repeats == 0:
            return 0
        if repeats == 1:
            return 1
        # The first part is crossed once to keep the state behind it. Then each part is reversed by
        # itself.
        last = fresh(0, repeats - 1) + 1
        return last if states == 0 else fresh(states, repeats - 1) + fresh(states - 1, repeats)

    return sum(fresh(free, repeats) for free in range(states + 1))


def test_as_many_steps_as_treeverse_promises():
    for repeats in range(1, 6):
        for states in range(8):
            for leaf in (1, 3):
                found = steps_for(states, repeats, leaf)
                assert found == leaf * math.comb(states + repeats, repeats)
                assert states_for(found, repeats, leaf) == states
                assert states_for(found + 1, repeats, leaf) == states + 1
            assert steps_for(states, 1, 1) == states + 1
            if repeats > 1 and states:
                one_less = steps_for(states - 1, repeats, 1) + steps_for(states, repeats - 1, 1)
                assert steps_for(states, repeats, 1) == one_less


def test_no_scheme_needs_two_states_less():
    """Treeverse crosses the last of the inner segments as well. A scheme without this crossing
    reverses as many steps with at best one state less."""
    for repeats in range(1, 6):
        for states in range(8):
            best = _longest(states, repeats)
            assert best == math.comb(states + repeats + 1, repeats) - 1
            assert steps_for(states, repeats, 1) <= best <= steps_for(states + 1, repeats, 1)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_the_last_segments_are_as_long_as_is_best(repeats):
    for steps in (1, 2, 7, 50, 1000, 10_000):
        for state, step in ((1.0, 1.0), (1.0, 20.0), (8.0, 1.0)):

            def held(leaf, steps=steps, state=state, step=step):
                return (states_for(steps, repeats, leaf) + 1) * state + leaf * step

            chosen = leaf_for(steps, repeats, state, step)
            assert 1 <= chosen <= steps
            most = max(2, 4 * math.isqrt(steps))
            best = min(held(leaf) for leaf in range(1, 1 + min(steps, most)))
            assert held(chosen) <= 1.3 * best + state + step
