"""A device's memory as a budget: what variables, slots and a reserve leave of it for a step."""

from __future__ import annotations

from dataclasses import dataclass

from memsaving_gradients.units import exact_bytes, parse_bytes

__all__ = ["RESERVE", "DeviceMemory"]

RESERVE = 1 / 20
"""Of a device's memory, the share that is not planned with: metrics, libraries, holes between chunks; inputs, where they are not known."""
#: Batches that are there at a time: the one in use, and the one that is fetched meanwhile.
BATCHES = 2


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, and what is taken of it before a step begins.

    Attributes
    ----------
    value
        As the user wrote it.
    weights, slots
        Bytes of the model's variables, and of the optimizer's.
    buffers
        Bytes of the gradients that microbatches are added up in.
    inputs
        Bytes of the batches that are there at a time (`BATCHES`); 0: they are not known, and left to the reserve.

    Examples
    --------
    >>> device = DeviceMemory("1 MB", weights=200_000, slots=400_000)
    >>> device.left
    350000
    >>> device.enough_for(400_000)
    1052631
    """

    value: int | str
    weights: int = 0
    slots: int = 0
    buffers: int = 0
    inputs: int = 0

    def __post_init__(self) -> None:
        parse_bytes(self.value, "device_memory")

    @property
    def whole(self) -> int:
        """All of it, bytes."""
        return parse_bytes(self.value, "device_memory")

    @property
    def left(self) -> int:
        """What a step may take, bytes; not positive: nothing."""
        return _left(self.whole, self._taken)

    @property
    def _taken(self) -> int:
        return self.weights + self.slots + self.buffers + self.inputs

    def enough_for(self, budget: int) -> int:
        """The least memory of a device that leaves ``budget`` bytes."""
        whole = int((budget + self._taken) / (1 - RESERVE)) - 2
        while _left(whole, self._taken) < budget:
            whole += 1
        return whole

    @property
    def taken(self) -> str:
        """What is taken, in words."""
        buffers = f"a buffer of gradients {exact_bytes(self.buffers)}, " if self.buffers else ""
        inputs = f"the batch and the next one {exact_bytes(self.inputs)}, " if self.inputs else ""
        return (
            f"the model's variables take {exact_bytes(self.weights)}, the optimizer's {exact_bytes(self.slots)}, {buffers}{inputs}and "
            f"{exact_bytes(int(self.whole * RESERVE))} are kept in reserve"
        )

    def __str__(self) -> str:
        return f"device_memory={self.value!r}"


def _left(whole: int, taken: int) -> int:
    return whole - int(whole * RESERVE) - taken
