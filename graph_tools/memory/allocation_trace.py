"""What a step really asks the allocator for: every allocation of one run, with the op that made it.

A peak alone says that a simulation is wrong, not where.  TensorFlow's profiler notes each
allocation and each release, with the bytes asked for, the bytes of the chunk that was given, and
the op that was running; whether it was for an output, for scratch space (``"temp"``) or to stay
(``"persist"``) is noted, too.  Here these become one list in the order of the allocator, and
`alive_at_peak` says which buffers make the peak.  The allocator notes them under its own lock, so
that the order is exact however many threads there are.

Works where the allocator is the BFC allocator: on GPUs, and on CPUs in a process that was started
with ``TF_CPU_ALLOCATOR_USE_BFC=1`` (:func:`graph_tools.memory.measure.in_fresh_process` does).  The
profiler slows a step down by some microseconds an op; TensorFlow allows one profiler a process.
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
        Name of the op that asked for the buffer, as the runtime calls it: the name of the last op
        where several were fused.
    kind
        ``"output"``, ``"temp"`` (scratch space) or ``"persist"``; empty where the runtime does not
        say. ``"before"``: the release of a buffer that was allocated before the step.
    requested, chunk
        Bytes asked for, and bytes of the chunk that was given; negative for a release.
    seconds
        Time since the first event.
    buffer
        Number of the buffer: an allocation and its release have the same.
    running
        Requested bytes alive after the event, less those from before the step.
    allocated
        The same in chunks.
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
    """The allocations and releases of one call of ``run``, in order.

    Parameters
    ----------
    run
        A step that has run before: the first run of a graph allocates its constants.
    device
        Name of the profiler's plane: ``"/host:CPU"``, ``"/device:GPU:0"``.

    Raises
    ------
    MeasurementError
        The allocator of the device notes nothing.

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
            f"the profiler noted no allocation on {device!r}. Set TF_CPU_ALLOCATOR_USE_BFC=1 in the"
            " environment before TensorFlow is imported, or measure in a process made by"
            " in_fresh_process, which sets it."
        )
    return tuple(_paired(raw))


def requested_peak(events: Sequence[AllocationEvent]) -> int:
    """The most bytes asked for and not yet released at any time."""
    return max((event.running for event in events), default=0)


def alive_at_peak(
    events: Sequence[AllocationEvent], *, chunks: bool = False, near: float = 0.0
) -> list[AllocationEvent]:
    """The allocations that are alive when most bytes are: requested ones, or those of chunks.

    Often several moments take nearly the same; ``near`` asks for the first that takes at most this
    share less than the most.
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
    """Events with running sums; a release is given the op of its allocation."""
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
            # A buffer from before the step, such as that of a variable which gets a new one.
            op, kind, buffer = "", "before", count
            requested, chunk = -event["requested_bytes"], -event["allocation_bytes"]
            count += 1
        running, allocated = running + requested, allocated + chunk
        noted = AllocationEvent(op, kind, requested, chunk, seconds, buffer, running, allocated)
        if sign > 0:
            alive[address] = noted
        yield noted
