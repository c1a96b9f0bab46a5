"""Ways to keep a tensor other than as it is: smaller, or elsewhere.

A residual that is neither kept nor recomputed is *stored* when it is made, and *loaded* when the
backward pass reads it. Encodings store it in fewer bytes on the same device; offloading stores it
on another one. Here are the numbers that planners compare: what is done to tensors is the business
of :mod:`memsaving_gradients.capture.encodings`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["OFFLOAD", "Stored"]

#: The means that is no encoding.
OFFLOAD = "offload"


class Stored(NamedTuple):
    """How a value is stored, and what that costs.

    Attributes
    ----------
    value
        The value.
    means
        The name of an encoding, or ``"offload"``.
    bytes
        What stays on the device until the value is loaded for the last time.
    store_seconds, load_seconds
        Estimated time that the device's processor takes, once and for each load.
    moving_seconds
        Estimated time of a transfer, either way; transfers go on beside computations, one after the
        other.
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
