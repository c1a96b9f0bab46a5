"""Plans and explanations as one HTML file: headline numbers, figures and sortable tables.

The page loads no other file: figures are inline SVG, and the style follows the reader's choice of
dark or light. A few lines of JavaScript sort the tables; without it, rows stay in order of bytes.
All text from the user's program (names, reasons, source lines) is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path

from memsaving_gradients.budget import exact_bytes, format_bytes, format_share
from memsaving_gradients.reports import figures
from memsaving_gradients.reports.assumptions import assumed
from memsaving_gradients.reports.explanation_values import Compiled, ExplanationValues
from memsaving_gradients.reports.figures import explanation_figure, plan_figure
from memsaving_gradients.reports.figures.drawing import check_folder
from memsaving_gradients.reports.plan_text import below_here
from memsaving_gradients.reports.plan_values import PlanValues

__all__ = ["html", "save"]

#: A table cell: a number with its displayed text, or a text alone.
Cell = tuple[float, str] | str


def save(
    path: str | os.PathLike[str], *reports: PlanValues | ExplanationValues, title: str = ""
) -> None:
    """Write a page with plans and explanations, one after the other."""
    target = check_folder(Path(path), "path")
    target.write_text(html(*reports, title=title), encoding="utf-8")


def _asset(name: str) -> str:
    """Return a file of this package as text."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def html(*reports: PlanValues | ExplanationValues, title: str = "") -> str:
    """Return the page as a string."""
    sections = "\n".join(
        _of_plan(report) if isinstance(report, PlanValues) else _of_explanation(report)
        for report in reports
    )
    shown = escape(title or "Memory of a training step")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{shown}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n"
        f"<body>\n<h1>{shown}</h1>\n{sections}\n"
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _of_plan(plan: PlanValues) -> str:
    cards = [
        ("with this plan", format_bytes(plan.allocated), f"{plan.allocated:,} bytes"),
        ("plain training", format_bytes(plan.allocated_plain), f"{plan.allocated_plain:,} bytes"),
        ("of plain", format_share(plan.allocated / max(plan.allocated_plain, 1)), ""),
        (
            "extra time",
            format_share(plan.extra_time, 1),
            f"no plan takes less than {format_share(plan.lower_bound, 1)}",
        ),
        ("ops run again", f"{plan.clones:,}", f"planner {plan.planner or plan.mode}"),
    ]
    if plan.budget is not None:
        slack = plan.budget - plan.allocated
        left = f"{format_bytes(slack)} left" if slack >= 0 else f"{format_bytes(-slack)} over"
        cards.append(("budget", format_bytes(plan.budget), left))
    rows: list[Sequence[Cell]] = [
        (
            (d.bytes, f"{d.bytes:,}"),
            d.fate,
            d.tensor,
            d.reason,
            d.op_type,
            below_here(d.source),
        )
        for d in sorted(plan.decisions, key=lambda d: -d.bytes)
    ]
    notes = [line for line in str(plan).splitlines() if line.startswith(("loop ", "attention "))]
    if plan.simulation is None:
        notes.append(
            "Read from a file, which does not contain the memory over the step: apply the plan to"
            " see it."
        )
    return "\n".join(
        [
            f"<section>\n<h2>Plan: {escape(plan_figure.headline(plan))}</h2>",
            _cards(cards),
            *_assumed(plan),
            *(f'<p class="note">{escape(note)}</p>' for note in notes),
            _figure(
                plan, "Memory over the step, what is alive at the peak, and the fate of layers"
            ),
            "<h3>Decisions</h3>",
            _table(("bytes", "fate", "tensor", "reason", "op", "source"), rows),
            "</section>",
        ]
    )


def _of_explanation(explanation: ExplanationValues) -> str:
    least, parts = explanation.least, explanation.parts
    whole = max(parts.total, 1)
    cards = [
        (
            "plain training",
            format_bytes(explanation.allocated_plain),
            f"{explanation.allocated_plain:,} bytes without variables",
        ),
        ("least budget", format_bytes(least.budget), f"{least.budget:,} bytes"),
        ("of plain", format_share(least.share), "the least budget"),
        ("extra time", format_share(least.extra_time, 1), "with the least budget"),
    ]
    cards += [
        (field.name, format_bytes(size), format_share(size / whole))
        for field in fields(parts)
        if (size := getattr(parts, field.name))
    ]
    simulated = ("simulated",) if explanation.compiled else ()
    budgets: list[Sequence[Cell]] = [
        (
            (p.budget, f"{p.budget:,}"),
            (p.share, f"{p.share:.3f}"),
            *((p.simulated or 0, f"{p.simulated:,}") for _ in simulated),
            (p.extra_time, format_share(p.extra_time, 1)),
            (p.lower_bound, format_share(p.lower_bound, 1)),
            (p.clones, f"{p.clones:,}"),
        )
        for p in explanation.curve
    ]
    layers: list[Sequence[Cell]] = [
        ((one.bytes, f"{one.bytes:,}"), one.name, below_here(one.source))
        for one in explanation.layers
    ]
    return "\n".join(
        [
            f"<section>\n<h2>{escape(explanation_figure.headline(explanation))}</h2>",
            _cards(cards),
            *_assumed(explanation),
            _figure(explanation, "Extra time of each budget, parts at the peak, largest layers"),
            "<h3>Budgets</h3>",
            _table(
                ("budget", "of plain", *simulated, "extra time", "at least", "ops run again"),
                budgets,
            ),
            *(part for step in explanation.compiled for part in _of_compiled(step)),
            "<h3>Activations by layer</h3>",
            _table(("bytes", "layer", "source"), layers),
            (
                f'<p class="note">Least budget: {exact_bytes(least.budget)}; use'
                f" gradients(..., budget={least.budget}) or a larger budget.</p>"
            ),
            "</section>",
        ]
    )


def _of_compiled(step: Compiled) -> list[str]:
    rows: list[Sequence[Cell]] = [
        ((one.bytes, f"{one.bytes:,}"), ", ".join(one.op_names), one.instruction)
        for one in step.at_peak
    ]
    return [
        f"<h3>Alive at XLA's peak of {escape(step.name)}</h3>",
        _table(("bytes", "ops", "instruction"), rows),
        f'<p class="note">XLA assigns {exact_bytes(step.assigned)}; simulated'
        f" {step.simulated:,}; compiled in {step.seconds:.1f} s.</p>",
    ]


def _assumed(found: PlanValues | ExplanationValues) -> list[str]:
    said = assumed(found)
    return [f'<p class="note">Figures are {escape("; ".join(said))}.</p>'] if said else []


def _cards(cards: Iterable[tuple[str, str, str]]) -> str:
    shown = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        + (f"<small>{escape(more)}</small>" if more else "")
        + "</dd></div>"
        for name, value, more in cards
    )
    return f'<dl class="cards">\n{shown}\n</dl>'


def _figure(report: PlanValues | ExplanationValues, label: str) -> str:
    drawn = figures.as_svg(report, f"{type(report).__name__}.save_html")
    labeled = drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
    return f"<figure>\n{labeled}</figure>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table; a column is numeric if its first cell is a number."""
    numbers = [isinstance(cell, tuple) for cell in rows[0]] if rows else [False] * len(heads)
    kinds = [' class="number"' if number else "" for number in numbers]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{escape(name)}</button></th>'
        for name, kind in zip(heads, kinds, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    value, shown = cell
    return f'<td class="number" data-value="{value}">{escape(shown)}</td>'
