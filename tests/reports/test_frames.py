"""Plans and explanations as data frames, and the error if pandas is missing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, MissingExtraError
from tests.helpers.reported import decision, explanation, plan


def test_a_plan_has_a_row_for_each_decision() -> None:
    made = plan(
        decisions=(
            decision("net/a/Tanh:0", 4096, source="model.py:7"),
            decision("net/b/Relu:0", 8192, fate="recompute", reason="from checkpoints"),
        )
    )
    frame = made.to_dataframe()
    assert list(frame.columns) == "tensor layer bytes fate reason op_type source".split()
    assert frame.iloc[0].tolist() == [
        "net/a/Tanh:0", "net/a", 4096, "keep", "checkpoint 1", "Tanh", "model.py:7"
    ]  # fmt: skip
    assert frame.groupby("fate")["bytes"].sum().to_dict() == {"keep": 4096, "recompute": 8192}


def test_an_empty_plan_has_an_empty_frame_of_the_same_types() -> None:
    full, empty = plan(decisions=(decision("a:0"),)).to_dataframe(), plan().to_dataframe()
    assert len(empty) == 0
    assert empty.dtypes.to_dict() == full.dtypes.to_dict()


def test_the_curve_has_a_row_for_each_budget() -> None:
    found = explanation()
    frame = found.to_dataframe()
    assert list(frame.columns) == "budget share extra_time lower_bound clones".split()
    assert frame["budget"].tolist() == [point.budget for point in found.curve]
    assert frame["extra_time"].tolist() == [point.extra_time for point in found.curve]
    assert frame["clones"].dtype == "int64"


def test_layers_and_parts_are_frames_of_their_own() -> None:
    found = explanation()
    layers, parts = found.to_dataframe("layers"), found.to_dataframe(of="parts")
    assert layers["bytes"].sum() == sum(layer.bytes for layer in found.layers)
    assert layers.iloc[0].tolist() == ["net/block_0", 3 << 20, "model.py:1"]
    assert dict(zip(parts["part"], parts["bytes"], strict=True))["activations"] == 6 << 20
    assert parts["share"].sum() == pytest.approx(1)


def test_other_frames_are_refused() -> None:
    with pytest.raises(ArgumentError, match="of='curves': give one of 'curve', 'layers', 'parts'"):
        explanation().to_dataframe("curves")


def test_without_pandas_it_is_said_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    said = r"to_dataframe needs pandas, .*: pip install memsaving-gradients\[plot\]"
    for made in (plan(), explanation()):
        with pytest.raises(MissingExtraError, match=said) as caught:
            made.to_dataframe()
    assert isinstance(caught.value, ImportError)
    assert (caught.value.library, caught.value.extra) == ("pandas", "plot")


def test_a_plan_of_a_graph_tells_what_is_alive_at_its_peak() -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = y = tf.compat.v1.placeholder(tf.float32, [4096])
        for k in range(12):
            y = tf.tanh(y, name=f"layer{k}")
        ms.gradients(y, x, checkpoints=["layer2", "layer10"])
    (made,) = ms.plans(graph)
    largest = made.at_peak
    assert {one.part for one in largest} == {"forward", "recomputed", "backward"}
    assert "layer2:0" in {one.tensor for one in largest if one.part == "forward"}
    assert all("_recomputed" in one.tensor for one in largest if one.part == "recomputed")
    # All tensors alive at the peak are large here.
    assert sum(one.bytes for one in largest) == made.peak
    assert [one.bytes for one in largest] == sorted((one.bytes for one in largest), reverse=True)
    assert all(0 <= one.first <= one.last < len(made.timeline) for one in largest)


def test_under_xla_the_planner_tells_it() -> None:
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> Any:
        y = x
        for k in range(12):
            y = tf.tanh(y, name=f"layer{k}")
        return ms.gradients(y, x, checkpoints=["layer2", "layer10"])

    step.get_concrete_function(tf.TensorSpec([4096]))
    (made,) = ms.plans(step)
    parts = {one.part for one in made.at_peak}
    assert "recomputed" in parts and "layer2:0" in {one.tensor for one in made.at_peak}
    assert sum(one.bytes for one in made.at_peak) == made.peak
