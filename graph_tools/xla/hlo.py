"""Read the text of an HLO module: computations and their instructions.

The text of an optimized module lists the instructions of each computation in the order in which
they run. An instruction of XLA carries the name of the TensorFlow op that it was made for; a fusion
carries the name of one of its ops.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Computation", "Instruction", "Module", "parse", "shape_bytes"]

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    name, opcode, shape
        As in the text; a tuple's shape is in parentheses.
    operands
        Names of the instructions that it reads.
    called
        Names of the computations that it calls.
    op_name
        The TensorFlow op behind it; empty if XLA knows of none.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str

    @property
    def bytes(self) -> int:
        """Bytes of the arrays that it makes or, for a tuple, points to."""
        return shape_bytes(self.shape)


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run; ``entry``: whether the program begins here."""

    name: str
    instructions: tuple[Instruction, ...]
    entry: bool


@dataclass(frozen=True)
class Module:
    """A module: its computations, those that are called before those that call them."""

    computations: tuple[Computation, ...]

    @property
    def entry(self) -> Computation:
        """The computation that the program begins with."""
        return next(one for one in self.computations if one.entry)

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by their names, which are unique in a module."""
        return {i.name: i for one in self.computations for i in one.instructions}

    @cached_property
    def _computations(self) -> dict[str, Computation]:
        return {one.name: one for one in self.computations}

    def op_names(self, instruction: str) -> tuple[str, ...]:
        """Return the TensorFlow ops behind an instruction, those fused into it included."""
        found = self.instructions.get(instruction)
        if found is None:
            return ()
        names = [found.op_name]
        waiting = list(found.called) if found.opcode == "fusion" else []
        while waiting:
            for inner in self._computations[waiting.pop()].instructions:
                names.append(inner.op_name)
                waiting.extend(inner.called if inner.opcode == "fusion" else ())
        return tuple(dict.fromkeys(name for name in names if name))

    def counts(self) -> dict[str, int]:
        """Return how often each opcode occurs, in fused computations too."""
        return dict(Counter(i.opcode for one in self.computations for i in one.instructions))


def parse(text: str) -> Module:
    """Return the module that a text describes.

    Examples
    --------
    >>> module = parse('''HloModule tiny, is_scheduled=true
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} tanh(%x), metadata={op_type="Tanh" op_name="layer/Tanh"}
    ... }
    ... ''')
    >>> [(i.name, i.opcode, i.bytes, i.operands, i.op_name) for i in module.entry.instructions]
    [('x', 'parameter', 16, (), ''), ('y', 'tanh', 16, ('x',), 'layer/Tanh')]
    """
    return Module(tuple(_computations(text)))


def _computations(text: str) -> Iterator[Computation]:
    name, entry, instructions = "", False, list[Instruction]()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            entry, name, instructions = head[1] is not None, head[2], []
        elif line.startswith("}"):
            yield Computation(name, tuple(instructions), entry)
        elif found := _INSTRUCTION.match(line):
            instructions.append(_instruction(found[1], line[found.end() :]))


def _instruction(name: str, rest: str) -> Instruction:
    shape = _enclosed(rest) if rest.startswith("(") else rest.split(" ", 1)[0]
    rest = rest[len(shape) :].lstrip()
    opcode = rest.split("(", 1)[0]
    operands = _enclosed(rest[len(opcode) :])
    attributes = rest[len(opcode) + len(operands) :]
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name,
        opcode,
        shape,
        tuple(_NAME.findall(operands)),
        tuple(
            called.lstrip("%").strip()
            for group in _CALLED.findall(attributes)
            for called in group.strip("{}").split(",")
        ),
        op_name[1] if op_name else "",
    )


def _enclosed(text: str) -> str:
    """Return the beginning of a text, from its parenthesis to the one that closes it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1]
    return text


def shape_bytes(shape: str) -> int:
    """Return the bytes of the arrays in a shape.

    Examples
    --------
    >>> shape_bytes("f32[8,5,5]{2,1,0}"), shape_bytes("(pred[], bf16[3]{0}, token[])")
    (800, 7)
    """
    return sum(
        math.ceil(_bits(dtype) * math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d) / 8)
        for dtype, dims in _ARRAY.findall(shape)
    )


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    number = _BITS.search(dtype)
    return int(number[0]) if number else 0
