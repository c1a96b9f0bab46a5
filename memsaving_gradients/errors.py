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

    # AutoGraph replaces an error raised inside of a tf.function by one of its own type, unless it
    # says this.
    ag_pass_through = True


class ArgumentError(MemorySavingError, ValueError):
    """An argument cannot be used.

    Attributes
    ----------
    argument
        Its name.
    value
        What was given.
    problem
        What is wrong with it, and the way out.
    """

    def __init__(self, argument: str, value: Any, problem: str) -> None:
        # One text, which is what others take out of an error that they wrap, as Keras does around
        # the calls of layers.
        super().__init__(f"{argument}={_show(value)}: {problem}")
        self.argument, self.value, self.problem = argument, value, problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying and pickling make the error again."""
        return type(self), (self.argument, self.value, self.problem)


class MissingExtraError(MemorySavingError, ImportError):
    """A library is not installed that only some functions need.

    Attributes
    ----------
    library
        Its name.
    extra
        What to install this package with.
    """

    def __init__(self, purpose: str, library: str, extra: str) -> None:
        super().__init__(
            f"{purpose} needs {library}, which is not installed: pip install"
            f" memsaving-gradients[{extra}]"
        )
        self.purpose, self.library, self.extra = purpose, library, extra

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying and pickling make the error again."""
        return type(self), (self.purpose, self.library, self.extra)


class VersionError(MemorySavingError, ImportError):
    """A library is older than what this package can run with.

    Attributes
    ----------
    library, version
        Its name, and which one is installed.
    oldest
        The oldest one that will do.
    """

    def __init__(self, library: str, version: str, oldest: str) -> None:
        super().__init__(
            f"{library} {version} is too old: pip install --upgrade '{library.lower()}>={oldest}'"
        )
        self.library, self.version, self.oldest = library, version, oldest

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying and pickling make the error again."""
        return type(self), (self.library, self.version, self.oldest)


class HigherOrderError(MemorySavingError, NotImplementedError):
    """Gradients of gradients are asked for where those before were built so that they have none."""


class SelectionError(ArgumentError):
    """A checkpoint names nothing, or nothing that can be a checkpoint."""


class BudgetError(ArgumentError):
    """No plan that was found fits a budget.

    Attributes
    ----------
    budget
        The budget, bytes; of a device's memory, what was left for a step.
    least
        The least budget that a plan was found for, bytes. (The message also says what device has
        it, if one was given.) Where bytes are not known before a step runs, it is for those that
        were assumed, and the message names the fraction alone.
    fraction
        The same as a fraction of what plain training takes (`Plan.allocated_plain`), rounded up: to
        be given as it stands.
    """

    def __init__(
        self, argument: str, value: Any, problem: str, budget: int, least: int, fraction: float
    ) -> None:
        super().__init__(argument, value, problem)
        self.budget, self.least, self.fraction = budget, least, fraction

    def __reduce__(self) -> tuple[Any, ...]:
        """As for any `ArgumentError`."""
        made = (self.argument, self.value, self.problem)
        return type(self), (*made, self.budget, self.least, self.fraction)


class PlanError(ArgumentError):
    """A saved plan cannot be read, or was made for another graph."""


class EagerExecutionError(MemorySavingError, RuntimeError):
    """Gradients were asked for outside of a graph, where nothing can be rewired."""


class PatchError(MemorySavingError, RuntimeError):
    """TensorFlow is patched already, or is not."""


class SolverError(MemorySavingError, RuntimeError):
    """OR-Tools does not run, or was ended while it did."""


class BatchStatisticsWarning(UserWarning):
    """Layers normalize, or losses are means, by statistics of microbatches, so that gradients are
    not those of the whole batch."""


class BudgetWarning(UserWarning):
    """Gradients keep their budget, but not with those of earlier calls in a graph of which nobody
    says when it is complete."""


class NothingSavedWarning(UserWarning):
    """Plain gradients were returned, a plan was used that lowers no peak, or no gradients were
    asked for."""


class OverflowWarning(UserWarning):
    """Most steps of an epoch were skipped, because gradients were not finite."""


class PlanningStoppedWarning(UserWarning):
    """Planning was interrupted or ran out of time; the best plan so far is used."""


class PlanNote(UserWarning):
    """Nothing is wrong, but worth knowing: plain training meets the budget, and nothing is
    recomputed; or OR-Tools could not improve a plan."""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
