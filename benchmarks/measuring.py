"""Measurements in processes of their own, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_tools.memory.measure import in_fresh_process

# A GPU in the machine would take over the kernels, and Keras would turn XLA on.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}


def fresh(target: str, environment: Mapping[str, str] = ENVIRONMENT, /, **arguments: Any) -> Any:
    """Return the result of ``"module:function"`` of this package in a fresh process, as JSON."""
    return in_fresh_process(f"benchmarks.{target}", arguments, environment)


def peak(
    model: str, options: dict[str, Any], settings: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Return the peak of a step (`benchmarks.probes.peak`): plain without settings, else ours."""
    found: dict[str, Any] = fresh(
        "probes:peak",
        model=model,
        options=options,
        ours=settings is not None,
        settings=settings or {},
        **more,
    )
    return found


def ratio(
    model: str, options: dict[str, Any], settings: dict[str, Any], pairs: int
) -> dict[str, Any]:
    """Return the ratio of the time of our step to the time of the plain step."""
    found: dict[str, Any] = fresh(
        "probes:ratio", model=model, options=options, settings=settings, pairs=pairs
    )
    return found
