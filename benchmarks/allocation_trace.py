"""Every allocation and release of one real run of a step, with the op that asked for the buffer.

A peak alone says that a simulation is wrong, not where. TensorFlow's profiler records each
allocation and each release: the bytes requested, the bytes of the chunk, and the op that was
running. It also records the purpose: an output, scratch space (``"temp"``) or a buffer that stays
(``"persist"``). This module makes one list of these events, in the order of the allocator, and
`alive_at_peak` returns the buffers that make the peak. The allocator records the events under its
own lock, so the order is exact for any number of threads.

This works with the BFC allocator: on GPUs, and on CPUs in a process that was started with
``TF_CPU_ALLOCATOR_USE_BFC=1`` (:func:`graph_tools.memory.measure.in_fresh_process` does this). The
profiler slows a step down by some microseconds an op. TensorFlow allows one profiler a process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graph_tools.memory.measure import MeasurementError
from graph_tools.tf_private import graphs

__all__ = ["AllocationEvent", "alive_at_peak", "allocation_events", "requested_peak"]


@dataclass(frozen=True)
class AllocationEvent:
    """One allocation, or one release.

    Attributes
    ----------
    op
        Name of the op that asked for the buffer, as the runtime calls it. For fused ops, it is the
        name of the last one.
    kind
        ``"output"``, ``"temp"`` (scratch space) or ``"persist"``; empty if the runtime does not
        say. ``"before"``: the release of a buffer that was allocated before the step.
    requested, chunk
        Bytes requested, and bytes of the chunk; both negative for a release.
    seconds
        Time since the first event.
    buffer
        Number of the buffer: an allocation and its release have the same number.
    running
        Requested bytes alive after the event, minus the bytes alive before the step.
    allocated
        The same count in bytes of chunks.
    """

    op: str
    kind: str
    requested: int
    chunk: int
    seconds: float
    buffer: int
    running: int
    allocated: int


def allocation_events(
    run: Callable[[], object], *, device: str = "/host:CPU"
) -> tuple[AllocationEvent, ...]:
    """Return the allocations and releases of one call of ``run``, in order.

    Parameters
    ----------
    run
        A step that has run before: the first run of a graph allocates its constants.
    device
        Name of the profiler's plane: ``"/host:CPU"``, ``"/device:GPU:0"``.

    Raises
    ------
    MeasurementError
        The profiler recorded no allocation on the device.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = tf.ones([2**16])
    >>> step = tf.function(lambda x: tf.reduce_sum(tf.sort(x)))
    >>> _ = step(x)
    >>> requested_peak(allocation_events(lambda: step(x))) >= 2**18
    True
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        tf.profiler.experimental.start(folder)
        try:
            result = run()
            tf.test.experimental.sync_devices()
        finally:
            tf.profiler.experimental.stop()
        del result
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        raw = sorted(_raw_events(files, device), key=lambda event: event["time"])
    if not raw:
        raise MeasurementError(
            f"the profiler recorded no allocation on {device!r}. Set TF_CPU_ALLOCATOR_USE_BFC=1 in"
            " the environment before TensorFlow is imported, or measure in a process made by"
            " in_fresh_process, which sets it."
        )
    return tuple(_paired(raw))


def requested_peak(events: Sequence[AllocationEvent]) -> int:
    """Return the most bytes requested and not yet released at any time."""
    return max((event.running for event in events), default=0)


def alive_at_peak(
    events: Sequence[AllocationEvent], *, chunks: bool = False, near: float = 0.0
) -> list[AllocationEvent]:
    """Return the allocations alive at the peak of requested bytes, or with ``chunks`` of chunks.

    Often several moments have nearly the same bytes alive. The moment used is the first whose bytes
    are at most the share ``near`` below the peak.
    """

    def total(event: AllocationEvent) -> int:
        return event.allocated if chunks else event.running

    enough = (1 - near) * max(map(total, events), default=0)
    alive: dict[int, AllocationEvent] = {}
    for event in events:
        if event.requested < 0:
            alive.pop(event.buffer, None)
            continue
        alive[event.buffer] = event
        if total(event) >= enough:
            break
    return list(alive.values())


def _raw_events(files: Sequence[Path], device: str) -> Iterator[dict[str, Any]]:
    for file in files:
        for plane in graphs.profile(file.read_bytes()).planes:
            if plane.name != device:
                continue
            names = {key: data.name for key, data in plane.event_metadata.items()}
            wanted = {key: name for key, name in names.items() if name in _EVENTS}
            stats = {key: data.name for key, data in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if event.metadata_id in wanted:
                        found = {stats[s.metadata_id]: _value(s, stats) for s in event.stats}
                        found["sign"] = _EVENTS[wanted[event.metadata_id]]
                        found["time"] = line.timestamp_ns * 1000 + event.offset_ps
                        yield found


#: Fact: the names of the profiler's events, and what each does to the bytes.
_EVENTS = {"MemoryAllocation": 1, "MemoryDeallocation": -1}


def _value(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    return names[value] if kind == "ref_value" else value


def _paired(raw: Sequence[dict[str, Any]]) -> Iterator[AllocationEvent]:
    """Yield the events with running sums; each release gets the op of its allocation."""
    start = raw[0]["time"]
    alive: dict[int, AllocationEvent] = {}
    running = allocated = count = 0
    for event in raw:
        seconds = (event["time"] - start) / 1e12
        sign, address = event["sign"], event["addr"]
        if sign > 0:
            op, kind = event.get("tf_op", ""), event.get("region_type", "")
            requested, chunk, buffer = event["requested_bytes"], event["allocation_bytes"], count
            count += 1
        elif address in alive:
            born = alive.pop(address)
            op, kind, buffer = born.op, born.kind, born.buffer
            requested, chunk = -born.requested, -born.chunk
        else:
            # A buffer from before the step, such as the old buffer of an updated variable.
            op, kind, buffer = "", "before", count
            requested, chunk = -event["requested_bytes"], -event["allocation_bytes"]
            count += 1
        running, allocated = running + requested, allocated + chunk
        noted = AllocationEvent(op, kind, requested, chunk, seconds, buffer, running, allocated)
        if sign > 0:
            alive[address] = noted
        yield noted
