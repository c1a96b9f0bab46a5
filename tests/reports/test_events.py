"""The TensorBoard events that the Keras callback writes, read back from its files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.reports import events

PNG = b"\x89PNG\r\n"


def trained(log_dir: Path, times: int = 1, **options: Any) -> ms.keras.MemorySavingGradients:
    layers = [keras.layers.Dense(64, activation="gelu", name=f"dense_{k}") for k in range(8)]
    model = keras.Sequential([keras.Input([64]), *layers])
    model.compile("sgd", "mse")
    saving = ms.keras.MemorySavingGradients(log_dir=log_dir, **options)
    for _ in range(times):
        data = np.zeros([128, 64], np.float32)
        model.fit(data, data, batch_size=128, verbose=0, callbacks=[saving])
    return saving


def events_of(folder: Path) -> dict[str, list[tuple[int, Any, str]]]:
    """Return, by tag, the step, value and plugin of each event."""
    found: dict[str, list[tuple[int, Any, str]]] = defaultdict(list)
    for path in sorted(map(str, folder.iterdir())):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                made = tf.make_ndarray(value.tensor)
                plugin = value.metadata.plugin_data.plugin_name
                found[value.tag].append((event.step, made, plugin))
    return found


def test_a_plan_is_written_as_text_figure_numbers_and_timelines(tmp_path: Path) -> None:
    (plan,) = trained(tmp_path / "logs", budget=0.7).plans
    found = events_of(tmp_path / "logs")
    ((step, text, plugin),) = found["memory/plan"]
    shown = text.item().decode()
    assert (step, plugin) == (0, "text")
    assert [line[4:] for line in shown.splitlines()] == str(plan).splitlines()
    ((_, image, plugin),) = found["memory/figure"]
    width, height, png = image.tolist()
    assert plugin == "images" and int(width) > 1000 and int(height) > 500 and png.startswith(PNG)
    decoded = tf.io.decode_png(png).shape
    assert [int(height), int(width)] == decoded[:2]
    numbers = {
        tag.removeprefix("memory/"): values[0][1].item()
        for tag, values in found.items()
        if values[0][2] == "scalars" and tag.startswith("memory/")
    }
    assert numbers == pytest.approx(
        {
            "simulated_peak": plan.peak,
            "plain_peak": plan.peak_plain,
            "extra_time": plan.extra_time,
            "budget": plan.budget,
        }
    )
    for name, line in (("plain", plan.timeline_plain), ("planned", plan.timeline)):
        points = found[f"timeline_0/{name}"]
        assert [(step, int(value)) for step, value, _ in points] == list(enumerate(line.tolist()))


def test_each_plan_has_a_step_and_a_timeline_of_its_own(tmp_path: Path) -> None:
    saving = trained(tmp_path, checkpoints="memory")
    writer = saving._events
    writer.write(saving.plans[0])
    found = events_of(tmp_path)
    assert [step for step, _, _ in found["memory/simulated_peak"]] == [0, 1]
    assert "timeline_1/planned" in found
    # Without a budget, no budget is shown.
    assert "memory/budget" not in found


def test_a_plan_that_is_used_again_is_written_once(tmp_path: Path) -> None:
    trained(tmp_path, times=2)
    assert len(events_of(tmp_path)["memory/plan"]) == 1


def test_long_timelines_keep_their_peak() -> None:
    line = np.zeros(12_345, np.int64)
    line[777] = 5
    points = events._points(line)
    assert len(points) == events.POINTS
    assert (777, 5) in points and sum(size for _, size in points) == 5


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    trained(None)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_said_before_training(monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ms.errors.MissingExtraError, match=r"log_dir= needs matplotlib, .*\[plot\]"):
        ms.keras.MemorySavingGradients(log_dir="logs")
