"""A plan as text: its memory compared with plain training's, its limits, and a table of its largest
tensors."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence

from memsaving_gradients.budget import exact_bytes, format_bytes, format_share
from memsaving_gradients.reports.assumptions import assumed
from memsaving_gradients.reports.plan_values import PlanValues

__all__ = [
    "MOST_LINES",
    "NAME_WIDTH",
    "below_here",
    "brief",
    "columns",
    "common_scope",
    "natural",
    "shorten",
    "text",
]

#: Layout: lines of the table.
MOST_LINES = 20
#: Layout: letters of a tensor's name; longer names lose their beginning.
NAME_WIDTH = 48


def text(plan: PlanValues) -> str:
    """Return the whole plan as text."""
    loops = [f"loop replayed: {loop}" for loop in plan.replayed]
    return "\n".join(
        [
            _headline(plan),
            *_limits(plan),
            _requested(plan),
            *loops,
            *_attention(plan),
            *_table(plan),
        ]
    )


def _attention(plan: PlanValues) -> list[str]:
    """Return a line on attention in blocks, and one on each attention that stays as it was."""
    said = []
    if plan.attention:
        said.append(f"attention in blocks ({len(plan.attention)}): {', '.join(plan.attention)}")
    return said + [f"attention kept: {name}: {why}" for name, why in plan.attention_kept]


def brief(plan: PlanValues) -> str:
    """Return the plan in a few words."""
    return (
        f"{plan.mode!r}: {format_bytes(plan.allocated)} of {format_bytes(plan.allocated_plain)}, "
        f"{plan.clones:,} ops run again"
    )


def _headline(plan: PlanValues) -> str:
    where = "in the allocator's chunks"
    if plan.gating == "data":
        where = "as XLA assigns" if plan.assigned else "in one buffer of XLA"
    did = f"extra time about {format_share(plan.extra_time)}, {plan.clones:,} ops run again"
    stored = plan.schedule.stored if plan.schedule is not None else {}
    if not (plan.clones or plan.packed or plan.loops or stored):
        did = "nothing is recomputed"
    return (
        f"{_title(plan)}: {_both(plan.allocated)} {where},"
        f" {format_share(plan.allocated / max(plan.allocated_plain, 1))} of plain training's"
        f" {plan.allocated_plain:,}; {did}"
    )


def _title(plan: PlanValues) -> str:
    if plan.mode == "planner":
        return f"planner {plan.planner!r}, no limit"
    if plan.mode == "slowdown":
        return f"plan 'slowdown', planner {plan.planner!r}"
    if plan.mode == "named":
        count = len(plan.checkpoints)
        return f"plan 'named', {count or 'no'} checkpoint{'' if count == 1 else 's'}"
    return f"plan {plan.mode!r}"


def _limits(plan: PlanValues) -> list[str]:
    """Return a line on the budget and on how far the plan may be from the optimum."""
    said = []
    if plan.budget is not None:
        said.append(_budget(plan, plan.budget))
    if plan.optimal:
        said.append(f"planner {plan.planner!r}: proven to take the least time")
    elif plan.extra_time and plan.lower_bound:
        said.append(
            f"planner {plan.planner!r}: at most {format_share(plan.gap, 1)} of a step above the"
            f" least extra time ({format_share(plan.lower_bound, 1)})"
        )
    elif plan.budget is not None:
        said.append(f"planner {plan.planner!r}")
    if not plan.complete:
        said.append("planning was stopped before its end")
    limited = plan.budget is not None or plan.planned_for is not None or not plan.complete
    return ["; ".join(said)] if said and limited else []


def _budget(plan: PlanValues, budget: int) -> str:
    left = budget - plan.allocated
    kept = f"{left:,} left" if left >= 0 else f"NOT KEPT, {-left:,} over"
    if plan.whole_step is not None:
        kept += f"; the whole step takes at most {plan.whole_step:,}"
    share = budget / max(plan.allocated_plain, 1)
    # Above 1, plain training keeps the budget, and the share says nothing.
    of_plain = f", {share:.4g} of plain" if share <= 1 else ""
    return f"budget {budget:,} bytes ({format_bytes(budget)}{of_plain}): {kept}"


def _requested(plan: PlanValues) -> str:
    guess = "; ".join(["", *assumed(plan)])
    return (
        f"simulated peak {plan.peak:,} bytes asked for, plain {plan.peak_plain:,}; "
        f"activations {plan.activations:,}, plain {plan.activations_plain:,}{guess}"
    )


def _table(plan: PlanValues) -> list[str]:
    kept, again = plan.kept, plan.recomputed
    lines = [
        f"kept {len(kept)} residuals of {sum(d.bytes for d in kept):,} bytes, "
        f"recomputed {len(again)} of {sum(d.bytes for d in again):,}"
    ]
    for fate, done in (("encode", "encoded"), ("offload", "offloaded")):
        if found := [d for d in plan.stored if d.fate == fate]:
            lines[0] += f", {done} {len(found)} of {sum(d.bytes for d in found):,}"
    if not plan.decisions:
        return lines
    scope = common_scope([d.tensor for d in plan.decisions])
    largest = sorted(plan.decisions, key=lambda d: (-d.bytes, natural(d.tensor)))
    rows = [
        (
            f"{d.bytes:,}",
            d.fate,
            shorten(d.tensor[len(scope) :], NAME_WIDTH),
            d.reason,
            below_here(d.source),
        )
        for d in largest[:MOST_LINES]
    ]
    lines += columns(
        [("bytes", "fate", f"tensor in {scope}" if scope else "tensor", "reason", "source"), *rows]
    )
    if len(largest) > MOST_LINES:
        lines.append(f"… and {len(largest) - MOST_LINES} smaller ones (plan.decisions)")
    return lines


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as aligned text: the first column, of numbers, right, the others left."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join(
            [row[0].rjust(first), *(cell.ljust(w) for cell, w in zip(row[1:], others, strict=True))]
        ).rstrip()
        for row in rows
    ]


def common_scope(names: Sequence[str]) -> str:
    """Return the scopes that all ``names`` share, with a slash at the end.

    Examples
    --------
    >>> common_scope(["net/block_1/a/Tanh:0", "net/block_1/b/Tanh:0", "net/block_1/Relu:0"])
    'net/block_1/'
    >>> common_scope(["block_1/Tanh:0", "block_10/Tanh:0"])
    ''
    """
    scopes = [name.split("/")[:-1] for name in names]
    level = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*scopes, strict=False))
    return "".join(f"{parts[0]}/" for parts in level)


def natural(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts numbers in names as numbers.

    Examples
    --------
    >>> sorted(["block_10/a", "block_2/b", "block_2/a"], key=natural)
    ['block_2/a', 'block_2/b', 'block_10/a']
    """
    return [(words, int(digits or 0)) for words, digits in re.findall(r"(\D*)(\d*)", name)]


def below_here(source: str) -> str:
    """Return a source line, with its file relative to the working folder if it is below that."""
    here = os.path.join(os.getcwd(), "")
    return source[len(here) :] if source.startswith(here) else source


def _both(size: int) -> str:
    """Return `exact_bytes`, or the bytes alone where both of its forms are the same."""
    return exact_bytes(size) if size >= 1024 else f"{size:,} bytes"


def shorten(name: str, width: int) -> str:
    """Return a name of at most ``width`` letters: a longer one loses its beginning."""
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
