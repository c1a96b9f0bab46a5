"""Store residuals when they are made, and load them when the backward pass reads them.

Encoding takes plain ops. One op reads the tensor as the forward readers do, and only its result is
alive between the passes. Another op decodes it in the backward pass, behind a gate like any other
root of a run.

Offloading takes identities. The first is on the host; the tensor is sent to it as soon as it is
made. The second is on the host behind a gate, since a transfer back begins when its source is
there. The third is on the device and reads the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from graph_tools.ops.device_copies import copy_back, copy_out
from memsaving_gradients.capture.encodings import ENCODINGS
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.rewriting.fused_places import Key
from memsaving_gradients.schedules.storage import OFFLOAD, Stored

__all__ = ["Loads"]


class Loads:
    """The values stored and loaded so far; call its methods within `graphs.outside_scopes`.

    Parameters
    ----------
    step, stored
        The captured step; and, for each op whose value is stored, the way to store it.
    host
        The device that values are offloaded to.

    Attributes
    ----------
    loaded
        By op and number of the copy, the loaded tensor.
    """

    def __init__(self, step: CapturedStep, stored: Mapping[int, Stored], host: str) -> None:
        self.step, self.stored, self.host = step, stored, host
        self.loaded: dict[Key, tf.Tensor] = {}
        self._parts: dict[int, tuple[tf.Tensor, ...]] = {}

    def parts(self, op: int) -> tuple[tf.Tensor, ...]:
        """Return the tensors that are stored for the value of ``op``."""
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

    def load(self, key: Key, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the value, loaded from its parts as copy ``key``."""
        how = self.stored[key[0]]
        tensor = self.step.source.tensor(how.value)
        name = tensor.op.name + "_loaded"
        if how.means == OFFLOAD:
            self.loaded[key] = copy_back(parts[0], tensor.device, name)
        else:
            with tf.device(tensor.device), tf.name_scope(name + "/"):
                self.loaded[key] = ENCODINGS[how.means].decode(parts, tensor)
        return self.loaded[key]
