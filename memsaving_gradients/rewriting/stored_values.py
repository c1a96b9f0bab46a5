"""Storing residuals when they are made, and loading them when the backward pass reads them.

Encoding is plain ops: an op beside the forward readers, whose result is all that is alive between
the passes, and one in the backward pass that decodes it, behind a gate like any other root of a
run.

Offloading is identities: one on the host, which the tensor is sent to as soon as it is made; one on
the host that stands behind a gate, for a transfer back begins when what it sends is there; and one
on the device that reads this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graph_tools.ops.device_copies import copy_back, copy_out
from memsaving_gradients.capture.encodings import ENCODINGS
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.schedules.storage import OFFLOAD, Stored

__all__ = ["Loads"]


class Loads:
    """What was stored and loaded so far; call within `graphs.outside_scopes`.

    Parameters
    ----------
    step, stored
        The captured step, and for ops whose value is stored, how.
    host
        The device that values are offloaded to.

    Attributes
    ----------
    loaded
        By op and number of the copy, what was loaded.
    """

    def __init__(self, step: CapturedStep, stored: Mapping[int, Stored], host: str) -> None:
        self.step, self.stored, self.host = step, stored, host
        self.loaded: dict[tuple[int, int], tf.Tensor] = {}
        self._parts: dict[int, tuple[tf.Tensor, ...]] = {}

    def parts(self, op: int) -> tuple[tf.Tensor, ...]:
        """What is kept of the value of ``op``."""
        if op not in self._parts:
            how = self.stored[op]
            tensor = self.step.source.tensor(how.value)
            if how.means == OFFLOAD:
                out = copy_out(tensor, self.host, tensor.op.name + "_offloaded")
                self._parts[op] = (out,)
            else:
                with tf.device(tensor.device), tf.name_scope(f"{tensor.op.name}_{how.means}/"):
                    self._parts[op] = ENCODINGS[how.means].encode(tensor)
        return self._parts[op]

    def load(self, key: tuple[int, int], parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The value again, as copy ``key``, from its parts."""
        how = self.stored[key[0]]
        tensor = self.step.source.tensor(how.value)
        name = tensor.op.name + "_loaded"
        if how.means == OFFLOAD:
            self.loaded[key] = copy_back(parts[0], tensor.device, name)
        else:
            with tf.device(tensor.device), tf.name_scope(name + "/"):
                self.loaded[key] = ENCODINGS[how.means].decode(parts, tensor)
        return self.loaded[key]
