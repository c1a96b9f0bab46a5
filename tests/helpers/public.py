"""The public names of the packages."""

from __future__ import annotations

import types
from typing import Any

import graph_tools
import memsaving_gradients as ms
from graph_tools.memory import measure
from memsaving_gradients import errors, planners

__all__ = ["public_names"]

MODULES = (ms, ms.keras, ms.attention, planners, errors, graph_tools, measure)


def public_names() -> dict[str, Any]:
    """Return the objects of all public names, by module and name."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in MODULES
        for name in module.__all__
        if not isinstance(getattr(module, name), types.ModuleType)
    }
