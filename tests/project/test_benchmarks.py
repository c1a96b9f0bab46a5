"""The benchmarks' own arithmetic: bars, figures, XLA's files, the table.  Nothing is measured."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.claims import xla
from benchmarks.claims.cases import CASES, Bar, Case
from benchmarks.claims.runner import figures, simulation_errors
from benchmarks.claims.table import missed, print_results
from benchmarks.networks import SMALL, ZOO, build, small

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 9000, parameter 0, shape |f32[2048,512]| at ShapeIndex {}:
 value: <8 Arg_0.1 @0> (size=9000,offset=0): f32[2048,512]{1,0}
allocation 1: size 4, thread-local:
allocation 2: size 4096, maybe-live-out:
allocation 3: size 8192, preallocated-temp:
"""

MODULE = """\
HloModule jit_step

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %tanh.1 = f32[8]{0} tanh(%p), metadata={op_type="Tanh" op_name="tanh(x)"}
  ROOT %mul = f32[8]{0} multiply(%p, %tanh.1)
}

ENTRY %main {
  %a = f32[8]{0} parameter(0)
  %tanh.2 = f32[8]{0} tanh(%a)
  ROOT %t = (f32[8]{0}, f32[]) tuple(%a, %tanh.2)
}
"""


def result(plain: int, ours: int, **more: Any) -> dict[str, Any]:
    seconds = {"gradients": 3.0, "tensorflow": 2.0}
    case: dict[str, Any] = {
        "plain": {"peak": plain, "seconds": seconds},
        "ours": {
            "peak": ours,
            "seconds": seconds,
            "warnings": ["nothing was saved"],
            "plan": {
                "peak_plain": plain,
                "peak": ours // 2,
                "allocated_plain": plain,
                "allocated": ours // 2,
                "clones": 7,
            },
        },
        "time": None,
        **more,
    }
    return case


def test_names_of_cases_differ_and_their_networks_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.model for case in CASES} <= set(ZOO)
    assert {builder for builder, _ in SMALL.values()} <= set(ZOO)


def test_figures_of_a_chain() -> None:
    case = Case("c", "tanh_chain", {"length": 6}, bars=(Bar("units", 4),))
    found = figures(case, result(8 * 2**20, 2 * 2**20))
    assert found == {"MB": 2.097152, "peak": 0.25, "planning": 0.5, "units": 2.0}


def test_figures_under_xla_and_errors_use_the_largest_allocation() -> None:
    case = Case("x", "mlp", how="xla", instruction="tanh")
    measured = result(1024, 512)
    measured["plain"]["xla"] = {"largest": 1000, "instructions": {"tanh": 64}}
    measured["ours"]["xla"] = {"largest": 400, "instructions": {"tanh": 120}}
    found = figures(case, measured)
    assert (found["XLA's largest"], found["clones"]) == (0.4, 56.0)
    errors = simulation_errors(measured)
    assert errors == pytest.approx({"plain": 0.024, "ours": -0.36})


def test_errors_count_chunks_elsewhere() -> None:
    assert simulation_errors(result(1024, 512)) == pytest.approx({"plain": 0.0, "ours": -0.5})


def test_clones_have_a_lower_bar() -> None:
    assert Bar("clones", 1).passed(5)
    assert not Bar("clones", 1).passed(0)
    assert Bar("peak", 0.5).passed(0.5)


def test_no_plan_no_error_of_it() -> None:
    measured = result(8, 8)
    measured["ours"]["plan"] = None
    assert simulation_errors(measured) == {}


def test_table_has_a_row_for_each_bar_and_tells_misses() -> None:
    case = Case("net", "unet", bars=(Bar("peak", 0.45), Bar("planning", 0.6)))
    other = Case("other", "lstm", bars=(Bar("peak", 0.45),))
    measured = result(8 * 2**20, 6 * 2**20)
    measured["figures"] = figures(case, measured)
    measured["errors"] = simulation_errors(measured)
    results = {"net": measured, "other": {"failed": "no memory"}}
    text = io.StringIO()
    print_results([case, other], results, Console(file=text, width=140))
    assert missed([case, other], results) == ["net", "other"]
    assert text.getvalue().count("miss") == 1
    assert text.getvalue().count("pass") == 1
    assert "other failed: no memory" in text.getvalue()
    assert "net: nothing was saved" in text.getvalue()
    assert "worst 50.0% in net (ours)" in text.getvalue()


def test_xla_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "m1.cpu_after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "m1.cpu_after_optimizations.txt").write_text(MODULE)
    (tmp_path / "m0.cpu_after_optimizations.txt").write_text("ENTRY %main {\n}\n")
    assert xla.largest_allocation(tmp_path) == 8192
    counts = xla.instruction_counts(tmp_path)
    assert counts == {"parameter": 2, "tanh": 2, "multiply": 1, "tuple": 1}


def test_xla_that_wrote_nothing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--xla_dump_to"):
        xla.largest_allocation(tmp_path)


def test_unknown_networks_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"'lenet'.*'vgg'"):
        build("lenet")
    with pytest.raises(ValueError, match=r"'lenet'.*'vgg'"):
        small("lenet")
    assert main(["--only", "lenet*"]) == 2
    assert "matches no case" in capsys.readouterr().err
    assert main(["--only", "tanh*", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["tanh_chain-100", "tanh_chain-6"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("peers", ["--planner", "nope"], "nope"),
        ("peers", ["--pairs", "-1"], "-1 is less than 0"),
        ("peers", ["--parts", "memory,x"], "'x' is none of memory, exact, time"),
        ("claims.gpu", ["--device", "cpu", "--pairs", "-2"], "-2 is less than 0"),
        ("claims.first_step", ["--only", "nosuch*"], "'nosuch*' matches none of"),
        ("claims.first_step", ["--pairs", "0"], "0 is less than 1"),
        ("claims.first_step", ["--ways", "nope"], "'nope' is none of gradients, patched, budget"),
        ("claims.first_step", ["--json", "nowhere/x.json"], "nowhere is no folder"),
        ("zoo.compatibility", ["--jobs", "0"], "0 is less than 1"),
        ("papers", ["--page", "nowhere/x.md"], "nowhere is no folder"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_before_anything_is_measured(
    name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(
        f"benchmarks.{name}" + (".__main__" if name in ("peers", "papers") else "")
    ).main
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
