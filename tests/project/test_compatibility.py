"""The benchmark of other people's networks: the rows it lists, the rows it measures again, and one
small row from end to end."""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

from benchmarks import measuring
from benchmarks.__main__ import main
from benchmarks.markdown import wrapped
from benchmarks.networks import build
from benchmarks.zoo import compatibility, sizes
from benchmarks.zoo import families as foreign
from benchmarks.zoo.compatibility import due, measure
from benchmarks.zoo.page import failures, page
from graph_tools.memory import measure as graph_measure
from graph_tools.memory.measure import in_fresh_process
from tests.helpers.fresh import fresh

ROW = "applications/MobileNetV2"
#: In a network of 3 MB, chance decides whether one peak is within 45 % of another.
SMALL = {"side": 32, "batch": 16, "alpha": 0.35}
INSTEAD = {"model": "mlp", "options": {"depth": 12, "batch": 512, "width": 32}}


def made(peak: int = 40, *, refused: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the results of a row whose peak is within 45 % of 100 bytes."""
    same = {"equal": True, "differ": [], "error": 0.0, "count": 3}
    budget = {
        "ours": {"peak": peak, "plan": {"budget": 44, "extra_time": 0.1}},
        "refused": refused,
        "allowed": 45,
        "time": None,
    }
    return {
        "plain": {"peak": 100},
        "default": {"peak": 30},
        "budgets": {"45%": budget},
        "failed": {},
        "gradients": [{**same, "parameters": 7, "inputs": [[2, 3], [2]]}],
        "code": "new",
        **more,
    }


def test_all_architectures_of_keras_applications_are_listed() -> None:
    """Compare with the modules of Keras' package: each has functions that build a network, and no
    other function takes weights."""
    import keras.src.applications as package

    built = set()
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith(("_test", "_utils")):
            continue
        source = __import__(f"keras.src.applications.{module.name}", fromlist=["_"])
        for name, value in vars(source).items():
            if inspect.isfunction(value) and name[0].isupper():
                parameters = inspect.signature(value).parameters
                if {"weights", "include_top"} <= set(parameters) and hasattr(
                    keras.applications, name
                ):
                    built.add(f"applications/{name}")
    assert len(built) >= 38
    # The package does not export bases of families (ResNet, MobileNetV3, …), which are no networks.
    assert set(foreign.rows("applications/*")) == built


def test_list_prints_names_and_a_glob_that_matches_nothing_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--list", "--only", "compatibility/applications/VGG*"]) == 0
    rows = [f"compatibility/applications/VGG{layers}" for layers in (16, 19)]
    assert capsys.readouterr().out.split() == rows
    assert main(["--only", "compatibility/applications/LeNet*"]) == 2
    assert "matches no row" in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    family = foreign.Family("hub", "no_such_library")
    monkeypatch.setitem(foreign.FAMILIES, "hub", family)
    with pytest.raises(foreign.MissingLibraryError, match=r"no_such_library.*\[models\]"):
        foreign.rows("hub/*")
    assert foreign.rows("applications/VGG16") == ["applications/VGG16"]


def test_what_is_there_is_not_measured_again_unless_the_code_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compatibility, "code_version", lambda: "new")
    one = {"budgets": [0.45]}
    assert not due(made(code="old"), one, False) and due(made(code="old"), one, True)
    assert not due(made(), one, False) and not due(made(), one, True)


def test_missing_budgets_are_measured_but_none_below_a_refused_one() -> None:
    refused = {"budget": 44, "least": 60, "fraction": 0.6}
    more, least = made(), made(refused=refused)
    for budgets, wanted in (([0.45, 0.4], [True, False]), ([0.6, 0.45], [True, True])):
        assert [due(row, {"budgets": budgets}, False) for row in (more, least)] == wanted


def test_a_row_fails_that_takes_more_than_its_budget_or_has_other_gradients() -> None:
    assert failures(made()) == []
    assert "the step took 45 bytes of a budget of 44" in failures(made(45))[0]
    assert failures(made(failed={"40%": "no cycle\nis allowed"})) == ["40%: is allowed"]
    other = made()
    other["gradients"][0] |= {"equal": False, "differ": ["kernel"], "error": 0.25}
    assert "2.5e-01 of the largest gradient (kernel" in failures(other)[0]
    other["spread"] = [{"equal": True}]
    assert failures(other) == []


@pytest.mark.parametrize(("layers", "batch"), [(200, 8), (40, 16), (5, 32)])
def test_the_batch_grows_until_activations_count(layers: int, batch: int) -> None:
    """Each layer has 64 outputs and 4096 weights. The batch gives eight times as many outputs as
    weights."""
    made = [keras.layers.Dense(64) for _ in range(layers)]
    assert sizes.batch_for(keras.Sequential([keras.Input([64]), *made])) == batch


def instead(target: str, kwargs: dict[str, Any], env: Any) -> Any:
    """Call ``target`` in a forked process, for a smaller network, with data as JSON carries it."""
    found = fresh(target, json.loads(json.dumps({**kwargs, **INSTEAD})))
    return json.loads(json.dumps(found, default=graph_measure._plain))


def test_a_row_is_the_network_of_its_name() -> None:
    network = build("foreign", row=ROW, **SMALL)
    assert network.name == "MobileNetV2" and len(network.variables) > 100
    assert [part.shape for part in network.batch] == [(16, 32, 32, 3), (16,)]


@pytest.mark.parametrize(
    ("processes", "count", "seconds"),
    [(instead, 10, 1.0), pytest.param(in_fresh_process, 100, 60.0, marks=pytest.mark.slow)],
    ids=["instead", "itself"],
)
def test_one_small_row_from_end_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: Callable[..., Any],
    count: int,
    seconds: float,
) -> None:
    """The row is written after it is measured, read again, and not measured a second time."""
    calls = []

    def small(row: str, shares: Any, **how: Any) -> dict[str, Any]:
        calls.append(row)
        return measure(row, shares, sizes=SMALL, **how)

    monkeypatch.setattr(compatibility, "measure", small)
    monkeypatch.setattr(compatibility, "PLANNING_SECONDS", seconds)
    monkeypatch.setattr(measuring, "in_fresh_process", processes)
    said = ["--only", f"compatibility/{ROW}", "--set", "budgets=0.45"]
    said += ["--json", str(tmp_path / "page.json")]
    assert main(said) == 0
    assert main(said) == 0
    assert calls == [ROW]
    result = json.loads((tmp_path / "page.json").read_text())["cases"][ROW]
    assert [found["equal"] for found in result["gradients"]] == [True, True]
    assert result["gradients"][0]["state"]
    assert result["gradients"][0]["count"] > count
    budget = result["budgets"]["45%"]
    assert 0 < budget["ours"]["peak"] <= budget["ours"]["plan"]["budget"]
    assert result["default"]["peak"] < result["plain"]["peak"]
    text = (tmp_path / "page.md").read_text()
    lacking = text[text.index("**Not") : text.index("## `")]
    assert wrapped(page({ROW: result})) in text.replace(lacking, "")
    assert "| MobileNetV2 |" in text
    assert "1 of 1 pass" in text
