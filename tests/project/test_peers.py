"""The comparison with TensorFlow's and Keras' own ways: a tiny network goes through all of it, and
cells get their verdicts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from benchmarks import measuring
from benchmarks.__main__ import main
from benchmarks.claims import gpu
from benchmarks.experiment import Job
from benchmarks.networks import build, small
from benchmarks.peers import cells, page, variants
from benchmarks.peers import experiment as side_by_side
from benchmarks.peers.lines import added_lines, code_lines
from benchmarks.peers.networks import NETWORKS, PEERS, peers_of
from graph_tools.memory import measure
from graph_tools.tf_private.config import function_config
from tests.helpers.fresh import fresh
from tests.helpers.optimized import optimized_nodes

#: For networks so small that plain training meets the budget, or that nothing can be saved.
told_and_no_more = pytest.mark.filterwarnings(
    "ignore::memsaving_gradients.errors.BudgetWarning",
    "ignore::memsaving_gradients.errors.PlanNote",
    "ignore::memsaving_gradients.errors.NothingSavedWarning",
)

ENCODER = {"layers": 2, "batch": 2, "length": 4, "width": 8, "heads": 2, "vocabulary": 8}


def here(target: str, kwargs: Mapping[str, Any], env: Mapping[str, str | None]) -> Any:
    """Call ``target`` in this process, with data as JSON carries it. Peers that configure a process
    get a process of their own."""
    given = json.loads(json.dumps(kwargs))
    module, _, function = target.partition(":")
    if "grappler" in str(kwargs.get("way", "")):
        found = fresh(target, given)
    else:
        found = getattr(importlib.import_module(module), function)(**given)
    return json.loads(json.dumps(found, default=measure._plain))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(measuring, "in_fresh_process", here)
    monkeypatch.setattr(side_by_side, "PLANS", tmp_path / "plans")
    return tmp_path


TINY = replace(
    NETWORKS["tiny"],
    options={"depth": 8, "batch": 256, "width": 16},
    ways={"2 layers": {"ends": r"dense(1|3|5)"}},
)


@pytest.fixture(params=["smaller", pytest.param("tiny", marks=pytest.mark.slow)])
def pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how often to compare times, for the test network or for a smaller one of one kind."""
    if request.param == "smaller":
        monkeypatch.setattr(gpu, "KINDS", gpu.KINDS[:1])
        monkeypatch.setitem(NETWORKS, "tiny", TINY)
    return "1" if request.param == "smaller" else "2"


@pytest.mark.slow
@told_and_no_more
@pytest.mark.usefixtures("exact")
def test_a_tiny_network_goes_through_all_variants(in_this_process: Path, pairs: str) -> None:
    file, text = in_this_process / "peers.json", in_this_process / "peers.md"
    options = ["--only", "peers/tiny", "--json", str(file)]
    options += ["--set", "planner=chain", "--set", f"pairs={pairs}"]
    assert main(options) in (0, 1)
    case = json.loads(file.read_text())["cases"]["tiny"]
    peers = peers_of(NETWORKS["tiny"])
    assert set(case["peers"]) == set(peers)
    for peer in case["peers"].values():
        assert peer["peak"] > 0
        assert "memory" in peer["times"]
        assert peer["exact"]["gradient"] < 1e-5
        assert case["ours"][peer["at_time"]]["peak"] > 0
        assert peer["at_memory"] in case["ours"]
    timed = [set(ours["times"]) for ours in case["ours"].values() if "times" in ours]
    assert {"memory"} in timed and {"time"} in timed
    measured = [ours for ours in case["ours"].values() if "peak" in ours]
    assert measured
    assert all(ours["exact"].get("equal", "refused" in ours["exact"]) for ours in measured)
    assert any(ours["exact"].get("equal") for ours in measured)
    for peer in peers.values():
        assert f"| {peer.title} |" in text.read_text()
    # Known results are not measured again.
    before = file.read_text()
    assert main(options) in (0, 1)
    assert json.loads(before)["cases"]["tiny"]["ours"] == case["ours"]


def test_unknown_networks() -> None:
    assert main(["--only", "peers/lenet"]) == 2


def test_peers_are_there_for_every_network() -> None:
    for network in NETWORKS.values():
        assert len(peers_of(network)) == len(network.ways) + len(PEERS)


def test_recomputed_dropout_is_found_out(exact: None) -> None:
    """``tf.recompute_grad`` has the trap that the page warns of: another mask in the gradient."""

    def numbers(made: tuple[Any, variants.Gradients]) -> dict[str, Any]:
        network, gradients = made
        *inputs, labels = map(tf.constant, network.batch)
        loss, grads = tf.function(gradients)(tuple(inputs), labels)
        arrays = {f"gradient {i}": tf.convert_to_tensor(g).numpy() for i, g in enumerate(grads)}
        return {"loss": loss.numpy(), **arrays}

    def make() -> Any:
        return build("encoder", **ENCODER)

    plain = numbers(variants.plain(make))
    peer = numbers(variants.recompute_encoder(make, r"layer\d_out"))
    ours = numbers(variants.ours(make))
    assert cells.verdict(cells.differences(plain, peer)).startswith("wrong: gradients off by")
    assert cells.verdict(cells.differences(plain, ours)) == "bit for bit"


def test_options_of_grappler_hold_inside_only() -> None:
    """Grappler's memory optimizer makes copies, under a name of its own, in a process that is not
    configured for it."""

    def copies() -> int:
        nodes = optimized_nodes(lambda: step(x, y))
        return sum(node.name.startswith("Recomputed/") for node in nodes)

    network, gradients = variants.plain(lambda: small("unet"))
    x, y = map(tf.constant, network.batch)
    step = tf.function(gradients)
    with function_config(variants.grappler_config("RECOMPUTATION_HEURISTICS")):
        assert copies() > 0
    assert copies() == 0


def plain_code(x: int) -> int:
    y = x + 1
    return y


def other_code(x: int) -> int:
    """With a docstring."""
    y = x + 1
    # And a comment.
    z = max(
        y,
        2,
    )
    return z


def test_lines_are_statements_that_were_added_or_changed() -> None:
    assert code_lines(other_code) == ["y = x + 1", "z = max(y, 2)", "return z"]
    assert added_lines(other_code, to=plain_code) == 2
    assert added_lines(other_code, plain_code, to=plain_code) == 3
    assert added_lines(plain_code, to=plain_code) == 0
    assert added_lines(variants.ours, to=variants.plain) == 2


def times(ratio: float, control: float = 1.0) -> dict[str, Any]:
    return {"memory": {"ratio": ratio, "control": control, "pairs": 15}}


def case(**ours: Any) -> dict[str, Any]:
    exact = {"equal": True, "gradient": 0.0, "state": 0.0}
    peer = {"peak": 50, "exact": exact, "times": times(1.2), "at_memory": "budget=50"}
    return {
        "title": "a network",
        "titles": {"peer": "the peer"},
        "plain": {"peak": 100},
        "lines": {"ours": 2, "peer": 7},
        "peers": {"peer": peer},
        "ours": {"budget=50": {"exact": exact, "plan": None, **ours}},
    }


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        ({"peak": 50, "times": times(1.1)}, []),
        ({"peak": 50, "times": times(1.23)}, []),
        ({"peak": 50, "times": times(1.3)}, ["net, peer: time at its memory / its time"]),
        ({"peak": 50, "times": times(1.3, 1.05)}, []),
        (
            {"peak": 52, "times": times(1.1)},
            ["net, peer: memory at its memory / its memory"],
        ),
        ({"refused": {"least": 60}}, ["net, peer: least memory / its memory"]),
    ],
)
def test_cells_are_judged(ours: dict[str, Any], missed: list[str]) -> None:
    figures = cells.judge({"net": case(**ours)})
    assert [figure.what for figure in figures if not figure.passed] == missed
    text = page.text({"net": case(**ours)}, figures)
    assert ("✗" in text.split("## a network")[1]) == bool(missed)


@pytest.mark.parametrize(
    ("by_memory", "by_time", "shown"),
    [
        ((40, 1.1), (45, 1.2), "✓ 0.0 MB (1.100 against 1.200 ± 0.000) †"),
        ((40, 1.3), (45, 1.2), "✓ 0.0 MB (1.200 against 1.200 ± 0.000)"),
        ((48, 1.1), (45, 1.2), "✓ 0.0 MB (1.200 against 1.200 ± 0.000)"),
        ((48, 1.1), (30, 1.3), "✓ 0.0 MB (1.100 against 1.200 ± 0.000) †"),
        ((48, 1.4), (30, 1.3), "✗ 0.0 MB (1.300 against 1.200 ± 0.000)"),
        ((50, 1.4), (60, 1.1), "✗ 0.0 MB (1.100 against 1.200 ± 0.000)"),
    ],
)
def test_our_memory_at_its_time_is_the_least_that_was_measured_to_be_as_fast(
    by_memory: tuple[int, float], by_time: tuple[int, float], shown: str
) -> None:
    found = case(peak=by_memory[0], times=times(by_memory[1]))
    peer = found["peers"]["peer"]
    peer["at_time"] = "max_slowdown=1.2"
    peer["times"]["time"] = times(1.2)["memory"]
    found["ours"]["max_slowdown=1.2"] = {
        "peak": by_time[0],
        "times": {"time": times(by_time[1])["memory"]},
    }
    figures = cells.judge({"net": found})
    judged = [figure for figure in figures if "memory at its time" in figure.what]
    judged += [figure for figure in figures if "time at its time" in figure.what]
    assert all(figure.passed for figure in judged) == shown.startswith("✓")
    assert f" | {shown} |" in page.text({"net": found}, figures)


def test_failures_of_peers_stand_in_their_cells() -> None:
    found = case(peak=50)
    found["peers"]["peer"] = {"failed": "ValueError: a | b"}
    text = page.text({"net": found}, cells.judge({"net": found}))
    assert "| the peer |  |  |  | 7 | fails: ValueError: a / b |  |  |" in text


def test_what_saves_nothing_is_compared_once() -> None:
    found = case()
    found["peers"] = {"a": {"peak": 99}, "b": {"peak": 50}, "c": {"peak": 101}, "d": {"failed": ""}}
    bench = side_by_side.Bench(Job("tiny", known=found))
    assert bench._groups() == [["b"], ["a", "c"]]


@told_and_no_more
def test_the_table_of_a_gpu_runs_on_a_cpu(in_this_process: Path, pairs: str) -> None:
    file = in_this_process / "gpu.json"
    settings = ("device=cpu", "planner=chain", f"pairs={pairs}")
    given = [word for setting in settings for word in ("--set", setting)]
    assert main(["--only", "gpu/tiny*", "--json", str(file), *given]) in (0, 1)
    rows = json.loads(file.read_text())["cases"]
    assert set(rows) == {f"tiny-{kind}-{way}" for kind in gpu.KINDS for way in gpu.WAYS}
    assert all(row["peak"] > 0 and not row["xla"] for row in rows.values())
    assert all(bool(row["time"]) == (row["way"] != "plain") for row in rows.values())


def test_no_gpu_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    monkeypatch.setattr(measuring, "in_fresh_process", nothing)
    assert main(["--only", "gpu"]) == 3
    assert capsys.readouterr().out.count("\n") == 1
