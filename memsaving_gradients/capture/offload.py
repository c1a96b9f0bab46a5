"""The device that residuals are offloaded to, and the link to it.

This is swapping to the host as in Meng et al. 2017 ("Training deeper models by GPU memory
optimization on TensorFlow"), as a rewrite of the traced graph. The device may be any that
TensorFlow can name, also one of another process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tensorflow as tf

from graph_tools.costs.links import measured_link
from graph_tools.errors import GraphError
from memsaving_gradients.budget import parse_bytes
from memsaving_gradients.errors import ArgumentError

__all__ = ["Offload"]

#: Fact: bytes per second, and seconds before the first byte, of 16 lanes of PCIe 3.
BANDWIDTH, LATENCY = 12e9, 1e-5
MEASURED = "measured"
_NUMBERS = {
    "bandwidth": "a positive number (bytes per second), or 'measured'",
    "latency": "a number of seconds, 0 or more (before a transfer begins)",
    "early": (
        "a number, 0 or more (how early a transfer back begins, in multiples of its estimated"
        " time; 0: synchronous)"
    ),
}


@dataclass(frozen=True)
class Offload:
    """The device that holds offloaded residuals, and the link to it.

    Attributes
    ----------
    device
        The name of the device, as for ``tf.device``; ``True``: the CPU of a machine that computes
        on a GPU.
    memory
        The most bytes to keep there; ``None``: no limit.
    bandwidth
        Bytes per second, either way. ``"measured"``: bandwidth and latency are measured when the
        first step is planned.
    latency
        Seconds before a transfer begins.
    early
        How long before a tensor is needed its transfer back begins, in multiples of the estimated
        transfer time (earlier, if other transfers follow). Give more than 1 if transfers turn out
        to be slower. 0: synchronous transfers. They begin when a tensor is needed, and the forward
        pass waits for transfers out. That needs the least memory, and hides no transfer.

    Examples
    --------
    >>> Offload("/job:host/device:CPU:0", bandwidth=1e9).seconds(500_000_000)
    0.50001
    """

    device: str | bool = True
    memory: int | str | None = None
    bandwidth: float | str = BANDWIDTH
    latency: float = LATENCY
    early: float = 1.0

    def __post_init__(self) -> None:
        if self.device is not True and not isinstance(self.device, str):
            raise _problem(self.device, "give True, or the name of a device, such as '/CPU:0'")
        if self.memory is not None:
            parse_bytes(self.memory, "memory")
        for name, what in _NUMBERS.items():
            value = getattr(self, name)
            if name == "bandwidth" and value == MEASURED:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf") or (name == "bandwidth" and not value):
                raise ArgumentError(name, value, f"give {what}")

    @property
    def limit(self) -> int | None:
        """The most bytes on the other device; ``None``: no limit."""
        return None if self.memory is None else parse_bytes(self.memory, "memory")

    def seconds(self, size: int) -> float:
        """Return the estimated seconds of a transfer of ``size`` bytes. A bandwidth to be measured
        must have been measured before."""
        assert not isinstance(self.bandwidth, str)
        return self.latency + size / self.bandwidth

    def measured(self) -> Offload:
        """Return the same with numbers: measure the link if ``bandwidth`` is ``"measured"``.

        Raises
        ------
        ArgumentError
            If the link cannot be measured here.
        """
        if self.bandwidth != MEASURED:
            return self
        known = [device.name for device in tf.config.list_logical_devices()]
        try:
            link = measured_link(_full(_home(known)), self.name())
        except GraphError as error:
            raise ArgumentError(
                "bandwidth", MEASURED, f"{error}; give the bytes per second, such as 12e9"
            ) from None
        return replace(self, bandwidth=link.bandwidth, latency=link.latency)

    def name(self, computing: str = "") -> str:
        """Return the full name of the device.

        Parameters
        ----------
        computing
            The device that ops were placed on, as far as it was named; empty: the device that they
            run on by default.

        Raises
        ------
        ArgumentError
            If there is no such device, or it is the one that computes.
        """
        known = [device.name for device in tf.config.list_logical_devices()]
        home = _merged(_home(known), _local(computing, known))
        if self.device is True and "GPU" not in home and "TPU" not in home:
            raise _problem(
                True,
                f"all ops run on {home} here, which already uses the host's memory; name another"
                " device, such as one of another process in a cluster",
            )
        try:
            wanted = _local("/device:CPU:0" if self.device is True else str(self.device), known)
            full = _merged(home, wanted)
        except ValueError as error:
            raise _problem(self.device, f"is not the name of a device: {error}") from None
        if wanted.device_type is None:
            raise _problem(
                self.device, "names no device; give a type and number as well: '/device:CPU:0'"
            )
        names = [_full(name) for name in known]
        # The devices of a session's cluster are not known here.
        if full not in names and (tf.inside_function() or not wanted.job):
            raise _problem(self.device, f"there is no such device; devices are {', '.join(known)}")
        if full == home:
            raise _problem(self.device, "is the device that computes; name another one")
        return full


def _home(known: list[str]) -> str:
    """Return the default device of ops: the first accelerator of this process, or its CPU."""
    local = tf.DeviceSpec.from_string(known[0])
    mine = [
        name
        for name in known
        if (spec := tf.DeviceSpec.from_string(name)).job == local.job and spec.task == local.task
    ]
    return next((name for name in mine if "CPU" not in name), mine[0])


def _local(name: str, known: list[str]) -> tf.DeviceSpec:
    """Return a device as this process names it. Where its devices have no job, drop the job
    ``localhost``, which devices of tensors have: a cluster of one task."""
    spec = tf.DeviceSpec.from_string(name)
    if tf.DeviceSpec.from_string(known[0]).job is None and spec.job == "localhost":
        spec = spec.replace(job=None, replica=None, task=None)
    return spec


def _merged(name: str, over: tf.DeviceSpec) -> str:
    return str(tf.DeviceSpec.from_string(name).make_merged_spec(over).to_string())


def _full(name: str) -> str:
    return tf.DeviceSpec.from_string(name).to_string()


def _problem(value: object, problem: str) -> ArgumentError:
    return ArgumentError("offload", value, problem)
