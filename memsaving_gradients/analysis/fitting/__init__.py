"""Settings that fit a training into the memory of a device."""

from memsaving_gradients.analysis.fitting.search import fit_to as fit_to

__all__ = ["fit_to"]
