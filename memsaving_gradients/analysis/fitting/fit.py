"""The result of `fit_to` as a value: the chosen way to train, and all candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memsaving_gradients.budget import DeviceMemory, exact_bytes, format_bytes, format_share
from memsaving_gradients.reports.plan_text import columns

__all__ = ["Candidate", "Fit"]


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes
    ----------
    technique
        Its techniques, in words.
    settings
        Arguments of ``MemorySavingGradients``. If they have no ``budget``, `Fit.settings` adds
        ``device_memory``.
    changes
        Its changes to the training's results, by their names in ``may``. Without changes, the
        gradients are exact.
    device
        The least device memory that it works with, bytes.
    extra_time
        The estimated extra time, as a fraction of a plain step's time. It comes from recomputation
        within the given memory, and from smaller kernels.
    """

    technique: str
    settings: Mapping[str, Any] = field(repr=False)
    changes: tuple[str, ...]
    device: int
    extra_time: float


@dataclass(frozen=True)
class Fit:
    """The chosen way to train, with its alternatives; prints as a table.

    Attributes
    ----------
    memory
        The memory of the device, with the bytes that are taken before a step.
    chosen
        The fastest of the candidates that fit with the least harmful changes.
    candidates
        All candidates, those with the least harmful changes first.
    model
        The model to train: the given one, or a copy with its weights and another policy.
    batch
        The number of examples of a step.
    """

    memory: DeviceMemory
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    model: Any = field(repr=False)
    batch: int

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of ``MemorySavingGradients``."""
        settings = dict(self.chosen.settings)
        # A budget already limits the bytes of a step; `device_memory` would limit them twice.
        return (
            settings if "budget" in settings else {"device_memory": self.memory.value, **settings}
        )

    def callback(self, **more: Any) -> Any:
        """Return a ``MemorySavingGradients`` with these settings; ``more`` adds or replaces."""
        # Keras takes seconds to import.
        from memsaving_gradients.keras import MemorySavingGradients

        return MemorySavingGradients(**{**self.settings, **more})

    def __str__(self) -> str:
        memory, rows = self.memory, [("least device", "technique", "extra time", "changes")]
        for one in self.candidates:
            mark = "→ " if one is self.chosen else "" if one.device <= memory.whole else "✗ "
            changes = ", ".join(one.changes) or "nothing"
            extra = format_share(one.extra_time, 1)
            rows.append((f"{one.device:,}", f"{mark}{one.technique}", extra, changes))
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return "\n".join(
            [
                f"a device of {exact_bytes(memory.whole)}, batch {self.batch}: {memory.taken}; "
                f"{format_bytes(memory.left)} are left for a step",
                *columns(rows),
                f"MemorySavingGradients({given})",
            ]
        )
