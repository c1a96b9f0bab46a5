"""Residuals on another device: the same gradients, less memory on this one, and an end when the
other one is gone.

An accelerator and a host are two processes on this machine, connected over loopback. Each has an
allocator of its own, which measures the peak of the accelerator.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError
from tests.helpers.fresh import fresh

KEEP = {"planner": "keep"}
SOON = {"planning_seconds": 1.0}


def run(name: str, **kwargs):
    return fresh(f"tests.helpers.offloading:{name}", kwargs)


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_accelerator_holds_less(large):
    found = run("peaks", large=large)
    assert found["offloaded"] < 0.25 * found["plain"]
    assert found["offloaded"] < 0.25 * found["kept"]
    assert found["moved"] >= 40
    # The simulation takes transfers that a step waits for to need no time. Transfers of small
    # tensors take longer than their products; on a busy machine, all of them do in some steps.
    if large:
        assert found["least"] < 1.5 * found["simulated"]


@pytest.mark.parametrize(
    "model",
    [
        "residual_chain",
        *(
            pytest.param(model, marks=pytest.mark.slow)
            for model in ("mlp", "transformer", "cifar_resnet", "unet", "densenet", "lstm")
        ),
    ],
)
def test_gradients_are_the_same(model):
    wanted = [KEEP, {"checkpoints": "memory"}, {"max_slowdown": 1.3, **SOON}]
    found = run("same", model=model, options={}, settings=wanted)["found"]
    for settings, outcome in zip(wanted, found, strict=True):
        assert outcome["equal"], settings
    assert found[0]["offloaded"]
    assert "offloaded" in found[0]["text"]


@pytest.mark.parametrize(
    ("depth", "more"),
    [(12, []), pytest.param(24, [{"budget": 0.3, **SOON}], marks=pytest.mark.slow)],
)
def test_within_a_budget(depth, more):
    options = {"depth": depth, "batch": 512, "width": 128}
    wanted = [{**KEEP, "budget": 0.6}, {**KEEP, "budget": 0.3}, *more]
    found = run("same", model="mlp", options=options, settings=wanted)["found"]
    assert len(found) == len(wanted) and all(o["equal"] and o["within"] for o in found)
    assert 0 < found[0]["offloaded"] < found[1]["offloaded"]


def test_encoded_and_offloaded():
    options = {"depth": 24, "batch": 512, "width": 128}
    wanted = [{**KEEP, "encode": "bfloat16"}]
    (found,) = run("same", model="mlp", options=options, settings=wanted)["found"]
    # Offloaded values need no encoding.
    assert found["equal"] and found["offloaded"] and not found["encoded"]


def test_synchronous_transfers():
    """The step waits for each transfer, and its estimated time includes them."""
    options = {"depth": 24, "batch": 512, "width": 128}
    wanted = [{**KEEP, "link": {"early": early}} for early in (0.0, 1.0, 3.0)]
    waits, usual, early = run("same", model="mlp", options=options, settings=wanted)["found"]
    assert waits["equal"] and usual["equal"] and early["equal"]
    assert waits["lag"] == 0 < usual["lag"]
    assert waits["extra"] > usual["extra"] >= early["extra"] > 0


def test_the_way_is_measured():
    options = {"depth": 24, "batch": 512, "width": 128}
    wanted = [{**KEEP, "link": {"bandwidth": b}} for b in ("measured", 12e9)]
    measured, given = run("same", model="mlp", options=options, settings=wanted)["found"]
    assert measured["equal"] and measured["offloaded"] == given["offloaded"]
    # A loopback is not much faster than a bus, and not thousands of times slower.
    assert given["moving"] / 10 < measured["moving"] < given["moving"] * 1000
    assert measured["moving"] != given["moving"]


def test_copies_and_their_triggers_survive_grappler():
    found = run("in_the_optimized_graph")
    assert found["moved"] >= 10
    assert found["out"] == found["waiting"] == found["back"] == found["moved"]


def test_a_step_ends_when_the_host_is_gone():
    found = run("killed")
    assert found["error"] in ("UnavailableError", "AbortedError", "CancelledError", "InternalError")
    assert found["seconds"] < 120


def test_devices_that_cannot_be_used():
    said = run("errors")
    assert "there is no such device" in said["/job:host/device:CPU:7"]
    assert "/job:host" in said["/job:host/device:CPU:7"]
    assert "there is no such device" in said["/device:TPU:0"]
    assert "is the device that computes" in said["/device:CPU:0"]
    for bad in ("/job:host", ""):
        assert "device" in said[bad] and "/device:CPU:0" in said[bad]
    assert "give True, or the name of a device" in said["7"]
    assert "name another device" in said["True"]
    assert "least budget" in said["no room"]
    assert "encode=" in said["xla"]
    assert "give offload=" in said["plan"]
    assert "more than memory=1,000" in said["plan in little room"]
    assert said["plan again"] == "True"


def test_the_device_that_computes_is_where_ops_were_placed():
    found = run("placed")
    first = "/job:localhost/replica:0/task:0/device:CPU:0"
    for same in ("/CPU:0 /CPU:0", "/CPU:1 /CPU:1", f"/CPU:0 {first}"):
        assert "is the device that computes" in found[same]
    assert found["/CPU:0 /CPU:1"] == found["/CPU:1 /CPU:0"] == found[f"/CPU:1 {first}"] > 4


@pytest.mark.parametrize(
    "options",
    [
        {"bandwidth": 0},
        {"bandwidth": -1.0},
        {"bandwidth": "fast"},
        {"latency": float("nan")},
        {"memory": "much"},
        {"early": -1},
        {"early": None},
    ],
)
def test_bad_numbers(options):
    with pytest.raises(ArgumentError) as caught:
        ms.Offload("/device:CPU:1", **options)
    assert caught.value.argument == next(iter(options))


def test_the_graph_is_left_as_it_was():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        y = tf.reduce_sum(tf.tanh(tf.tanh(x)))
        before = len(graph.get_operations())
        with pytest.raises(ArgumentError):
            ms.gradients(y, x, offload="/device:CPU:0")
        readers = [op for op in graph.get_operations()[:before] if "_offloaded" in op.name]
    assert not readers
