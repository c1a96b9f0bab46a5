"""`largest_batch`: the largest batch that fits into a memory, found without running a step, and
proven by running one if wanted.

The bytes that a step needs grow linearly with the batch, except for jumps where a kernel, a plan or
the size of a chunk changes. So the search guesses a batch from two known needs, and traces the step
for it. Then it makes the plan of least memory (the one that an error about a budget would name). It
ends when a batch fits and the next larger one does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from graph_tools.memory.measure import (
    EndedBySignalError,
    MeasurementError,
    in_fresh_process,
    measure_peak,
)
from memsaving_gradients import patching
from memsaving_gradients.analysis.study import MOST_PROOFS, Study, asked, function_of
from memsaving_gradients.budget import (
    DeviceMemory,
    exact_bytes,
    format_share,
    is_integer,
    parse_bytes,
)
from memsaving_gradients.capture.unknown_sizes import unknown_steps
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError, BudgetError
from memsaving_gradients.planners.proposal import SMALLER

__all__ = ["LargestBatch", "largest_batch"]

#: The largest batch to try: nobody trains with more examples.
MOST_EXAMPLES = 2**20

Make = Callable[[int], tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes
    ----------
    batch
        Examples.
    budget
        Bytes that a step may take in addition to variables.
    need
        The least budget for this batch, bytes.
    extra_time
        Estimated extra time within that budget, as a fraction of the plain step's time.
    plain
        The largest batch that fits without recomputation; 0: none does.
    measured
        Bytes that a step with this batch took; ``None``: no step was run.
    """

    batch: int
    budget: int
    need: int
    extra_time: float
    plain: int
    measured: int | None = None

    def __str__(self) -> str:
        proven = "" if self.measured is None else f"; a step took {exact_bytes(self.measured)}"
        return (
            f"largest batch: {self.batch} (plain: {self.plain}), which needs"
            f" {exact_bytes(self.need)} of {self.budget:,}, with {format_share(self.extra_time)}"
            f" more time at the least budget{proven}"
        )


@tf.autograph.experimental.do_not_convert
def largest_batch(
    make: Make,
    *,
    budget: int | str | None = None,
    device_memory: int | str | None = None,
    start: int = 8,
    prove: bool = False,
    **options: Any,
) -> LargestBatch:
    """Return the largest batch with which a training step fits into a memory. No step is run,
    except to prove the result.

    Parameters
    ----------
    make
        A function of a batch size that returns a training step and its arguments, as for
        `memsaving_gradients.explain`: ``(step, (x, y))``. Arguments may be tensor specs.
    budget
        Bytes that a step may take in addition to variables.
    device_memory
        The memory of a device: variables and a reserve are subtracted. Give one of the two.
    start
        The first batch to try.
    prove
        Whether to run a step with this batch in a process of its own, within the budget, on a
        device with just ``device_memory``. If that fails, smaller budgets and their batches are
        tried (`LargestBatch.budget` is the one that worked). ``make`` must be a function of a
        module that can be imported.
    **options
        As for `memsaving_gradients.explain`.

    Raises
    ------
    BudgetError
        If not even one example fits. The error names the least budget.
    MeasurementError
        If no batch near the largest one can be run.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> def make(batch):
    ...     def step(x):
    ...         y = x
    ...         for _ in range(16):
    ...             y = tf.sin(y)
    ...         return tf.gradients(y, x)
    ...     return step, (tf.TensorSpec([batch, 1024]),)
    >>> found = ms.largest_batch(make, budget="1 MB")
    >>> found.plain < found.batch
    True
    """
    if (budget is None) == (device_memory is None):
        raise ArgumentError(
            "budget", budget, "give a budget in bytes or device_memory, and not both"
        )
    if not is_integer(start, 1, MOST_EXAMPLES):
        raise ArgumentError(
            "start", start, f"give a number of examples from 1 to {MOST_EXAMPLES:,}"
        )
    if not isinstance(prove, bool):
        raise ArgumentError("prove", prove, "give True or False")
    if prove:
        _target(make)
    search = _Search(make, budget, device_memory, asked(options))
    plain = search.run(int(start), lambda trial: trial.plain)
    best = search.run(max(int(start), plain), lambda trial: trial.need)
    if not best:
        raise search.nothing_fits()
    return search.proven(best, plain) if prove else search.found(best, plain)


class _Trial:
    """A step traced for one batch."""

    def __init__(self, study: Study, budget: int) -> None:
        self.budget = budget
        self.plain = study.plain_budget
        self._study: Study | None = study

    @property
    def need(self) -> int:
        """The least budget, bytes."""
        return min(self.plain, self._least[0])

    @property
    def extra_time(self) -> float:
        """The extra time within that budget, as a fraction of the plain step's time."""
        return self._least[1] if self._least[0] < self.plain else 0.0

    @cached_property
    def _least(self) -> tuple[int, float]:
        assert self._study is not None
        study, found = self._study, self._study.least()
        # Release the study: graphs are large.
        self._study = None
        if found is None:
            return self.plain, 0.0
        return found.need, study.extra_time(found.proposal)


class _Search:
    """A search for the largest batch, and the steps that it has traced so far."""

    def __init__(
        self,
        make: Make,
        budget: int | str | None,
        device_memory: int | str | None,
        options: Options,
    ) -> None:
        self.make, self.options = make, options
        self.budget = None if budget is None else parse_bytes(budget, "budget")
        self.device_memory = device_memory
        self.trials: dict[int, _Trial] = {}
        self.share = 1.0

    def run(self, start: int, need_of: Callable[[_Trial], int]) -> int:
        """Return the largest batch that fits; 0: not even one example does."""
        needs: dict[int, int] = {}
        fits, above, batch = 0, MOST_EXAMPLES + 1, start
        while True:
            trial = self._trial(batch)
            needs[batch] = need_of(trial) - self.allowed(trial)
            if needs[batch] <= 0:
                fits = batch
            else:
                above = batch
            if above <= fits + 1 or fits == MOST_EXAMPLES:
                return fits
            if len(needs) > 1 and len(set(needs.values())) == 1:
                raise ArgumentError(
                    "make",
                    self.make,
                    "returns steps that need the same bytes for batches of"
                    f" {' and '.join(map(str, needs))}; the shapes of the arguments that it"
                    " returns must have the batch size in them",
                )
            batch = _guess(needs, fits, above)

    def allowed(self, trial: _Trial) -> int:
        """Return the bytes that a step may take."""
        return int(trial.budget * self.share)

    def found(self, batch: int, plain: int, measured: int | None = None) -> LargestBatch:
        """Return the result for a batch."""
        trial = self.trials[batch]
        budget = self.allowed(trial)
        return LargestBatch(batch, budget, trial.need, trial.extra_time, plain, measured)

    def proven(self, batch: int, plain: int) -> LargestBatch:
        """Return the first batch with which a step runs, with a smaller and smaller share of the
        memory as its budget: holes between chunks may take the rest."""
        for proof in range(MOST_PROOFS):
            self.share = SMALLER**proof
            fits = self.run(batch, lambda trial: trial.need) if proof else batch
            if not fits:
                break
            batch = fits
            budget = self.allowed(self.trials[batch])
            steps = self.options.loop_steps
            measured = _measured(self.make, batch, budget, self.device_memory, steps)
            if measured is not None and measured <= budget:
                return self.found(batch, plain, measured)
        raise MeasurementError(
            f"no step could be run in {self.budget or self.device_memory!r}, not even with {batch}"
            f" examples and a budget of {budget:,} bytes; check whether anything else takes memory"
            " of the device"
        )

    def nothing_fits(self) -> BudgetError:
        """Return the error for a device on which no batch fits."""
        batch, trial = min(self.trials.items())
        many = "1 example needs" if batch == 1 else f"{batch} examples need"
        return BudgetError(
            "budget" if self.device_memory is None else "device_memory",
            self.budget if self.device_memory is None else self.device_memory,
            f"no batch fits: {many} {exact_bytes(trial.need)}, and {trial.budget:,} bytes are"
            " available; use a larger device or a smaller model",
            trial.budget,
            trial.need,
            1.0,
        )

    def _trial(self, batch: int) -> _Trial:
        if batch not in self.trials:
            study = Study(*_made(self.make, batch), self.options)
            if study.assumes_batch:
                raise ArgumentError(
                    "make",
                    self.make,
                    "returns a step of unknown shapes; the shapes of the arguments that it returns"
                    " must have the batch size in them",
                )
            guessed = list(study.site.guessed_loops)
            if guessed:
                raise unknown_steps(guessed[0].name)
            budget = self.budget
            if budget is None:
                assert self.device_memory is not None
                budget = DeviceMemory(self.device_memory, *study.variables).left
            self.trials[batch] = _Trial(study, budget)
        return self.trials[batch]


def _made(make: Make, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the step and the arguments that ``make`` returns for a batch, checked."""
    if not callable(make):
        raise ArgumentError(
            "make",
            make,
            "is not a function; give a function that takes a batch size and returns a training"
            " step and the tuple of its arguments",
        )
    made = make(batch)
    pair = isinstance(made, (tuple, list)) and len(made) == 2
    if not pair or not isinstance(made[1], (tuple, list)):
        raise ArgumentError(
            "make",
            make,
            f"returned {type(made).__name__} for a batch of {batch}; give a function that takes a"
            " batch size and returns a training step and the tuple of its arguments:"
            " (step, (x, y))",
        )
    return made[0], tuple(made[1])


def _guess(needs: Mapping[int, int], fits: int, above: int) -> int:
    """Return a batch between the largest that fits and the next one that does not, on the line
    through the two batches nearest to the limit.

    ``needs``: for each batch tried, the bytes that it needs beyond the limit.
    """
    if len(needs) == 1:
        return min(2 * fits, MOST_EXAMPLES) if fits else max(1, above // 2)
    one, two = sorted(needs, key=lambda batch: abs(needs[batch]))[:2]
    guess = float(fits + above) / 2
    if needs[one] != needs[two]:
        guess = one - needs[one] * (two - one) / (needs[two] - needs[one])
    # Needs grow in jumps: guesses next to a known batch may be wrong again and again.
    room = (above - fits if above <= MOST_EXAMPLES else min(fits, above - fits)) // 8
    return int(min(max(guess, fits + 1 + room), above - 1 - room))


def _target(make: Any) -> str:
    """Return the ``module:name`` by which another process finds a function."""
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name or "." in name:
        raise ArgumentError(
            "make",
            make,
            "cannot be imported by the process that proves the batch; define it in a module,"
            " outside of any function, or leave out prove=True",
        )
    return f"{module}:{name}"


def _measured(
    make: Make,
    batch: int,
    budget: int,
    device_memory: int | str | None,
    loop_steps: int | None = None,
) -> int | None:
    """Return the bytes that a step takes in a process of its own, on a device of that memory;
    ``None``: the step ran out of memory."""
    request: dict[str, Any] = {"target": _target(make), "batch": batch, "budget": budget}
    request["loop_steps"] = None if loop_steps is None else int(loop_steps)
    environment = {}
    if device_memory is not None:
        request["limit"] = -(-parse_bytes(device_memory, "device_memory") // 2**20)
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(request["limit"])
    try:
        found: int | None = in_fresh_process(
            "memsaving_gradients.analysis.largest_batch:run_once", request, environment
        )
    except EndedBySignalError:
        if device_memory is None:
            raise
        # oneDNN's convolutions end the process where they get no memory (TensorFlow 2.21).
        return None
    return found


def run_once(
    target: str,
    batch: int,
    budget: int,
    limit: int | None = None,
    loop_steps: int | None = None,
) -> int | None:
    """Run a step of ``batch`` examples of zeros within ``budget``; return the bytes that it took,
    the worst of five runs.

    ``limit``: MiB of memory for the allocator, and of any GPU; the result is ``None`` if they are
    not enough. ``loop_steps``: as for `memsaving_gradients.gradients`.
    """
    for device in tf.config.list_physical_devices("GPU") if limit is not None else ():
        only = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
        tf.config.set_logical_device_configuration(device, [only])
    module, _, name = target.partition(":")
    try:
        fn, args = _made(getattr(importlib.import_module(module), name), batch)
        zeros = tf.nest.map_structure(_zeros, list(args))
        step = function_of(fn, zeros)
        with patching.patched(budget=budget, batch_size=batch, loop_steps=loop_steps):
            return measure_peak(lambda: step(*zeros)).peak
    except tf.errors.ResourceExhaustedError:
        return None


def _zeros(leaf: Any) -> Any:
    return tf.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, tf.TensorSpec) else leaf
