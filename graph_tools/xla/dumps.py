"""Files that XLA writes about the modules it compiles.

XLA on the CPU takes one scratch buffer for a whole program, and TensorFlow's allocator may round
its size up to the next power of two: two programs can measure alike that are not. XLA's files have
the exact figure.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["assignment_file", "flags", "module_file"]

_MODULE = "after_optimizations.txt"
_ASSIGNMENT = "buffer-assignment.txt"


def flags(folder: str | Path) -> str:
    """Return the value of ``XLA_FLAGS`` that makes XLA write its modules to a folder.

    XLA reads the variable once: set it before TensorFlow is imported.
    """
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text"


def module_file(folder: str | Path) -> Path:
    """Return the largest optimized module in a folder.

    Raises
    ------
    FileNotFoundError
        XLA has compiled nothing, or has written it elsewhere.
    """
    return _largest(folder, _MODULE)


def assignment_file(folder: str | Path) -> Path:
    """Return the buffer assignment of the largest optimized module in a folder.

    Raises
    ------
    FileNotFoundError
        XLA has compiled nothing, or has written it elsewhere.
    """
    module = module_file(folder)
    stem = module.name.removesuffix(".txt")
    found = [file for file in _files(folder, _ASSIGNMENT) if file.name.startswith(stem)]
    return found[0] if found else _largest(folder, _ASSIGNMENT)


def _largest(folder: str | Path, ending: str) -> Path:
    return max(_files(folder, ending), key=lambda file: (file.stat().st_size, file.name))


def _files(folder: str | Path, ending: str) -> list[Path]:
    files = sorted(Path(folder).glob(f"*{ending}"))
    if not files:
        raise FileNotFoundError(
            f"no *{ending} in {folder}: set XLA_FLAGS to {flags(folder)!r} before TensorFlow is "
            "imported, and run the compiled step once"
        )
    return files
