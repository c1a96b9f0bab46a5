"""The options of a gradient computation, checked once and passed on as one value."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np

from memsaving_gradients.budget import DeviceMemory, parse_budget
from memsaving_gradients.capture.encodings import ENCODINGS
from memsaving_gradients.capture.offload import Offload
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.planners import PLANNERS
from memsaving_gradients.reports.plan import Plan
from memsaving_gradients.transforms.loops.selection import WAYS

__all__ = ["ATTENTION", "ENCODE", "MODES", "USUAL_BATCH", "Options", "check_one_of"]

#: Ways to choose checkpoints automatically.
MODES = ("auto", "memory", "speed", "collection")

#: Ways to treat scaled dot-product attention: keep it as it is, or compute it in blocks wherever it
#: is found.
ATTENTION = ("keep", "blocks")

#: Ways to encode residuals; all but the first lose digits.
ENCODE = ("lossless", *ENCODINGS)

#: Fact: larger batches would overflow the bytes of tensors, and more steps their counters.
MOST_EXAMPLES = 10**9
#: The batch size (examples) assumed for an unknown batch dimension if the user gives none.
USUAL_BATCH = 32


@dataclass(frozen=True)
class Options:
    """The options for saving memory.

    Attributes
    ----------
    checkpoints
        One of `MODES`; or tensors, operations, names or glob patterns of names; or ``None`` (or
        an empty list) to recompute everything from the inputs.
    hold_gradients
        Whether gradients stay alive until all of them are made (global norm clipping, loss
        scaling). Affects planning only.
    xla
        Whether the graph is compiled by XLA; ``None`` finds out from the function being traced.
    batch_size
        The size of an unknown batch dimension when bytes are estimated; ``None``: 32, but a budget
        in bytes needs it.
    loop_steps
        The most steps of loops that do not show their number before they run; ``None``: 256, but a
        budget in bytes needs it.
    budget
        The most bytes of a step's transient peak: an int, a string with a unit, or a float, a
        fraction of plain training's bytes; or a `DeviceMemory`, for the bytes that it leaves. Under
        XLA: the most bytes that XLA assigns to the step.
    planner
        The planner: one of `memsaving_gradients.planners.PLANNERS`, or a function of a training
        graph and limits.
    max_slowdown
        The most time of a step, as a multiple of the plain step's estimated time; within it, the
        plan of least memory is chosen.
    accumulate
        Whether sums of many addends are added up as the addends come.
    profile
        Whether times of ops are measured on this device instead of estimated.
    plan
        Plans to apply instead of planning; a tuple, once checked.
    progress
        The receiver of reports on planning: ``None`` (a bar in a terminal), ``False`` (none), or a
        function.
    planning_seconds
        The most time to plan; ``None``: as long as it takes.
    loops
        The way to treat loops: ``"auto"`` or one of
        `memsaving_gradients.transforms.loops.selection.WAYS`.
    attention
        The way to treat attention: one of `ATTENTION`.
    encode
        ``None``, one of `ENCODE`, or a mapping from tensors, names or glob patterns to encodings.
    offload
        The device for offloaded residuals: ``None`` (none), ``True``, the name of a device, or an
        `Offload`; once checked, ``None`` or an `Offload`.

    Examples
    --------
    >>> Options(checkpoints="memory").checkpoints
    'memory'
    >>> Options(checkpoints="memroy")
    Traceback (most recent call last):
        ...
    memsaving_gradients.errors.ArgumentError: checkpoints='memroy': unknown mode; did you mean \
'memory'? Modes are 'auto', 'memory', 'speed', 'collection'; to name tensors, give a list: \
['memroy']
    """

    checkpoints: Any = "auto"
    hold_gradients: bool = False
    xla: bool | None = None
    batch_size: int | None = None
    loop_steps: int | None = None
    budget: Any = None
    planner: Any = "auto"
    max_slowdown: float | None = None
    accumulate: bool = True
    profile: bool = False
    plan: Any = ()
    progress: Any = None
    planning_seconds: float | None = None
    loops: str = "auto"
    attention: str = "keep"
    encode: Any = "lossless"
    offload: Any = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """Return options from keyword arguments that were passed on; raise an `ArgumentError` for
        an unknown one."""
        known = [field.name for field in fields(cls)]
        for name, value in keywords.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                if name == "device_memory":
                    hint = "only the Keras callback knows the variables; give budget= here. "
                raise ArgumentError(
                    name, value, f"no such option; {hint}Options are {_listed(known)}"
                )
        return cls(**keywords)

    @property
    def limit(self) -> int | float | None:
        """The budget as bytes (int) or as a fraction of plain training's bytes (float)."""
        if isinstance(self.budget, DeviceMemory):
            return self.budget.left
        return None if self.budget is None else parse_budget(self.budget)

    @property
    def asked_budget(self) -> tuple[str, Any]:
        """The name of the argument that gave the budget, and its value."""
        if isinstance(self.budget, DeviceMemory):
            return "device_memory", self.budget.value
        return "budget", self.budget

    @property
    def searches(self) -> bool:
        """Whether a planner chooses what to keep, within the user's limits."""
        return (
            self.budget is not None
            or self.max_slowdown is not None
            or not (isinstance(self.planner, str) and self.planner == "auto")
        )

    @property
    def blocks_attention(self) -> bool:
        """Whether to look for attention and compute it in blocks, as the user or a saved plan asks
        for."""
        return self.attention == "blocks" or any(plan.attention for plan in self.plan)

    @property
    def lossy(self) -> str | None:
        """The encoding of all residuals that it fits; ``None``: there is none."""
        return self.encode if isinstance(self.encode, str) and self.encode in ENCODINGS else None

    @property
    def batch(self) -> int:
        """The batch size to plan for."""
        return USUAL_BATCH if self.batch_size is None else int(self.batch_size)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", _checked(self.checkpoints))
        object.__setattr__(self, "plan", _loaded(self.plan))
        for name in ("hold_gradients", "accumulate", "profile"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, getattr(self, name), "give True or False")
        if self.xla is not None and not isinstance(self.xla, bool):
            raise ArgumentError("xla", self.xla, "give True, False or None (find out)")
        _check_count("batch_size", self.batch_size, "examples")
        _check_count("loop_steps", self.loop_steps, "steps")
        if self.budget is not None and not isinstance(self.budget, DeviceMemory):
            parse_budget(self.budget)
        _check_planner(self.planner)
        if self.max_slowdown is not None and not _number(self.max_slowdown, least=1.0):
            raise ArgumentError(
                "max_slowdown",
                self.max_slowdown,
                "give a factor of at least 1.0: 1.2 lets a step take 20 % more time than plain"
                " training",
            )
        if self.planning_seconds is not None and not (
            _number(self.planning_seconds) and self.planning_seconds > 0
        ):
            raise ArgumentError(
                "planning_seconds", self.planning_seconds, "give a positive number of seconds"
            )
        if self.progress is not None and self.progress is not False and not callable(self.progress):
            raise ArgumentError(
                "progress",
                self.progress,
                "give None (a bar in a terminal), False (nothing) or a function of (share, what)",
            )
        check_one_of("loops", self.loops, ("auto", *WAYS))
        check_one_of("attention", self.attention, ATTENTION)
        _check_encode(self.encode)
        object.__setattr__(self, "offload", _offload(self.offload))
        self._check_together()

    def _check_together(self) -> None:
        """Raise an `ArgumentError` for options that exclude one another."""
        limit, most = self.asked_budget
        if self.budget is not None and self.max_slowdown is not None:
            raise ArgumentError(
                "max_slowdown",
                self.max_slowdown,
                f"cannot be combined with {limit}={most!r}: a budget asks for the fastest plan that"
                " fits, max_slowdown for the least memory; leave one of them out",
            )
        asked = {
            name: value
            for name, value, default in (
                (limit, most, None),
                ("max_slowdown", self.max_slowdown, None),
                ("planner", self.planner, "auto"),
            )
            if value is not default and value != default
        }
        if self.plan:
            if not _is_auto(self.checkpoints):
                asked["checkpoints"] = self.checkpoints
            for name, value in asked.items():
                raise ArgumentError(
                    name,
                    value,
                    "cannot be combined with plan=, which already fixes all choices; leave one of"
                    " them out",
                )
        if asked and not _is_auto(self.checkpoints):
            name, value = next(iter(asked.items()))
            same = self.checkpoints in PLANNERS if isinstance(self.checkpoints, str) else False
            hint = f"; to plan as that mode does, use planner={self.checkpoints!r}" if same else ""
            raise ArgumentError(
                name,
                value,
                f"cannot be combined with checkpoints={self.checkpoints!r}: a planner chooses the"
                " tensors to keep here (the plan keeps marked tensors as well); leave one of them"
                f" out{hint}",
            )


def _check_count(name: str, value: Any, what: str) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= MOST_EXAMPLES):
        raise ArgumentError(name, value, f"give a number of {what} from 1 to {MOST_EXAMPLES:,}")


def _is_auto(checkpoints: Any) -> bool:
    return isinstance(checkpoints, str) and checkpoints == "auto"


def _number(value: Any, least: float = -math.inf) -> bool:
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return real and least <= value <= sys.float_info.max


def _check_planner(planner: Any) -> None:
    if callable(planner) or (isinstance(planner, str) and planner in PLANNERS):
        return
    hint = ""
    if isinstance(planner, str):
        close = difflib.get_close_matches(planner, PLANNERS, n=1)
        hint = f"unknown planner; {f'did you mean {close[0]!r}? ' if close else ''}"
    raise ArgumentError(
        "planner",
        planner,
        f"{hint}Planners are {_listed(PLANNERS)}, or a function of (TrainingGraph, Limits) that"
        " returns a Proposal",
    )


def check_one_of(argument: str, value: Any, known: Sequence[str], problem: str = "") -> None:
    """Raise an `ArgumentError` that names the closest match, after ``problem``, unless ``value`` is
    one of ``known``."""
    if isinstance(value, str) and value in known:
        return
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ArgumentError(argument, value, f"{problem}{hint}give one of {_listed(known)}")


def _offload(value: Any) -> Offload | None:
    if value is None or value is False or isinstance(value, Offload):
        return value or None
    return Offload(value)


def _check_encode(encode: Any) -> None:
    if encode is None or (isinstance(encode, str) and encode in ENCODE):
        return
    if not isinstance(encode, Mapping):
        given = "does not say which encoding to use" if encode is True else ""
        _raise_encode(encode, given)
    if not encode:
        _raise_encode(encode, "names no tensors")
    for key, how in encode.items():
        check_one_of("encode", how, [*ENCODINGS], f"cannot be used for {key!r}; ")


def _raise_encode(value: Any, problem: str) -> NoReturn:
    close = difflib.get_close_matches(str(value), [*ENCODE], n=1)
    said = problem or (
        f"no such encoding (did you mean {close[0]!r}?)" if close else "no such encoding"
    )
    raise ArgumentError(
        "encode",
        value,
        f"{said}; give 'lossless' (exact), None (nothing is encoded), one of {_listed(ENCODINGS)}"
        " (inexact), or a mapping of tensors, names or patterns to inexact encodings",
    )


def _loaded(plan: Any) -> tuple[Plan, ...]:
    """Return one plan or several, each given as a `Plan` or as the path of a file."""
    if plan is None or (isinstance(plan, tuple) and not plan):
        return ()
    if isinstance(plan, list) and not plan:
        raise ArgumentError("plan", plan, "names no plan; leave plan= out to plan again")
    single = isinstance(plan, (str, bytes, os.PathLike, Plan))
    if not single and not isinstance(plan, (list, tuple)):
        raise ArgumentError("plan", plan, "give a Plan, the path of a saved one, or a list of them")
    found = []
    for item in (plan,) if single else plan:
        if not isinstance(item, (str, os.PathLike, Plan)):
            raise ArgumentError(
                "plan", item, "give a Plan, the path of a saved one, or a list of them"
            )
        found.append(item if isinstance(item, Plan) else Plan.load(item))
    return tuple(found)


def _checked(checkpoints: Any) -> str | tuple[Any, ...]:
    if checkpoints is None:
        return ()
    if isinstance(checkpoints, str):
        if checkpoints in MODES:
            return checkpoints
        close = difflib.get_close_matches(checkpoints, MODES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ArgumentError(
            "checkpoints",
            checkpoints,
            f"unknown mode; {hint}Modes are {_listed(MODES)}; to name tensors, give a list: "
            f"[{checkpoints!r}]",
        )
    if isinstance(checkpoints, (bytes, dict)) or not isinstance(checkpoints, Iterable):
        raise ArgumentError(
            "checkpoints",
            checkpoints,
            f"give one of {_listed(MODES)}, None, or a list",
        )
    if hasattr(checkpoints, "dtype"):
        raise ArgumentError(
            "checkpoints", checkpoints, "is a single tensor; put it in a list: checkpoints=[tensor]"
        )
    return tuple(checkpoints)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
