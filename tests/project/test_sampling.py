"""Samples of cases keep their promises, in this test suite as it runs."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers import sampling
from tests.helpers.sampling import covering, examples, one_of, sample

FACTORS = ([0, 1, 2, 3], "ab", [True, False], "xyz")


@pytest.fixture(params=[False, True], ids=["sampled", "thorough"])
def thorough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(sampling, "thorough", request.param)
    return request.param


@pytest.mark.parametrize("count", [2, 3, 4])
def test_fast_cases_cover_pairs_and_all_others_are_slow(count: int) -> None:
    factors = FACTORS[:count]
    cases = covering(*factors)
    assert [case.values for case in cases] == [*itertools.product(*factors)]
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) < len(cases)
    for places in itertools.combinations(range(count), 1 if count == 2 else 2):
        wanted = itertools.product(*(factors[place] for place in places))
        assert {tuple(case[place] for place in places) for case in fast} == {*wanted}


@pytest.mark.sampled
def test_a_sample_has_each_value(thorough: bool) -> None:
    product = [*itertools.product(*FACTORS)]
    found = sample(*FACTORS)
    assert len(found) == (len(product) if thorough else 4)
    assert {*found} <= {*product}
    for place, values in enumerate(FACTORS):
        assert {case[place] for case in found} == {*values}


@pytest.mark.sampled
def test_one_of_many_or_all(thorough: bool) -> None:
    found = one_of("abc")
    assert found == ["a", "b", "c"] if thorough else len(found) == 1 and found[0] in "abc"


def test_a_sample_asks_for_a_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "thorough", False)
    with pytest.raises(AssertionError, match="mark it sampled"):
        sample([1, 2], [3, 4])
    with pytest.raises(AssertionError, match="mark it sampled"):
        one_of([1, 2])


def test_a_tenth_of_the_examples(thorough: bool) -> None:
    assert [examples(count) for count in (300, 25, 1)] == ([300, 25, 1] if thorough else [30, 3, 1])
