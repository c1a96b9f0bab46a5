"""The command line of the benchmarks and its arithmetic: bars, the table of claims. Little is
measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import records, running
from benchmarks.__main__ import EXPERIMENTS, experiment, main
from benchmarks.claims import memory
from benchmarks.claims.cases import CASES, Case
from benchmarks.claims.memory import figures, judged, simulation_errors
from benchmarks.experiment import Columns, Experiment, Figure, Job, Page, Results, Setting
from benchmarks.markdown import WIDTH, wrapped
from benchmarks.networks import SMALL, ZOO, build, small
from benchmarks.tables import print_results
from graph_tools.errors import GraphToolsError


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
    case = Case("c", "tanh_chain", {"length": 6}, bars={"units": 4})
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
    case = Case("x", "mlp", bars={"clones": 1, "peak": 0.5})
    clones, peak = judged(case, {"figures": {"clones": 5.0, "peak": 0.5}})
    assert clones.passed and peak.passed
    few, much = judged(case, {"figures": {"clones": 0.0, "peak": 0.6}})
    assert not few.passed and not much.passed


def test_no_plan_no_error_of_it() -> None:
    measured = result(8, 8)
    measured["ours"]["plan"] = None
    assert simulation_errors(measured) == {}


def test_table_has_a_row_for_each_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("net", "unet", bars={"peak": 0.45, "planning": 0.6})
    monkeypatch.setattr(memory, "CASES", [case])
    monkeypatch.setattr(memory, "_CASES", {"net": case})
    measured = result(8 * 2**20, 6 * 2**20)
    measured["figures"] = figures(case, measured)
    measured["errors"] = simulation_errors(measured)
    results = {"net": measured}
    claims = memory.EXPERIMENT
    bars = claims.bars(results)
    text = io.StringIO()
    print_results(claims, results, bars, Console(file=text, width=140))
    assert [(figure.what, figure.passed) for figure in bars] == [  # type: ignore[attr-defined]
        ("net: peak", False),
        ("net: planning", True),
    ]
    assert text.getvalue().count("miss") == 1
    assert text.getvalue().count("pass") == 1
    assert "net: nothing was saved" in text.getvalue()
    assert "worst 50.0% in net (ours)" in text.getvalue()


def test_unknown_networks() -> None:
    with pytest.raises(ValueError, match=r"'lenet'.*'vgg'"):
        build("lenet")
    with pytest.raises(ValueError, match=r"'lenet'.*'vgg'"):
        small("lenet")


def test_experiments_are_declared_under_their_names() -> None:
    for name in EXPERIMENTS:
        assert experiment(name).name == name
    files = [running.results_of(experiment(name)) for name in EXPERIMENTS]
    assert len(set(files)) == len(files)


def test_rows_are_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "claims/tanh*", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["claims/tanh_chain-100", "claims/tanh_chain-6"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "lenet*"], "'lenet*' matches none of claims, first_step"),
        (["--only", "first_step/nosuch*"], "'first_step/nosuch*' matches no row of cifar_resnet"),
        (["--only", "peers", "--set", "planner=nope"], "'nope' is not one of auto"),
        (["--only", "peers", "--set", "pairs=-1"], "-1 is less than 0"),
        (["--only", "peers", "--set", "parts=memory,x"], "'x' is not one of memory, exact, time"),
        (["--only", "gpu", "--set", "pairs=-2"], "-2 is less than 0"),
        (["--only", "first_step", "--set", "pairs=0"], "0 is less than 1"),
        (["--only", "first_step", "--set", "ways=nope"], "'nope' is not one of gradients, patched"),
        (["--only", "loops", "--set", "pairs=1"], "unknown setting"),
        (["--only", "paper", "--set", "pairs=1"], "planner (name of the planner"),
        (["--json", "nowhere/x.json"], "folder nowhere does not exist"),
        (["--only", "l*", "--json", "x.json"], "one file for 3 experiments"),
        (["--only", "compatibility", "--jobs", "0"], "0 is less than 1"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


class Counted:
    """An experiment of three rows, one of which fails, and the rows that were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.experiment = Experiment(
            "counted",
            rows=lambda settings: ("a", "b", "bad", "apart"),
            run=self.run,
            columns=(Columns("of rows", "row | value", self.lines),),
            bars=lambda results: [Figure(row, one["value"], 3) for row, one in results.items()],
            settings={"value": Setting(2, int, "of each row")},
            apart=("apart",),
            page=Page("counted.md", lambda results: ", ".join(results)),
        )
        monkeypatch.setattr(command, "EXPERIMENTS", {"counted": ""})
        monkeypatch.setattr(command, "experiment", lambda name: self.experiment)

    def run(self, job: Job) -> dict[str, Any]:
        self.ran.append(job.row)
        if job.row == "bad":
            raise GraphToolsError("no memory")
        return {"value": job.settings["value"]}

    @staticmethod
    def lines(results: Results) -> list[tuple[str, str]]:
        return [(row, str(result["value"])) for row, result in results.items()]


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Counted(monkeypatch)
    where = ["--json", str(tmp_path / "r.json")]
    assert main(["--only", "counted/a", *where]) == 0
    assert main(["--only", "counted/[ab]", *where]) == 0
    assert counted.ran == ["a", "b"]
    # A row that failed is measured again.
    for _ in range(2):
        assert main(where) == 1
        assert "counted/bad failed: no memory" in capsys.readouterr().out
    assert counted.ran == ["a", "b", "bad", "bad"]
    assert (tmp_path / "r.md").read_text() == "a, b"
    # With --again all named rows are measured; "a" misses its bar now.
    assert main(["--only", "counted/a*", "--again", "--set", "value=4", *where]) == 1
    assert counted.ran[4:] == ["a", "apart"]
    assert main(["--only", "counted/b", *where]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert {row: result.get("value") for row, result in found["cases"].items()} == {
        "a": 4,
        "apart": 4,
        "b": 2,
    }
    assert found["figures"][0] == {
        "what": "a",
        "value": 4,
        "limit": 3,
        "percent": False,
        "count": 1,
        "passed": False,
    }


def test_a_row_that_fails_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    records.write(path, {"bad": {"value": 1}})
    Counted(monkeypatch)
    assert main(["--only", "counted/bad", "--again", "--json", str(path)]) == 1
    # The command shows what was measured.
    assert "│ bad" not in capsys.readouterr().out
    assert records.read(path)["bad"]["value"] == 1


def test_several_experiments_write_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(command, "EXPERIMENTS", {"one": "", "two": ""})
    monkeypatch.setattr(command, "experiment", lambda name: replace(counted.experiment, name=name))
    assert main(["--only", "*/a", "--json", str(tmp_path / "results")]) == 0
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        "one.json",
        "one.md",
        "two.json",
        "two.md",
    ]


def test_prose_is_wrapped_and_tables_and_code_are_not() -> None:
    words, row = "word " * 40, "| " + "cell | " * 40
    code, link = "`" + "a b " * 10 + "c`", "[" + "a b " * 10 + "c](page.md#a-part)"
    kept = ["# " + words, row, "<!-- " + words + "-->", "```sh", words, "- " + words, "```", ""]
    prose = [words, words, "- " + words, "  " + words, "  1. " + words]
    lines = wrapped("\n".join([*kept, *prose])).split("\n")
    assert lines[: len(kept)] == kept
    filled = lines[len(kept) :]
    assert max(map(len, filled)) <= WIDTH
    assert [line.partition("word")[0] for line in filled] == (
        [""] * 4 + ["- "] + ["  "] * 4 + ["  1. "] + ["     "] * 2
    )
    for whole in (code, link):
        for before in range(30):
            text = wrapped("word " * before + whole + " word" * 30)
            assert whole in text and wrapped(text) == text
    # A number that ends a sentence does not begin a list.
    for before in range(30):
        assert "\n15. " not in wrapped("word " * before + "is 15. A word - " + words)


@pytest.mark.parametrize("name", ["compatibility", "papers", "peers", "users"])
def test_committed_pages_are_wrapped(name: str) -> None:
    one = experiment(name)
    assert one.page is not None
    text = (command.DOCS / one.page.file).read_text(encoding="utf-8")
    assert wrapped(text) == text


def test_what_a_machine_lacks_is_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Counted(monkeypatch)
    lacking = replace(counted.experiment, missing=lambda settings, glob: "no device")
    monkeypatch.setattr(command, "experiment", lambda name: lacking)
    assert main(["--json", str(tmp_path / "r.json")]) == 3
    assert capsys.readouterr().out == "counted: no device\n" and not counted.ran


def test_results_of_old_files_are_read_and_not_rewritten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that every committed file of results has rows, bars and a table."""
    for name in EXPERIMENTS:
        one = experiment(name)
        path = running.results_of(one)
        if not path.exists():
            continue
        before = path.read_bytes()
        results = records.read(path)
        assert one.bars(results), name
        print_results(one, results, one.bars(results), Console(file=io.StringIO(), width=190))
        assert running.measure(one, [], path) == {}
        assert path.read_bytes() == before
