"""What XLA made of a step: its largest allocation, and how many instructions of each kind.

XLA on the CPU takes one scratch buffer for a whole program, and TensorFlow's allocator may round
that up to the next power of two, so two programs can measure alike that are not.  The buffer
assignment that XLA writes has the figure itself.  Instructions are counted in the optimized module:
a clone that XLA has merged with its original is not there any more.

Set ``XLA_FLAGS`` to `flags` of a folder before TensorFlow is imported.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
# "  %name.1 = f32[2,3]{1,0} tanh(...)", also with a tuple as shape.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)


def flags(folder: str | Path) -> str:
    """The value of ``XLA_FLAGS`` that makes XLA write its modules to `folder`."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text"


def largest_allocation(folder: str | Path) -> int:
    """Bytes of the largest allocation of the largest module that is no parameter of it.

    Raises
    ------
    FileNotFoundError
        XLA has compiled nothing, or written it elsewhere.
    """
    sizes = [
        int(size)
        for file in _files(folder, "*buffer-assignment.txt")
        for size, kind in _ALLOCATION.findall(file.read_text(encoding="utf-8", errors="replace"))
        if not kind.startswith(("parameter", "constant"))
    ]
    return max(sizes, default=0)


def instruction_counts(folder: str | Path) -> dict[str, int]:
    """How often each opcode stands in the largest optimized module, fused computations included."""
    files = [
        file
        for file in _files(folder, "*after_optimizations.txt")
        if file.name.endswith("after_optimizations.txt")
    ]
    largest = max(files, key=lambda file: file.stat().st_size)
    return dict(Counter(_INSTRUCTION.findall(largest.read_text(encoding="utf-8"))))


def _files(folder: str | Path, pattern: str) -> list[Path]:
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise FileNotFoundError(
            f"no {pattern} in {folder}: set XLA_FLAGS to {flags(folder)!r} before TensorFlow is "
            "imported, and run the compiled step once"
        )
    return files
