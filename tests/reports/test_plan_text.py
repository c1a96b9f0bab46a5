"""The text of a plan when it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.memory.bfc_allocator import Buffers
from memsaving_gradients.schedules.simulate import Simulation
from tests.helpers.greedy import greedy

v1 = tf.compat.v1
KILO = 1024


def buffers(*sizes: int) -> Buffers:
    """Return buffers that are alive together."""
    return np.zeros(len(sizes), np.int64), np.ones(len(sizes), np.int64), np.array(sizes)


def simulation(size: int, worst: int) -> Simulation:
    """Return a simulation of two orders: ``size`` bytes in the best, ``worst`` in the other."""
    return Simulation(np.array([size]), size, buffers(size), other_orders=(buffers(worst),))


def plan(**fields: Any) -> ms.Plan:
    known: dict[str, Any] = {
        "mode": "budget",
        "decisions": (),
        "peak_plain": 200 * KILO,
        "peak": 100 * KILO,
        "extra_time": 0.04,
        "clones": 26,
        "checkpoints": (),
        "gating": "control",
        "planner": "auto",
        "simulation_plain": simulation(200 * KILO, 210 * KILO),
        "simulation": simulation(100 * KILO, 116 * KILO),
    }
    return ms.Plan(**{**known, **fields})


def lines(text: object) -> list[str]:
    return str(text).splitlines()


def test_first_come_chunks_of_those_that_fractions_are_of() -> None:
    found = plan(budget=120 * KILO, lower_bound=0.03)
    assert (found.allocated, found.allocated_plain) == (116 * KILO, 200 * KILO)
    assert lines(found)[:3] == [
        (
            "plan 'budget': 118,784 bytes (116.00 KiB) in the allocator's chunks, 58 % of plain"
            " training's 204,800; extra time about 4 %, 26 ops run again"
        ),
        (
            "budget 122,880 bytes (120.00 KiB, 0.6 of plain): 4,096 left; planner 'auto': at most"
            " 1.0 % of a step above the least extra time (3.0 %)"
        ),
        "simulated peak 102,400 bytes asked for, plain 204,800; activations 0, plain 0",
    ]
    assert repr(found) == "<Plan 'budget': 116.00 KiB of 200.00 KiB, 26 ops run again>"


def test_under_xla_there_is_one_buffer() -> None:
    found = plan(gating="data")
    assert (found.allocated, found.allocated_plain) == (100 * KILO, 200 * KILO)
    assert "in one buffer of XLA, 50 % of" in str(found)


def test_what_a_budget_leaves() -> None:
    assert "(100.00 KiB, 0.5 of plain): NOT KEPT, 16,384 over; planner 'auto'" in str(
        plan(budget=100 * KILO)
    )
    ample = plan(
        budget=2**30, clones=0, extra_time=0.0, simulation=simulation(200 * KILO, 200 * KILO)
    )
    assert "100 % of plain training's 204,800; nothing is recomputed" in str(ample)
    assert "budget 1,073,741,824 bytes (1.00 GiB): 1,073,537,024 left" in str(ample)


def test_messages_name_the_same_figure() -> None:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [300, 1000])
        for k in range(8):
            y = tf.tanh(y) @ tf.ones([1000, 1000 + 100 * k]) @ tf.ones([1000 + 100 * k, 1000])
        ms.gradients(y, x, budget=0.8, planner=greedy)
        with pytest.warns(ms.errors.PlanNote) as noted:
            ms.gradients(y, x, budget="1 GiB", planner=greedy)
        with pytest.raises(ms.errors.BudgetError) as caught:
            ms.gradients(y, x, budget=0.001, planner=greedy)
    said = f"{ms.plans(graph)[0].allocated_plain:,}"
    assert f"plain training needs {said} bytes" in str(noted[0].message)
    assert f"of the {said} bytes of plain training" in str(caught.value)
    assert f"of plain training's {said};" in str(ms.plans(graph)[0])


def of_any_batch(**options: Any) -> ms.Plan:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [None, 1024])
        for _ in range(12):
            y = tf.tanh(y)
        ms.gradients(y, x, **options)
    return ms.plans(graph)[-1]


def test_batch_that_was_assumed_is_said(tmp_path: Path) -> None:
    assumed = of_any_batch()
    assert assumed.assumed_batch == 32
    assert lines(assumed)[1].endswith("; for a batch of 32, assumed: give batch_size=")
    assumed.save(tmp_path / "plan.json")
    assert ms.Plan.load(tmp_path / "plan.json").assumed_batch == 32
    assert of_any_batch(plan=tmp_path / "plan.json") == assumed


def test_batch_that_is_known_is_not_assumed() -> None:
    for known in (of_any_batch(batch_size=32), chain_plan()):
        assert known.assumed_batch is None
        assert "batch" not in str(known)


# --- the table


def decision(tensor: str, size: int = 4096, **fields: Any) -> ms.Decision:
    known = {"fate": "keep", "reason": "checkpoint 1", "op_type": "Tanh", "source": ""}
    return ms.Decision(tensor, size, **{**known, **fields})


def table(*decisions: ms.Decision) -> list[str]:
    found = lines(plan(decisions=decisions))
    return found[found.index(next(line for line in found if line.startswith("kept"))) + 1 :]


def test_equal_bytes_are_in_the_order_of_numbers() -> None:
    shown = table(*(decision(f"net/block_{k}/Tanh:0") for k in (10, 2, 1)), decision("net/x:0", 1))
    assert [line.split()[2] for line in shown[1:]] == [
        "block_1/Tanh:0",
        "block_2/Tanh:0",
        "block_10/Tanh:0",
        "x:0",
    ]


def test_scope_of_all_is_said_once() -> None:
    shown = table(decision("a/b/c:0"), decision("a/b/d/c:0"))
    assert "tensor in a/b/ " in shown[0]
    assert not any("a/b" in line for line in shown[1:])
    assert "tensor  " in table(decision("a/b:0"), decision("c:0"))[0]


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    long = "x" * 60
    shown = table(
        decision("a:0", 5_000_000, source="/far/a.py:1"),
        decision(
            long, 7, fate="recompute", reason="a reason that is rather long", source="/far/b.py:2"
        ),
    )
    assert shown[0].index("source") == shown[1].index("/far/a") == shown[2].index("/far/b")
    assert shown[0].index("reason") == shown[1].index("checkpoint") == shown[2].index("a reason")
    assert shown[1].index("5,000,000") == 0
    assert long not in shown[2] and "…xxx" in shown[2]


def test_sources_below_the_working_folder_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, beside = f"{tmp_path}/models/a.py:3", f"{tmp_path}s/b.py:4"
    shown = table(decision("a:0", source=inside), decision("b:0", source=beside))
    assert shown[1].endswith("  models/a.py:3")
    assert shown[2].endswith(f"  {beside}")


def test_no_table_of_nothing() -> None:
    assert lines(plan())[-1].startswith("kept 0 residuals")


def chain_plan(**options: Any) -> ms.Plan:
    with tf.Graph().as_default() as graph:
        x = y = v1.placeholder(tf.float32, [4096])
        for k in range(12):
            y = tf.tanh(y, name=f"layer{k}")
            if k == 5:
                y = ms.checkpoint(y, name="middle")
            if k == 8:
                ms.checkpoint(y)
        ms.gradients(y, x, **options)
    return ms.plans(graph)[-1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"checkpoints": "collection"}, "marked"),
        ({"budget": 0.6, "planner": greedy}, "marked"),
        ({"checkpoints": ["middle", "layer8"]}, "named"),
    ],
    ids=["collection", "budget", "list"],
)
def test_reason_of_what_the_user_chose(options: dict[str, Any], word: str) -> None:
    reasons = {d.tensor: d.reason for d in chain_plan(**options).decisions}
    assert reasons["layer5:0"] == f"{word} 'middle'"
    assert reasons["layer8:0"] == word


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"planner": "chain"}, "planner 'chain', no limit: "),
        ({"max_slowdown": 1.3, "planner": greedy}, "plan 'slowdown', planner 'greedy': "),
        ({"checkpoints": ["layer5"]}, "plan 'named', 1 checkpoint: "),
        ({"checkpoints": "memory"}, "plan 'memory': "),
    ],
    ids=lambda options: "-".join(options) if isinstance(options, dict) else "",
)
def test_title(options: dict[str, Any], title: str) -> None:
    assert str(chain_plan(**options)).startswith(title)


@pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")
def test_title_without_checkpoints() -> None:
    found = chain_plan(checkpoints=None)
    assert str(found).startswith("plan 'named', no checkpoints: ")
    assert {d.reason for d in found.recomputed} == {"from the inputs"}


def test_activations_are_what_backward_reads_recomputed_or_not() -> None:
    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [KILO])
        for _ in range(16):
            y = tf.tanh(y)
        for checkpoints in (["Tanh_3"], ["Tanh_11"]):
            ms.gradients(y, x, checkpoints=checkpoints)
    tensor = 4 * KILO
    early, late = ms.plans(graph)
    assert early.activations_plain == late.activations_plain == 16 * tensor
    # Tanh_3 to Tanh_15; Tanh_0 to Tanh_10, while Tanh_11 is not alive any more.
    assert early.activations == 13 * tensor
    assert late.activations == 11 * tensor
