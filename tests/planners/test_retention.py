"""Simulations of decisions: against an interpreter that follows each value, and by hand."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaving_gradients.planners.retention.local_search import Search
from memsaving_gradients.planners.retention.problem import (
    DROPPED,
    EARLY,
    KEPT,
    LATE,
    STRICT,
    Problem,
)
from memsaving_gradients.planners.retention.simulate import run
from tests.helpers.sampling import examples


def problem(seed: int) -> Problem:
    """Draw a problem: recipes of one or two values, some values that cannot be recomputed, and
    other bytes."""
    draw = random.Random(seed)
    reads, writes, recipe, inputs, outputs, seconds, scratch = [], [], [], [], [], [], []
    for _ in range(draw.randint(1, 16)):
        known = range(len(recipe))
        read = tuple(draw.sample(known, min(len(known), draw.randint(0, 3))))
        made = tuple(range(len(recipe), len(recipe) + draw.choice([0, 0, 1, 1, 1, 2])))
        reads.append(read)
        writes.append(made)
        if made and draw.random() < 0.8:
            recipe += [len(inputs)] * len(made)
            # A recipe may be shorter than the event: it need not read all inputs of the event.
            inputs.append(tuple(sorted(draw.sample(known, min(len(known), draw.randint(0, 3))))))
            outputs.append(made)
            seconds.append(float(draw.randint(0, 9)))
            scratch.append(draw.randint(0, 3))
        else:
            recipe += [-1] * len(made)
    many = len(reads)
    return Problem(
        reads=reads,
        writes=writes,
        size=[draw.randint(0, 9) for _ in recipe],
        recipe=recipe,
        inputs=inputs,
        outputs=outputs,
        seconds=seconds,
        scratch=scratch,
        during=[draw.randint(0, 5) for _ in range(many)],
        between=[draw.randint(0, 5) for _ in range(many)],
    )


def decide(given: Problem, seed: int) -> list[int]:
    """Draw a decision for each gap; early and late ones name an event inside the gap."""
    draw = random.Random(seed)
    decisions = []
    for value, begin, end in given.gaps:
        what = draw.choice([KEPT, DROPPED, STRICT, EARLY, LATE])
        inside = range(begin + 1, min(end, len(given.reads)))
        if what >= EARLY:
            possible = given.recipe[value] >= 0 and len(inside) > 0
            what = what + 2 * draw.choice(inside) if possible else DROPPED
        decisions.append(what)
    return decisions


class Interpreter:
    """An interpreter that follows the module's definitions: it makes, reads, and loses instances of
    values.

    Only the order in which missing inputs are made, the last first, is taken from the simulation
    itself.
    """

    def __init__(self, given: Problem, decisions: list[int]) -> None:
        self.given = given
        self.decision_at: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (value, begin, end), what in zip(given.gaps, decisions, strict=True):
            self.decision_at[value].append((begin, end, what))
        self.there: dict[int, int] = {}
        self.instances: list[list[int]] = []
        self.beside: list[int] = []
        self.seconds = 0.0

    def decision(self, value: int, event: int) -> int:
        """Return the decision on ``value`` just behind ``event``."""
        (what,) = [w for begin, end, w in self.decision_at[value] if begin <= event < end]
        return what

    def now(self) -> int:
        return len(self.beside)

    def make(self, value: int) -> None:
        self.there[value] = len(self.instances)
        self.instances.append([value, self.now(), self.now()])

    def read(self, value: int) -> None:
        self.instances[self.there[value]][2] = self.now()

    def again(self, value: int, event: int, made: list[int]) -> None:
        if value in self.there:
            return
        number = self.given.recipe[value]
        assert number >= 0, "lost what cannot be recomputed"
        for needed in reversed(self.given.inputs[number]):
            self.again(needed, event, made)
        for needed in self.given.inputs[number]:
            self.read(needed)
        beside = self.given.between[event] + self.given.scratch[number]
        for output in self.given.outputs[number]:
            if output in self.there:
                # A second copy, which no event reads.
                beside += self.given.size[output]
            else:
                self.make(output)
                made.append(output)
        self.seconds += self.given.seconds[number]
        self.beside.append(beside)

    def play(self) -> Interpreter:
        given = self.given
        for event, (reads, writes) in enumerate(zip(given.reads, given.writes, strict=True)):
            made: list[int] = []
            for value in range(len(given.size)):
                if any(what == EARLY + 2 * event for *_, what in self.decision_at[value]):
                    self.again(value, event, made)
            for value in reads:
                self.again(value, event, made)
            for value in reads:
                self.read(value)
            for value in writes:
                self.make(value)
            self.beside.append(given.during[event])
            for value in {*reads, *writes}:
                what = self.decision(value, event)
                stays = what == KEPT or (what >= LATE and (what - LATE) % 2 == 0)
                if not stays and given.recipe[value] >= 0:
                    del self.there[value]
            for value in made:
                if value in self.there and self.decision(value, event) == STRICT:
                    del self.there[value]
            for value in list(self.there):
                if any(what == LATE + 2 * event for *_, what in self.decision_at[value]):
                    del self.there[value]
        return self

    def alive(self) -> list[int]:
        size = self.given.size
        return [
            beside + sum(size[v] for v, first, last in self.instances if first <= step <= last)
            for step, beside in enumerate(self.beside)
        ]


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=examples(1500), deadline=None, derandomize=True)
def test_against_the_interpreter(seed, other):
    given = problem(seed)
    decisions = decide(given, other)
    expected = Interpreter(given, decisions).play()
    found = run(given, decisions)
    assert found.bytes_alive.tolist() == expected.alive()
    assert found.peak == max(expected.alive())
    assert found.extra_seconds == expected.seconds
    instances = zip(found.value, found.born, found.last, strict=True)
    assert sorted(map(list, instances)) == sorted(expected.instances)
    for value, born, gap in zip(found.value, found.born, found.gap, strict=True):
        owner, begin, end = given.gaps[gap]
        assert owner == value
        assert begin <= found.event[born] <= end


@given(st.integers(0, 2**32), st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_nothing_is_written_to_decisions(seed, other):
    given = problem(seed)
    decisions = decide(given, other)
    before = decisions.copy()
    first = run(given, decisions)
    assert decisions == before
    second = run(given, decisions)
    assert (first.bytes_alive == second.bytes_alive).all()
    assert first.gap == second.gap


@given(st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_plain_decisions_make_nothing_again(seed):
    given = problem(seed)
    found = run(given, given.plain())
    assert found.extra_seconds == 0
    assert found.event == list(range(len(given.reads)))
    assert sorted(found.value) == list(range(len(given.size)))
    ends = {v: used[-1] for v, used in enumerate(given.uses)}
    assert dict(zip(found.value, found.last, strict=True)) == ends


@given(st.integers(0, 2**32))
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_gaps_lie_side_by_side(seed):
    given = problem(seed)
    for value in range(len(given.size)):
        rows = given.gaps[given.first_gap[value] : given.first_gap[value + 1]]
        assert [v for v, _, _ in rows] == [value] * len(rows)
        assert [begin for _, begin, _ in rows] == given.uses[value]
        assert [end for *_, end in rows] == [*given.uses[value][1:], len(given.reads)]
    assert given.owner == [v for v, _, _ in given.gaps]


# --- By hand


def chain(reads: list[tuple[int, ...]], many: int) -> Problem:
    """Return ``many`` values in a chain, a byte and a second each; then events that read ``reads``
    and make nothing."""
    return Problem(
        reads=[*([(k - 1,) if k else () for k in range(many)]), *reads],
        writes=[*([(k,) for k in range(many)]), *([()] * len(reads))],
        size=[1] * many,
        recipe=list(range(many)),
        inputs=[(k - 1,) if k else () for k in range(many)],
        outputs=[(k,) for k in range(many)],
        seconds=[1.0] * many,
        scratch=[0] * many,
        during=[0] * (many + len(reads)),
        between=[0] * (many + len(reads)),
    )


def decided(given: Problem, what: dict[tuple[int, int], int]) -> list[int]:
    """Return the plain decisions, with other ones at each (value, event before the gap)."""
    decisions = given.plain()
    for gap, (value, begin, _) in enumerate(given.gaps):
        decisions[gap] = what.pop((value, begin), decisions[gap])
    assert not what
    return decisions


def test_dropped_stays_until_its_next_use_and_strict_does_not():
    # Event 1, which makes value 1, and the last event read value 0. Recomputing value 1 for event 2
    # needs value 0 as well.
    given = chain([(1,), (), (0,)], 2)
    drop_1 = {(1, 1): DROPPED}
    kept = run(given, decided(given, drop_1 | {(0, 1): KEPT}))
    assert (kept.bytes_alive.tolist(), kept.extra_seconds) == ([1, 2, 2, 2, 1, 1], 1.0)
    dropped = run(given, decided(given, drop_1 | {(0, 1): DROPPED}))
    assert (dropped.bytes_alive.tolist(), dropped.extra_seconds) == ([1, 2, 1, 2, 2, 1, 1], 2.0)
    strict = run(given, decided(given, drop_1 | {(0, 1): STRICT}))
    assert (strict.bytes_alive.tolist(), strict.extra_seconds) == ([1, 2, 1, 2, 1, 0, 1, 1], 3.0)


def test_early_comes_back_while_its_inputs_are_there():
    # Value 0 is alive at event 2 for the last time: recomputing value 1 only at its own event costs
    # a second run of value 0.
    given = chain([(0,), (), (1,)], 2)
    late = run(given, decided(given, {(1, 1): DROPPED}))
    assert (late.bytes_alive.tolist(), late.extra_seconds) == ([1, 2, 1, 0, 1, 2, 1], 2.0)
    early = run(given, decided(given, {(1, 1): EARLY + 2 * 2}))
    assert (early.bytes_alive.tolist(), early.extra_seconds) == ([1, 2, 2, 2, 1, 1], 1.0)


def test_late_stays_until_something_was_made_of_it():
    # Recomputing 1 for event 2 needs value 0: its last use before it is recomputed for event 4.
    given = chain([(1,), (), (0,)], 2)
    late = run(given, decided(given, {(1, 1): DROPPED, (0, 1): LATE + 2 * 2}))
    assert (late.bytes_alive.tolist(), late.extra_seconds) == ([1, 2, 2, 1, 0, 1, 1], 2.0)


def test_what_cannot_be_made_again_stays():
    given = chain([(0,)], 1)
    fixed = Problem(**{**vars(given), "recipe": [-1], "inputs": [], "outputs": [], "seconds": []})
    found = run(fixed, [DROPPED, DROPPED])
    assert (found.bytes_alive.tolist(), found.extra_seconds) == ([1, 1], 0.0)


def test_a_recipe_of_two_values_runs_once():
    pair = Problem(
        reads=[(), (0, 1), (1,), (0,)],
        writes=[(0, 1), (), (), ()],
        size=[3, 5],
        recipe=[0, 0],
        inputs=[()],
        outputs=[(0, 1)],
        seconds=[2.0],
        scratch=[7],
        during=[0, 100, 0, 0],
        between=[0, 0, 1000, 0],
    )
    both = run(pair, decided(pair, {(0, 1): DROPPED, (1, 1): DROPPED}))
    assert both.bytes_alive.tolist() == [8, 108, 1015, 8, 3]
    assert both.extra_seconds == 2.0
    strict = run(pair, decided(pair, {(0, 1): STRICT, (1, 1): DROPPED}))
    assert strict.bytes_alive.tolist() == [8, 108, 1015, 5, 15, 3]
    assert strict.extra_seconds == 4.0


def test_excess_weighs_bytes_above_the_budget():
    given = chain([(1,), (0,)], 2)
    found = run(given, given.plain())
    assert found.bytes_alive.tolist() == [1, 2, 2, 1]
    assert found.excess(1) == pytest.approx(2)
    assert found.excess(2) == 0
    longer = chain([(2,), (1,), (0,)], 3)
    found = run(longer, longer.plain())
    assert found.bytes_alive.tolist() == [1, 2, 3, 3, 2, 1]
    assert found.excess(2, 2) == pytest.approx(2 * (1 / 2) ** 2)


def test_runs_of_many_steps_count_as_several():
    # Recomputing every value from the first one takes 2,500 steps instead of 120.
    given = chain([(k,) for k in [*range(39), *reversed(range(40))]], 40)
    strict = [STRICT] * len(given.gaps)
    assert len(run(given, strict).event) > 20 * len(given.reads)
    ticks: list[None] = []
    search = Search(given, 1, tick=lambda: ticks.append(None))
    search.descend(strict, 100)
    assert search.runs >= 100 > 5 * len(ticks)
