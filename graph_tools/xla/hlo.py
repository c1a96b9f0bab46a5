"""Computations of an HLO module, and their instructions in the order in which they run.

An instruction of XLA has the name of the TensorFlow op that it was made for; a fusion has the name
of one of its ops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["Computation", "Instruction", "Module", "module_of"]


@dataclass(frozen=True)
class Instruction:
    """One instruction of an HLO module.

    Attributes
    ----------
    name, opcode
        As XLA writes them.
    called
        Names of the computations that it calls.
    op_name
        The TensorFlow op that it was made for; empty if XLA knows none.
    """

    name: str
    opcode: str
    called: tuple[str, ...]
    op_name: str


@dataclass(frozen=True)
class Computation:
    """A named sequence of instructions, in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Module:
    """An HLO module.

    Attributes
    ----------
    computations
        All its computations, the called ones before their callers.
    """

    computations: tuple[Computation, ...]

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by their names, which are unique in a module."""
        return {i.name: i for one in self.computations for i in one.instructions}

    @cached_property
    def _computations(self) -> dict[str, Computation]:
        return {one.name: one for one in self.computations}

    def op_names(self, instruction: str) -> tuple[str, ...]:
        """Return the TensorFlow ops of an instruction, including the ops fused into it.

        The result is empty for an instruction that the module lacks: when XLA writes its modules to
        files, it gives a module from before its passes.
        """
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


def module_of(proto: Any) -> Module:
    """Return the module that an ``HloModuleProto`` describes."""
    names = {one.id: one.name for one in proto.computations}
    by_number = {
        one.id: Instruction(
            one.name,
            one.opcode,
            tuple(names[number] for number in one.called_computation_ids),
            one.metadata.op_name,
        )
        for computation in proto.computations
        for one in computation.instructions
    }
    computations = []
    for one in proto.computations:
        # Fused computations run as one instruction, and have no schedule.
        order = proto.schedule.sequences[one.id].instruction_ids
        numbers = order or [instruction.id for instruction in one.instructions]
        computations.append(Computation(one.name, tuple(by_number[n] for n in numbers)))
    return Module(tuple(computations))
