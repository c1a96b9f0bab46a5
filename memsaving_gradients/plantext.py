"""A plan in words: what it takes of what plain training takes, its limits, and a table of its largest tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memsaving_gradients.units import format_bytes

if TYPE_CHECKING:
    from memsaving_gradients.plan import Plan

__all__ = ["brief", "text"]

#: Lines of the table.
MOST_LINES = 20


def text(plan: Plan) -> str:
    """The whole plan, for people to read."""
    return "\n".join([_headline(plan), *_limits(plan), _requested(plan), *_table(plan)])


def brief(plan: Plan) -> str:
    """The plan in a few words."""
    return (
        f"{plan.mode!r}: {format_bytes(plan.allocated)} of {format_bytes(plan.allocated_plain)}, "
        f"{plan.clones:,} ops run again"
    )


def _headline(plan: Plan) -> str:
    where = "in one buffer of XLA" if plan.gating == "data" else "in the allocator's chunks"
    did = f"extra time about {_percent(plan.extra_time)}, {plan.clones:,} ops run again"
    if not (plan.clones or plan.packed):
        did = "nothing is run again"
    return (
        f"plan {plan.mode!r}: {_both(plan.allocated)} {where}, "
        f"{_percent(plan.allocated / max(plan.allocated_plain, 1))} of plain training's {plan.allocated_plain:,}; {did}"
    )


def _limits(plan: Plan) -> list[str]:
    """What is to say of a budget and of the planner's certainty."""
    said = []
    if plan.budget is not None:
        said.append(_budget(plan, plan.budget))
    if plan.optimal:
        said.append(f"planner {plan.planner!r}: proven to take the least time")
    elif plan.extra_time and plan.lower_bound:
        said.append(
            f"planner {plan.planner!r}: at most {_percent(plan.gap, 1)} of a step above the least extra time "
            f"({_percent(plan.lower_bound, 1)})"
        )
    elif plan.budget is not None:
        said.append(f"planner {plan.planner!r}")
    if not plan.complete:
        said.append("planning was stopped before its end")
    limited = plan.budget is not None or plan.planned_for is not None or not plan.complete
    return ["; ".join(said)] if said and limited else []


def _budget(plan: Plan, budget: int) -> str:
    left = budget - plan.allocated
    kept = f"{left:,} left" if left >= 0 else f"NOT KEPT, {-left:,} over"
    share = budget / max(plan.allocated_plain, 1)
    # Above 1, plain training keeps it, and the share says nothing.
    of_plain = f", {share:.4g} of plain" if share <= 1 else ""
    return f"budget {budget:,} bytes ({format_bytes(budget)}{of_plain}): {kept}"


def _requested(plan: Plan) -> str:
    return f"simulated peak {plan.peak:,} bytes asked for, plain {plan.peak_plain:,}"


def _table(plan: Plan) -> list[str]:
    kept, again = plan.kept, plan.recomputed
    lines = [
        f"kept {len(kept)} residuals of {sum(d.bytes for d in kept):,} bytes, "
        f"recomputed {len(again)} of {sum(d.bytes for d in again):,}",
        f"{'bytes':>14}  {'fate':<9}  {'tensor':<48}  {'reason':<22}  source",
    ]
    largest = sorted(plan.decisions, key=lambda d: (-d.bytes, d.tensor))
    lines += [
        f"{d.bytes:>14,}  {d.fate:<9}  {_shorten(d.tensor, 48):<48}  {d.reason:<22}  {d.source}"
        for d in largest[:MOST_LINES]
    ]
    if len(largest) > MOST_LINES:
        lines.append(f"{'':>14}  … and {len(largest) - MOST_LINES} smaller ones (plan.decisions)")
    return lines


def _both(size: int) -> str:
    """Bytes, exactly and to be read."""
    return f"{size:,} bytes" + (f" ({format_bytes(size)})" if size >= 1024 else "")


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _shorten(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[len(name) - width + 1 :]
