"""A row of `benchmarks.zoo.families` as a network of the zoo."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.base import Model


def foreign(row: str, **options: Any) -> Model:
    """Make the network of a row; with `options`, an application of that size."""
    if options:
        from benchmarks.zoo.applications import build_small

        return build_small(row.partition("/")[2], **options)
    from benchmarks.zoo.families import build

    return build(row)
