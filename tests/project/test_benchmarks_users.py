"""Users' programs: the smallest one is measured, and figures lead to verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.users import probes
from benchmarks.users.experiment import EXPERIMENT, PROGRAMS
from benchmarks.users.page import page
from benchmarks.users.verdicts import bars, kept, misses, simulated


def test_a_program_is_measured_and_compared() -> None:
    found = probes.measured(PROGRAMS["triplets"], {"budget": 0.7}, compare=True)
    (plan,) = found["plans"]
    assert plan["allocated"] <= plan["budget"] < plan["allocated_plain"]
    assert 0 < found["peak"] == max(found["peaks"]) and len(found["peaks"]) == probes.STEPS
    assert found["different"] == ""


def test_rows_are_modes_of_programs() -> None:
    assert "SAM/50 %" in EXPERIMENT.rows({})


def cell(peak: int, budget: int | None = 100, **more: Any) -> dict[str, Any]:
    """Return a cell whose plan promises 90 bytes."""
    names = {"whole_step": None, "margin": 0.05, "allocated": 90}
    plans = [] if budget is None else [{**names, "budget": budget}]
    figures = {"peak": peak, "plans": plans, "warnings": [], "different": "", "seconds": 1.0}
    return {**figures, "refused": [], **more}


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (cell(100), "yes"),
        (cell(101), "no"),
        (cell(1001, warnings=["BudgetWarning: the step may take 1,001 (1 kB)"]), "said"),
        (cell(1002, warnings=["BudgetWarning: the step may take 1,001 (1 kB)"]), "no"),
        (cell(140, budget=None), "yes"),
        (cell(141, budget=None), "no"),
    ],
)
def test_budgets_are_kept_or_announced(result: dict[str, Any], verdict: str) -> None:
    assert kept(result, {"peak": 200}, 0.7) == verdict


def test_the_rest_of_a_step_is_part_of_the_promise() -> None:
    result = cell(100)
    assert simulated(result) == 90
    result["plans"][0]["whole_step"] = 105
    assert simulated(result) == 100


def test_bars_and_page_name_what_is_missed() -> None:
    good, bad = cell(92, budget=100), cell(120, different="the gradient of 'w': all")
    results = {"SAM/plain": cell(200), "SAM/70 %": good, "SAM/50 %": bad}
    results["SAM/default"] = {"failed": {"error": "it\ncrashed"}, "refused": []}
    figures = {figure.what: figure for figure in bars(results)}
    assert figures["budgets broken"].value == figures["other results"].value == 1
    assert figures["cells that failed"].value == 1
    assert figures["simulated against measured peak, most under"].value == pytest.approx(0.25)
    assert misses(good, "70 %") == [] and len(misses(bad, "50 %")) == 3
    text = page(results)
    assert "| SAM | 70 % | 0.0 |" in text and "crashed" in text
