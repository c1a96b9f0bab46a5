"""XLA's buffer assignment: allocations, and the values alive at the peak.

XLA gives every value of a program a place in an allocation, and records when the place is taken and
released. Temporaries of a program share one allocation. Its size is their peak, and a little more
if the values do not fit together without gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graph_tools.xla.hlo import Module

__all__ = ["Allocation", "Assignment", "Live", "Peak", "assignment_of"]

Kind = Literal["argument", "constant", "stack", "result", "temporary"]

#: Fact: the kind of XLA's events in which a value releases its place; in all others it takes one.
_GIVES_BACK = 1


@dataclass(frozen=True)
class Allocation:
    """Memory that several values may share, at different times.

    Attributes
    ----------
    bytes
        Its size.
    kind
        ``"argument"`` includes results that take an argument's place, such as updated variables;
        ``"stack"`` is the stack of a thread.
    """

    bytes: int
    kind: Kind


@dataclass(frozen=True)
class Live:
    """A value that is alive at the peak: its bytes, the instruction that makes it, and the
    TensorFlow ops of that instruction."""

    bytes: int
    instruction: str
    op_names: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The moment with the most bytes of temporaries, and its values, the largest first."""

    instruction: str
    bytes: int
    values: tuple[Live, ...]


@dataclass(frozen=True)
class Assignment:
    """A buffer assignment: its allocations, and the peak of temporaries."""

    allocations: tuple[Allocation, ...]
    peak: Peak

    @property
    def temporaries(self) -> int:
        """Bytes of scratch memory."""
        return self._of("temporary")

    @property
    def results(self) -> int:
        """Bytes of the program's results, except those that take an argument's place."""
        return self._of("result")

    @property
    def transient(self) -> int:
        """Bytes that the program takes in addition to its arguments: temporaries and results."""
        return self.temporaries + self.results

    @property
    def largest(self) -> int:
        """Bytes of the largest allocation that is neither an argument nor a constant."""
        kinds = ("argument", "constant")
        return max((one.bytes for one in self.allocations if one.kind not in kinds), default=0)

    def _of(self, kind: Kind) -> int:
        return sum(one.bytes for one in self.allocations if one.kind == kind)


#: The number of an allocation, an offset in it, and a size; both in bytes.
_Place = tuple[int, int, int]


def assignment_of(proto: Any, module: Module) -> Assignment:
    """Return the assignment that a ``BufferAssignmentProto`` describes, for values of a module."""
    allocations = tuple(Allocation(one.size, _kind(one)) for one in proto.buffer_allocations)
    places = {
        part.logical_buffer_id: (one.index, part.offset, part.size)
        for one in proto.buffer_allocations
        if _kind(one) == "temporary"
        for part in one.assigned
    }
    events = [
        event
        for trace in proto.heap_simulator_traces
        for event in trace.events
        if event.buffer_id in places
    ]
    return Assignment(allocations, _peak(events, places, module))


def _kind(allocation: Any) -> Kind:
    if allocation.is_entry_computation_parameter:
        return "argument"
    if allocation.is_constant:
        return "constant"
    if allocation.is_thread_local:
        return "stack"
    return "result" if allocation.maybe_live_out else "temporary"


def _peak(events: Sequence[Any], places: Mapping[int, _Place], module: Module) -> Peak:
    most, at = 0, -1
    for number, alive in enumerate(_bytes_alive(events, places)):
        if alive > most:
            most, at = alive, number
    living: dict[int, str] = {}
    for event in events[: at + 1]:
        # An event names the instruction that makes the value.
        if event.kind == _GIVES_BACK:
            living.pop(event.buffer_id, None)
        else:
            living[event.buffer_id] = event.instruction_name
    # Of several values at one place, the newest counts.
    there = {places[number]: name for number, name in living.items()}
    found = [Live(size, name, module.op_names(name)) for (_, _, size), name in there.items()]
    found.sort(key=lambda live: (-live.bytes, live.instruction))
    return Peak(events[at].instruction_name if most else "", most, tuple(found))


def _bytes_alive(events: Iterable[Any], places: Mapping[int, _Place]) -> Iterator[int]:
    """Yield the bytes alive after each event; values at one place are one buffer, which counts
    once."""
    alive, users = 0, Counter[_Place]()
    for event in events:
        place = places[event.buffer_id]
        before = users[place]
        users[place] += -1 if event.kind == _GIVES_BACK else 1
        alive += place[2] * ((users[place] > 0) - (before > 0))
        yield alive
