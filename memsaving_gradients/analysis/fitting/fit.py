"""What fits a training into a memory, and what else was looked at, as a value."""

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
        What it does, in words.
    settings
        Arguments of ``MemorySavingGradients``; where there is no ``budget``, beside
        ``device_memory``.
    changes
        What it changes that matters to the result, of the names that ``may`` has; none: gradients
        are exact.
    device
        The least memory of a device that it works on, bytes.
    extra_time
        Estimated, as a fraction of a plain step's time: of recomputation within the memory there
        is, and of smaller kernels.
    """

    technique: str
    settings: Mapping[str, Any] = field(repr=False)
    changes: tuple[str, ...]
    device: int
    extra_time: float


@dataclass(frozen=True)
class Fit:
    """The way to train that was chosen, and why; prints as a table.

    Attributes
    ----------
    memory
        The device, with what is taken of it before a step.
    chosen
        Of those that fit, and change the least, the fastest.
    candidates
        All that were looked at, in the order of what they change.
    model
        The model to train: the one that was given, or one of its weights with another policy.
    batch
        Examples of a step.
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
        # A budget says what is left of the device; with its memory as well it would be said twice.
        return (
            settings if "budget" in settings else {"device_memory": self.memory.value, **settings}
        )

    def callback(self, **more: Any) -> Any:
        """A ``MemorySavingGradients`` with these settings, and more if wanted."""
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
