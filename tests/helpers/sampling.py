"""How many of its cases a test tries: a sample in the fast suite, all of them with ``pytest
--thorough``.

- `examples`: a property test tries a tenth of its examples.
- `sample`: a test that loops over a product tries each value of each factor at least once.
- `one_of`: a test that loops over values none of which is more likely to fail than the others tries
  one.
- `covering`: of a product of parameters, the cases in which each pair of values occurs are fast,
  and all others are slow.
- `slow`: parameters that the fast suite leaves out.

Which cases `sample` and `one_of` take depends on the name of the test, so that many tests try all
values. These tests are marked ``sampled``.

``make test-slow`` runs what is marked ``slow``, ``sampled`` or ``hypothesis`` (Hypothesis' own
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

#: Set by `tests.conftest`: the first before tests are imported, the second before each test.
thorough = False
running: pytest.Item | None = None


def examples(count: int) -> int:
    """How many examples a property test tries, of ``count``."""
    return count if thorough else -(-count // _FEWER)


def sample(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of the product of ``factors`` in which each value occurs."""
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
    """A list of one of ``values``, which are strings and the like."""
    values = [*values]
    return values if thorough else [values[_number(values) % len(values)]]


def _number(*more: Any) -> int:
    """Return a number that depends on the test that runs, and on what ``more`` prints."""
    assert running is not None
    if running.get_closest_marker("sampled") is None:
        raise AssertionError(f"{running.nodeid} tries a sample of its cases: mark it sampled")
    return zlib.crc32(f"{running.nodeid} {more}".encode())


def covering(*factors: Sequence[Any], pairs: bool = True) -> list[Any]:
    """Parameters of a product: those that a greedy cover by pairs of values takes are fast, all
    others slow.

    With two factors, or ``pairs=False``, it is each single value that occurs in a fast case.
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
    """Parameters that are left out of the fast suite."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
