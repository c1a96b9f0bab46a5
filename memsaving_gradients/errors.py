"""The errors and warnings of this package; each names the argument, the offending value and the way
out."""

from __future__ import annotations

from typing import Any

from graph_tools.errors import GraphToolsError

__all__ = [
    "ArgumentError",
    "BatchStatisticsWarning",
    "BudgetError",
    "BudgetWarning",
    "EagerExecutionError",
    "HigherOrderError",
    "MemorySavingError",
    "MissingExtraError",
    "NothingSavedWarning",
    "OverflowWarning",
    "PatchError",
    "PlanError",
    "PlanNote",
    "PlanningStoppedWarning",
    "SelectionError",
    "SolverError",
    "VersionError",
]


class MemorySavingError(GraphToolsError):
    """Base class of the errors of ``memsaving_gradients``."""

    # AutoGraph replaces an error raised inside of a tf.function by one of its own type, unless the
    # error has this attribute.
    ag_pass_through = True


class ArgumentError(MemorySavingError, ValueError):
    """An argument cannot be used.

    Attributes
    ----------
    argument
        The name of the argument.
    value
        The value that was given.
    problem
        Why the value cannot be used, and the way out.
    """

    def __init__(self, argument: str, value: Any, problem: str) -> None:
        # A single string: code that wraps an error takes this out of it, as Keras does around the
        # calls of layers.
        super().__init__(f"{argument}={_show(value)}: {problem}")
        self.argument, self.value, self.problem = argument, value, problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its arguments when it is copied or pickled."""
        return type(self), (self.argument, self.value, self.problem)


class MissingExtraError(MemorySavingError, ImportError):
    """A library that only some functions need is not installed.

    Attributes
    ----------
    library
        The name of the library.
    extra
        The extra of this package that installs the library.
    """

    def __init__(self, purpose: str, library: str, extra: str) -> None:
        super().__init__(
            f"{purpose} needs {library}, which is not installed: pip install"
            f" memsaving-gradients[{extra}]"
        )
        self.purpose, self.library, self.extra = purpose, library, extra

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its arguments when it is copied or pickled."""
        return type(self), (self.purpose, self.library, self.extra)


class VersionError(MemorySavingError, ImportError):
    """A library is older than the oldest version that this package supports.

    Attributes
    ----------
    library, version
        The name of the library, and its installed version.
    oldest
        The oldest supported version.
    """

    def __init__(self, library: str, version: str, oldest: str) -> None:
        super().__init__(
            f"{library} {version} is too old: pip install --upgrade '{library.lower()}>={oldest}'"
        )
        self.library, self.version, self.oldest = library, version, oldest

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its arguments when it is copied or pickled."""
        return type(self), (self.library, self.version, self.oldest)


class HigherOrderError(MemorySavingError, NotImplementedError):
    """Gradients of gradients were asked for where the first gradients cannot be differentiated."""


class SelectionError(ArgumentError):
    """An item of ``checkpoints`` or ``encode`` names no tensor that can be a checkpoint."""


class BudgetError(ArgumentError):
    """No plan that was found fits a budget.

    Attributes
    ----------
    budget
        The budget, bytes; for a device's memory, the bytes that were left for a step.
    least
        The least budget that a plan was found for, bytes. (The message also names the least device
        memory, if one was given.) Where bytes are not known before a step runs, this is a number of
        assumed bytes. The message then names the fraction alone.
    fraction
        The same as a fraction of plain training's bytes (`Plan.allocated_plain`), rounded up so
        that it works as ``budget=``.
    """

    def __init__(
        self, argument: str, value: Any, problem: str, budget: int, least: int, fraction: float
    ) -> None:
        super().__init__(argument, value, problem)
        self.budget, self.least, self.fraction = budget, least, fraction

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error, as for any `ArgumentError`."""
        made = (self.argument, self.value, self.problem)
        return type(self), (*made, self.budget, self.least, self.fraction)


class PlanError(ArgumentError):
    """A saved plan cannot be read, or was made for another graph."""


class EagerExecutionError(MemorySavingError, RuntimeError):
    """Gradients were asked for outside of a graph, where nothing can be rewired."""


class PatchError(MemorySavingError, RuntimeError):
    """TensorFlow is patched already, or is not."""


class SolverError(MemorySavingError, RuntimeError):
    """OR-Tools does not run, or was ended while it ran."""


class BatchStatisticsWarning(UserWarning):
    """Layers normalize, or losses average, by statistics of microbatches, so that gradients differ
    from the whole batch's."""


class BudgetWarning(UserWarning):
    """A step may exceed its budget: with gradients of earlier calls, in a graph that does not say
    when it is complete; or under XLA, because the budget counts simulated bytes."""


class NothingSavedWarning(UserWarning):
    """Plain gradients were returned, a plan was used that lowers no peak, or no gradients were
    asked for."""


class OverflowWarning(UserWarning):
    """Most steps of an epoch were skipped, because gradients were not finite."""


class PlanningStoppedWarning(UserWarning):
    """Planning was interrupted or ran out of time; the best plan so far is used."""


class PlanNote(UserWarning):
    """Information, no problem: for example, plain training meets the budget and nothing is
    recomputed, or OR-Tools could not improve a plan."""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
