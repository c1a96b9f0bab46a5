"""Samples of the cases of a test in the fast suite; ``pytest --thorough`` tries all of them.

- `examples`: a property test tries a tenth of its examples.
- `sample`: a test that loops over a product tries each value of each factor at least once.
- `one_of`: a test that loops over equally risky values tries one of them.
- `covering`: in a product of parameters, enough cases are fast to have each pair of values; all
  others are slow.
- `slow`: parameters that the fast suite leaves out.

The cases of `sample` and `one_of` depend on the name of the test, so that many tests together try
all values. These tests are marked ``sampled``.

``make test-slow`` runs the tests marked ``slow``, ``sampled`` or ``hypothesis`` (Hypothesis' own
marker), thoroughly.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["covering", "examples", "one_of", "sample", "slow"]

_FEWER = 10

#: `tests.conftest` sets the first one before tests are imported, the second one before each test.
thorough = False
running: pytest.Item | None = None


def examples(count: int) -> int:
    """Return the number of examples that a property test tries, of ``count``."""
    return count if thorough else -(-count // _FEWER)


def sample(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases of the product of ``factors`` in which each value occurs."""
    cases = [*itertools.product(*factors)]
    count = max(map(len, factors))
    if thorough or count == len(cases):
        return cases
    number = _number()
    return [
        tuple(values[(k + (number >> place)) % len(values)] for place, values in enumerate(factors))
        for k in range(count)
    ]


def one_of(values: Iterable[Any]) -> list[Any]:
    """Return a list of one of ``values``, whose printed forms must not change between runs."""
    values = [*values]
    return values if thorough else [values[_number(values) % len(values)]]


def _number(*more: Any) -> int:
    """Return a number that depends on the running test, and on the printed form of ``more``."""
    assert running is not None
    if running.get_closest_marker("sampled") is None:
        raise AssertionError(f"{running.nodeid} tries a sample of its cases: mark it sampled")
    return zlib.crc32(f"{running.nodeid} {more}".encode())


def covering(*factors: Sequence[Any], pairs: bool = True) -> list[Any]:
    """Return the parameters of a product: a greedy cover of all pairs of values is fast, all other
    cases are slow.

    With up to two factors, or ``pairs=False``, fast cases cover each single value instead.
    """
    strength = 2 if pairs and len(factors) > 2 else 1
    cases = [*itertools.product(*(range(len(values)) for values in factors))]
    places = [*itertools.combinations(range(len(factors)), strength)]
    parts = {case: {(p, tuple(case[i] for i in p)) for p in places} for case in cases}
    missing, fast = set().union(*parts.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(parts[case] & missing))
        fast.add(best)
        missing -= parts[best]
    return [
        pytest.param(
            *(values[k] for values, k in zip(factors, case, strict=True)),
            marks=[] if case in fast else pytest.mark.slow,
        )
        for case in cases
    ]


def slow(*values: Any) -> list[Any]:
    """Return parameters that the fast suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
