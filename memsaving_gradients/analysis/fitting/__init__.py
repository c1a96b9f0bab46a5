"""From a memory to the settings that fit a training into it."""

from memsaving_gradients.analysis.fitting.search import fit_to as fit_to

__all__ = ["fit_to"]
