"""Simulations of changed decisions, from the first change on: they give the same results as
simulations from the first event on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners.retention import incremental
from memsaving_gradients.planners.retention.incremental import Base, Change, changed
from memsaving_gradients.planners.retention.problem import (
    DROPPED,
    EARLY,
    KEPT,
    LATE,
    STRICT,
    Problem,
)
from memsaving_gradients.planners.retention.simulate import Run, run
from tests.helpers.sampling import examples
from tests.planners.test_retention import chain, decided
from tests.planners.test_retention import problem as small_problem

seeds = st.integers(0, 2**32)
#: The number of events from one mark to the next in these tests.
APART = 32


def same(one: Run, other: Run) -> bool:
    """Return whether two runs are the same in every field, to the last bit."""
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(Run)
    )


def anywhere(seed: int) -> Problem:
    """Draw a problem with its border anywhere; some results cannot be recomputed by themselves, but
    are made in passing."""
    draw = random.Random(seed)
    made = small_problem(draw.randrange(2**32))
    recipe = list(made.recipe)
    for outputs in made.outputs:
        if len(outputs) > 1 and draw.random() < 0.3:
            recipe[draw.choice(outputs)] = -1
    return replace(made, recipe=recipe, border=draw.randint(0, len(made.reads)))


def step(seed: int) -> Problem:
    """Draw a problem like a training step: forward events make all values, and many backward events
    read them; seconds have rounding errors."""
    draw = random.Random(seed)
    forward, backward = draw.randint(2, 12), draw.randint(1, 5 * APART)
    reads: list[tuple[int, ...]] = []
    for value in range(forward):
        reads.append(tuple(draw.sample(range(value), min(value, draw.randint(0, 2)))))
    for _ in range(backward):
        many = min(forward, draw.choice([0, 0, 0, 1, 2]))
        reads.append(tuple(draw.sample(range(forward), many)))
    events = forward + backward
    return Problem(
        reads=reads,
        writes=[*((value,) for value in range(forward)), *([()] * backward)],
        size=[draw.randint(0, 9) for _ in range(forward)],
        recipe=list(range(forward)),
        inputs=[
            tuple(draw.sample(range(value), min(value, draw.choice([0, 1, 1, 2]))))
            for value in range(forward)
        ],
        outputs=[(value,) for value in range(forward)],
        seconds=[draw.random() for _ in range(forward)],
        scratch=[draw.randint(0, 3) for _ in range(forward)],
        during=[draw.randint(0, 5) for _ in range(events)],
        between=[draw.randint(0, 5) for _ in range(events)],
        border=forward,
    )


def decision(given: Problem, gap: int, draw: random.Random, wild: float) -> int:
    """Draw a decision on a gap. With probability ``wild``, it names any event at which its value
    can be made."""
    value, begin, end = given.gaps[gap]
    events = len(given.reads)
    respects = draw.random() >= wild / 4
    if respects and end < given.border:
        return KEPT
    if given.recipe[value] < 0:
        return draw.choice([KEPT, DROPPED])
    what = draw.choice([KEPT, DROPPED, STRICT, EARLY, LATE])
    first, last = begin + 1, min(end, events) - 1
    if draw.random() < wild:
        born = [given.uses[v][0] for v in given.inputs[given.recipe[value]]]
        first, last = max(born, default=-1) + 1, events - 1
    if respects and (what == EARLY or first <= begin):
        first = max(first, given.border)
    if what >= EARLY:
        what = what + 2 * draw.randint(first, last) if first <= last else DROPPED
    return what


def drawn(given: Problem, seed: int, wild: float) -> tuple[list[int], list[Change]]:
    """Draw decisions, and changes of them."""
    draw = random.Random(seed)
    gaps = range(given.first_gap[-1])
    decisions = [decision(given, gap, draw, wild) for gap in gaps]
    changes = [
        [
            (gap, decision(given, gap, draw, wild))
            for gap in draw.choices(gaps, k=draw.randint(0, 4))
        ]
        for _ in range(8 if gaps else 0)
    ]
    return decisions, changes


@pytest.mark.parametrize("make", [anywhere, step])
@pytest.mark.parametrize(("wild", "apart"), [(0.0, APART), (0.2, APART), (0.2, 1), (0.8, 3)])
@given(first=seeds, second=seeds)
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_a_change_is_played_as_from_the_first_event(
    make: Callable[[int], Problem], wild: float, apart: int, first: int, second: int
) -> None:
    given = make(first)
    decisions, changes = drawn(given, second, wild)
    base = Base(given, decisions)
    with mock.patch.object(incremental, "_apart", return_value=apart):
        for change in changes:
            assert same(base.simulate(change), run(given, changed(decisions, change)))
    assert base.decisions == decisions
    assert same(base.run, run(given, decisions))


@pytest.mark.parametrize("make", [anywhere, step])
@pytest.mark.parametrize("wild", [0.0, 0.2])
@given(first=seeds, second=seeds)
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_a_run_does_not_ask_for_the_border(
    make: Callable[[int], Problem], wild: float, first: int, second: int
) -> None:
    given = make(first)
    decisions, _ = drawn(given, second, wild)
    assert same(run(given, decisions), run(replace(given, border=0), decisions))


# --- By hand


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the events from which changes are simulated."""
    events: list[int] = []
    advance = incremental.advance

    def noted(problem, decisions, appointments, state, until):
        events.append(state.now)
        advance(problem, decisions, appointments, state, until)

    monkeypatch.setattr(incremental, "advance", noted)
    monkeypatch.setattr(incremental, "_apart", lambda _: APART)
    return events


def long_step() -> Problem:
    """Return a problem of four values, each made of the one before it. They are read again one by
    one, far from each other, the last value first."""
    backward: list[tuple[int, ...]] = []
    for value in (3, 2, 1, 0):
        backward += [()] * (APART - 1) + [(value,)]
    return replace(chain(backward, 4), border=4)


def spans(given: Problem) -> list[int]:
    """Return, for each value, its gap between the two passes."""
    return [gap for gap, (_, begin, end) in enumerate(given.gaps) if begin < given.border <= end]


def test_what_comes_before_a_change_is_not_played(begun: list[int]) -> None:
    given = long_step()
    base = Base(given, given.plain())
    base.simulate([])
    for value, gap in enumerate(spans(given)[:-1]):
        begun.clear()
        found = base.simulate([(gap, DROPPED)])
        # The event that reads the value is the last one of its stretch.
        assert begun == [given.border + APART * (3 - value)]
        assert found.again == [(given.gaps[gap][2], value)]
        assert found.bytes_alive[given.border] == 3


def test_what_is_made_of_a_value_looks_at_it(begun: list[int]) -> None:
    given = long_step()
    gaps = spans(given)
    base = Base(given, decided(given, {(2, 3): DROPPED}))
    assert base.run.extra_seconds == 1
    begun.clear()
    # Value 2 is recomputed from value 1, long before an event reads value 1.
    found = base.simulate([(gaps[1], DROPPED)])
    assert begun[-1] == given.border + APART
    assert [recipe for _, recipe in found.again] == [1, 2]


def test_what_changes_before_the_border_is_played_from_the_first_event(begun: list[int]) -> None:
    given = long_step()
    base = Base(given, given.plain())
    base.simulate([])
    begun.clear()
    gap = given.first_gap[0]
    assert given.gaps[gap][2] < given.border
    found = base.simulate([(gap, DROPPED)])
    assert begun == []
    assert found.again == [(1, 0)]
    # The same holds for the change back.
    base = Base(given, changed(given.plain(), [(gap, DROPPED)]))
    assert base.simulate([(gap, KEPT)]).again == []
    assert begun == []


def test_a_value_that_is_made_again_before_it_is_made_is_in_its_first_gap() -> None:
    given = Problem(
        reads=[(), (), (), (), (0,), (0,)],
        writes=[(), (), (), (0,), (), ()],
        size=[1],
        recipe=[0],
        inputs=[()],
        outputs=[(0,)],
        seconds=[1.0],
        scratch=[0],
        during=[0] * 6,
        between=[0] * 6,
    )
    # The decision on the first gap says whether the value of event 1 is still alive at event 2.
    others = [EARLY + 2 * 1, EARLY + 2 * 2]
    base = Base(given, [DROPPED, *others])
    assert base.run.extra_seconds == 3
    with mock.patch.object(incremental, "_apart", return_value=1):
        strict = base.simulate([(0, STRICT)])
    assert strict.extra_seconds == 4
    assert same(strict, run(given, [STRICT, *others]))


def test_what_leaves_before_its_gap_begins_is_there_at_the_border() -> None:
    given = long_step()
    late = {(2, 3): LATE + 2 * 0}
    assert run(given, decided(given, late.copy())).extra_seconds == 0
    gap = spans(given)[2]
    assert Base(given, given.plain()).simulate([(gap, LATE + 2 * 0)]).extra_seconds == 0
