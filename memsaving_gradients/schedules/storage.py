"""Ways to keep a tensor other than as it is: smaller, or elsewhere.

A residual that is neither kept nor recomputed is *stored* when it is made, and *loaded* when the
backward pass reads it. Encodings store it in fewer bytes on the same device; offloading stores it
on another one. This module has the numbers that planners compare;
:mod:`memsaving_gradients.capture.encodings` defines how tensors change.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["OFFLOAD", "Stored"]

#: The one means that is not an encoding.
OFFLOAD = "offload"


class Stored(NamedTuple):
    """A way to store a value, and its costs.

    Attributes
    ----------
    value
        The number of the value.
    means
        The name of an encoding, or ``"offload"``.
    bytes
        Bytes that stay on the device until the last load of the value.
    store_seconds, load_seconds
        Estimated time that the device's processor takes, once and for each load.
    moving_seconds
        Estimated time of a transfer in either direction. Transfers run in parallel with
        computations, one after the other.
    """

    value: int
    means: str
    bytes: int
    store_seconds: float
    load_seconds: float
    moving_seconds: float = 0.0

    @property
    def fate(self) -> Literal["offload", "encode"]:
        """``"encode"`` or ``"offload"``."""
        return "offload" if self.means == OFFLOAD else "encode"
