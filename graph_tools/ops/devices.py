"""The ops that run on one of several devices, as far as the graph says.

Names of devices may be partial: missing parts are taken from this process, and an op that names no
device at all may run on any. An op on a variable runs where the variable is. A graph that captures
the variable has a placeholder without a device, but the captured tensor has a device.
"""

from __future__ import annotations

import tensorflow as tf

from graph_tools.tf_private import autodiff

__all__ = ["Home"]

_PARTS = ("job", "replica", "task", "device_type", "device_index")


class Home:
    """One device, which knows the ops that run on it.

    Parameters
    ----------
    device
        Its name.

    Examples
    --------
    >>> home = Home("/device:CPU:1")
    >>> with tf.Graph().as_default():
    ...     with tf.device("/CPU:0"):
    ...         there = tf.constant(1.0)
    ...     with tf.device("/CPU:1"):
    ...         here = tf.sin(there)
    >>> home.has(here.op), home.has(there.op)
    (True, False)
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._process = tf.DeviceSpec.from_string(tf.config.list_logical_devices()[0].name)
        self._mine = self._whole(device)
        self._named: dict[str, bool] = {"": True}
        self._outer: dict[int, tf.Tensor] = {}

    def __repr__(self) -> str:
        return f"Home({self.device!r})"

    def has(self, op: tf.Operation) -> bool:
        """Return whether ``op`` runs on this device, or may."""
        name = op.device or self._of_variable(op)
        found = self._named.get(name)
        if found is None:
            pairs = zip(self._whole(name), self._mine, strict=True)
            found = all(a is None or b is None or a == b for a, b in pairs)
            self._named[name] = found
        return found

    def _of_variable(self, op: tf.Operation) -> str:
        """Return the device of the variable that is the first input of ``op``; an empty string if
        there is no variable or its device is unknown."""
        if not op.inputs or op.inputs[0].dtype != tf.resource:
            return ""
        handle = op.inputs[0]
        while tf.is_symbolic_tensor(handle) and handle.op.type == "Placeholder":
            if id(handle) not in self._outer:
                # TensorFlow lists the captures anew at each access.
                pairs = autodiff.captures_of(handle.graph)
                self._outer.update((id(inner), outer) for outer, inner in pairs)
            if (outer := self._outer.get(id(handle))) is None:
                return ""
            handle = outer
        return str(handle.device or "")

    def _whole(self, name: str) -> tuple[str | int | None, ...]:
        """Return the parts of a device's name, with missing parts taken from this process."""
        spec, process = tf.DeviceSpec.from_string(name), self._process
        default = {"job": process.job or "localhost"}
        default |= {part: getattr(process, part) or 0 for part in ("replica", "task")}
        parts = ((part, getattr(spec, part)) for part in _PARTS)
        return tuple(default.get(part) if value is None else value for part, value in parts)
