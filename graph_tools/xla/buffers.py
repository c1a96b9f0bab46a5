"""Read XLA's buffer assignment: allocations, live ranges, and what is alive at the peak.

XLA gives every value of a program a place in an allocation, and writes down from which instruction
to which one the value is alive. Temporaries of a program share one allocation. Its size is their
peak, and a little more where the values do not fit together without gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from graph_tools.xla.hlo import Module

__all__ = ["Allocation", "Assignment", "Live", "Peak", "Value", "parse"]

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)")
_PLACE = re.compile(r"^    (\d+):(\S+)$")
_RANGE = re.compile(r"^    (\S+):(\d+)-(\d+)$")
_TEMPORARY = "preallocated-temp"


@dataclass(frozen=True)
class Value:
    """One value in an allocation.

    Attributes
    ----------
    name
        Of the instruction that makes it, with the index in braces where that makes a tuple.
    bytes, offset
        Its size and place.
    """

    name: str
    bytes: int
    offset: int

    @property
    def instruction(self) -> str:
        """The name of the instruction that makes it."""
        return self.name.partition("{")[0]


@dataclass(frozen=True)
class Allocation:
    """Memory that several values may share, at different times; ``kind``: in XLA's own words."""

    number: int
    bytes: int
    kind: str
    values: tuple[Value, ...]

    @property
    def temporary(self) -> bool:
        """Whether the program uses it as scratch memory."""
        return self.kind.startswith(_TEMPORARY)


@dataclass(frozen=True)
class Live:
    """A value that is alive at the peak.

    Attributes
    ----------
    value
        The value.
    first, last
        Places in the schedule between which it is alive.
    op_names
        TensorFlow ops behind the instruction that makes it.
    """

    value: Value
    first: int
    last: int
    op_names: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The moment with the most bytes of temporaries, and its values, the largest first."""

    place: int
    instruction: str
    bytes: int
    values: tuple[Live, ...]


@dataclass(frozen=True)
class Assignment:
    """A buffer assignment.

    Attributes
    ----------
    allocations
        All of them.
    sequence
        Instructions in the order in which they run, those of called computations included.
    ranges
        By name of a value, the places of its first and last instruction.
    """

    allocations: tuple[Allocation, ...]
    sequence: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]

    @property
    def temporaries(self) -> int:
        """Bytes of scratch memory."""
        return sum(one.bytes for one in self.allocations if one.temporary)

    @property
    def largest(self) -> int:
        """Bytes of the largest allocation that is neither a parameter nor a constant."""
        sizes = (
            one.bytes
            for one in self.allocations
            if not one.kind.startswith(("parameter", "constant"))
        )
        return max(sizes, default=0)

    def peak(self, module: Module | None = None) -> Peak:
        """Return what is alive at the peak of temporaries, with its ops if the module is given."""
        values = [
            value
            for one in self.allocations
            if one.temporary
            for value in one.values
            if value.name in self.ranges
        ]
        alive = np.zeros(len(self.sequence) + 2, np.int64)
        # Values that share a place are one buffer: it counts once.
        for bytes_, first, last in _merged(values, self.ranges):
            alive[first] += bytes_
            alive[last + 1] -= bytes_
        alive = alive.cumsum()
        place = int(alive.argmax())
        living = [
            Live(value, first, last, module.op_names(value.instruction) if module else ())
            for value in values
            for first, last in [self.ranges[value.name]]
            if first <= place <= last
        ]
        name = self.sequence[place] if place < len(self.sequence) else ""
        living.sort(key=lambda live: (-live.value.bytes, live.first, live.value.name))
        return Peak(place, name, int(alive[place]), tuple(living))


def _merged(
    values: Iterable[Value], ranges: dict[str, tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Return the bytes and the live range of each buffer: values at one place whose ranges meet are
    one buffer."""
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for value in values:
        by_place.setdefault((value.offset, value.bytes), []).append(ranges[value.name])
    merged = []
    for (_, bytes_), found in by_place.items():
        found.sort()
        first, last = found[0]
        for begin, end in found[1:]:
            if begin > last:
                merged.append((bytes_, first, last))
                first, last = begin, end
            last = max(last, end)
        merged.append((bytes_, first, last))
    return merged


def parse(text: str) -> Assignment:
    """Return the buffer assignment that a text describes.

    Examples
    --------
    >>> assignment = parse('''BufferAssignment:
    ... allocation 0: size 32, preallocated-temp:
    ...  value: <1 a @0> (size=16,offset=0): f32[4]{0}
    ...  value: <2 b{1} @0> (size=16,offset=16): f32[4]{0}
    ...
    ... HloLiveRange (max 3):
    ...   InstructionSequence:
    ...     0:a
    ...     1:b
    ...     2:c
    ...   BufferLiveRange:
    ...     a{}:0-1
    ...     b{1}:1-2
    ... ''')
    >>> assignment.temporaries, assignment.peak().instruction, assignment.peak().bytes
    (32, 'b', 32)
    """
    allocations: list[tuple[int, int, str, list[Value]]] = []
    sequence: list[str] = []
    ranges: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        if found := _VALUE.match(line):
            if allocations:
                name = found[1].removesuffix("{}")
                allocations[-1][3].append(Value(name, int(found[2]), int(found[3])))
        elif found := _ALLOCATION.match(line):
            allocations.append((int(found[1]), int(found[2]), found[3], []))
        elif found := _PLACE.match(line):
            sequence.append(found[2])
        elif found := _RANGE.match(line):
            ranges[found[1].removesuffix("{}")] = int(found[2]), int(found[3])
    made = (
        Allocation(number, size, kind, tuple(values)) for number, size, kind, values in allocations
    )
    return Assignment(tuple(made), tuple(sequence), ranges)
