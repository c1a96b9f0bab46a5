"""Budgets as people write them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsaving_gradients.budget import UNITS, format_bytes, parse_budget, parse_bytes
from memsaving_gradients.errors import ArgumentError


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1B", 1),
        ("3 kB", 3000),
        ("3KB", 3000),
        ("3 KiB", 3072),
        ("2MB", 2 * 10**6),
        ("2 MiB", 2 << 20),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2 gb", 2 * 10**9),
        (" 1.5  GiB ", 3 << 29),
        (".5 MiB", 1 << 19),
        ("1TB", 10**12),
        ("1 TiB", 1 << 40),
        ("1,000 MB", 10**9),
        ("1_000 MB", 10**9),
        ("1e3 kB", 10**6),
        (np.int64(7), 7),
        (7, 7),
        (2**70, 2**70),
    ],
)
def test_bytes(written, size):
    assert parse_budget(written) == parse_bytes(written, "x") == size
    assert type(parse_budget(written)) is int


@pytest.mark.parametrize("share", [1.0, 0.5, 1e-9, np.float32(0.25)])
def test_fractions(share):
    found = parse_budget(share)
    assert type(found) is float
    assert found == float(share)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_every_unit_in_any_case(number, unit, space):
    for written in (unit, unit.lower(), unit.upper()):
        if written.upper() == written or written == unit or written == "b":
            if written == "b":
                continue
            assert parse_budget(f"{number}{space}{written}") == number * UNITS[unit]


UNUSABLE = {
    "zero": (0, "not positive"),
    "negative": (-5, "not positive"),
    "negative with a unit": ("-2GiB", "not positive"),
    "zero with a unit": ("0 MB", "not positive"),
    "fraction of zero": (0.0, "not positive"),
    "negative fraction": (-0.5, "not positive"),
    "not a number": (math.nan, "not a number"),
    "float above one": (2.5e9, "give an int: 2500000000"),
    "infinite": (math.inf, "a string with a unit"),
    "True": (True, "give an int"),
    "False": (False, "give an int"),
    "gigs": ("2 gigs", "unknown unit 'gigs'"),
    "no unit": ("2000", "has no unit"),
    "no number": ("GiB", "not a number with a unit"),
    "nothing": ("", "not a number with a unit"),
    "words": ("half", "not a number with a unit"),
    "percent": ("50%", "not a number with a unit"),
    "decimal comma": ("1,5 GiB", "a decimal comma is not read"),
    "commas anywhere": ("1,,500 MB", "a decimal comma is not read"),
    "more than any memory": (10**400, "more than any memory"),
    "bits": ("2 Gb", "may mean bits"),
    "bit": ("8b", "may mean bits"),
    "endless": ("1e999 GB", "too large"),
    "list": ([1], "give an int"),
    "bytes": (b"2GiB", "give an int"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable(case):
    value, says = UNUSABLE[case]
    with pytest.raises(ArgumentError) as caught:
        parse_budget(value)
    assert caught.value.argument == "budget"
    assert says in str(caught.value)


def test_units_are_listed():
    with pytest.raises(ArgumentError, match="B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"):
        parse_budget("2 gigs")


def test_bytes_are_no_fraction():
    with pytest.raises(ArgumentError, match="device_memory=0.5") as caught:
        parse_bytes(0.5, "device_memory")
    assert "fraction" not in str(caught.value)


@given(st.integers(0, 2**60))
def test_formatted_is_near(size):
    shown = format_bytes(size)
    number, unit = shown.split()
    assert float(number) * UNITS[unit] == pytest.approx(size, rel=0.01)
