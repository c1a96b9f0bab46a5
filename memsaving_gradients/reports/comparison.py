"""Comparisons of two plans: their figures, and the tensors that they treat differently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memsaving_gradients.budget import format_share
from memsaving_gradients.reports.plan_values import Decision, PlanValues

__all__ = ["Comparison"]


@dataclass(frozen=True)
class Comparison:
    """Two plans side by side.

    Tensors of the same graph are matched by position, tensors of different graphs by name. Numbers
    at the end of a scope (``functional_14/``, ``functional_15/``: the same model, traced twice) are
    ignored where names are unique without them.

    Attributes
    ----------
    first, second
        The plans.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> with tf.Graph().as_default() as graph:
    ...     x = y = tf.compat.v1.placeholder(tf.float32, [1024])
    ...     for _ in range(16):
    ...         y = tf.tanh(y)
    ...     for mode in ("memory", ["Tanh_7"]):
    ...         grads = ms.gradients(y, x, checkpoints=mode)
    >>> several, one = ms.plans(graph)
    >>> print(several.compare(one))
                                  memory           named
    peak                          24,576          36,864
    allocated                     24,576          36,864
    ...
    """

    first: PlanValues
    second: PlanValues

    @property
    def pairs(self) -> tuple[tuple[Decision | None, Decision | None], ...]:
        """For each tensor, the decisions of both plans; ``None``: a plan has no decision on it."""
        first, second = self.first.decisions, self.second.decisions
        alike = [(d.bytes, d.op_type) for d in first] == [(d.bytes, d.op_type) for d in second]
        if self.same_graph and alike:
            return tuple(zip(first, second, strict=True))
        mine, its = {d.tensor: d for d in first}, {d.tensor: d for d in second}
        names = _same_names(list(mine.keys() - its.keys()), list(its.keys() - mine.keys()))
        known = {names.get(name, name): d for name, d in its.items()}
        return tuple((mine.get(n), known.get(n)) for n in dict.fromkeys([*mine, *known]))

    @property
    def changed(self) -> tuple[tuple[Decision | None, Decision | None], ...]:
        """The decisions on tensors that the plans treat differently, largest tensors first."""
        other = [(a, b) for a, b in self.pairs if (a and a.fate) != (b and b.fate)]
        return tuple(sorted(other, key=lambda ab: -max(d.bytes for d in ab if d is not None)))

    @property
    def same_graph(self) -> bool:
        """Whether both plans are for the same graph."""
        a, b = self.first.fingerprint, self.second.fingerprint
        return a is not None and b is not None and a.digest == b.digest

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """The lines of the table: a label, and the values of the first and the second plan."""

        def of(plan: PlanValues) -> dict[str, Any]:
            fates: Counter[str] = Counter()
            for decision in plan.decisions:
                fates[decision.fate] += decision.bytes
            return {
                "peak": f"{plan.peak:,}",
                "allocated": f"{plan.allocated:,}",
                "budget": "" if plan.budget is None else f"{plan.budget:,}",
                "extra time": format_share(plan.extra_time, 1),
                "its lower bound": format_share(plan.lower_bound, 1),
                "ops run again": f"{plan.clones:,}",
                "bytes kept": f"{fates['keep']:,}",
                "bytes recomputed": f"{fates['recompute']:,}",
            }

        one, two = of(self.first), of(self.second)
        rows = [(what, one[what], two[what]) for what in one]
        rows.append(("tensors that change", "", f"{len(self.changed):,}"))
        return tuple(rows)

    def __str__(self) -> str:
        heads = [plan.planner or plan.mode for plan in (self.first, self.second)]
        lines = [f"{'':<20}{heads[0]:>16}{heads[1]:>16}"]
        lines += [f"{what:<20}{a:>16}{b:>16}" for what, a, b in self.rows]
        if not self.same_graph:
            lines.append("the plans are for different graphs")
        return "\n".join(lines)


def _same_names(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Map names of the second plan to names of the first that differ only in the numbers at the
    ends of scopes.

    Numbers of outer scopes are dropped first: they differ when the same model is traced again.
    Numbers of inner scopes tell its parts apart.

    Examples
    --------
    >>> _same_names(["net_14/one/a", "net_14/two/a"], ["net_15/one/a", "net_15/three/a"])
    {'net_15/one/a': 'net_14/one/a'}
    """
    mine, its = ([name.split("/") for name in names] for names in (first, second))
    deepest = max((len(parts) for parts in (*mine, *its)), default=1)
    for level in range(deepest - 1):
        bare = [[_without_number(parts, level) for parts in names] for names in (mine, its)]
        if all(len(set(map(tuple, names))) == len(names) for names in bare):
            mine, its = bare
    known = {tuple(parts): name for parts, name in zip(mine, first, strict=True)}
    pairs = ((name, known.get(tuple(parts))) for parts, name in zip(its, second, strict=True))
    return {name: same for name, same in pairs if same is not None}


def _without_number(parts: list[str], level: int) -> list[str]:
    """Return a name without the number at the end of its scope at ``level``, if it has one."""
    if level >= len(parts) - 1:
        return parts
    return [*parts[:level], re.sub(r"_\d+$", "", parts[level]), *parts[level + 1 :]]
