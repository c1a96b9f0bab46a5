"""Regions of the allocator: a small one that grows, or all memory at once."""

from __future__ import annotations

import pytest
import tensorflow as tf

from graph_tools.graph.capture import capture
from graph_tools.memory import executor
from graph_tools.memory.bfc_allocator import GROWING, WHOLE
from graph_tools.memory.executor import simulate_execution
from graph_tools.memory.measure import measure_peak
from graph_tools.memory.regions import first_region
from graph_tools.tf_private import autodiff
from tests.helpers.fresh import fresh

#: Elements of a buffer of 5 MiB, which takes a whole region of 8 MiB.
ELEMENTS = 5 << 18
LAYERS = 8


def peaks(whole: bool) -> tuple[int, int]:
    """Return the measured peak of a step, and its simulated bytes in chunks."""
    if whole:
        # All further buffers fit into the region that this one leaves.
        tf.zeros([1 << 28])

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        y = x
        for _ in range(LAYERS):
            y = tf.tanh(y) * tf.sin(y)
        return tf.gradients(tf.reduce_sum(y), x)

    x = tf.ones([ELEMENTS])
    graph = step.get_concrete_function(x).graph
    executor.first_region = lambda: WHOLE if whole else GROWING
    simulated, _ = simulate_execution(capture(autodiff.ends_of(graph)), batch=1)
    return measure_peak(lambda: step(x)).peak, simulated.allocated_peak


def test_one_region_wastes_less():
    found = {whole: fresh("tests.graph_tools.test_regions:peaks", whole=whole) for whole in (0, 1)}
    # Chance decides whether two more buffers are alive at once.
    for measured, simulated in found.values():
        assert simulated == pytest.approx(measured, rel=0.1)
    assert found[1][0] < 0.95 * found[0][0]


@pytest.mark.parametrize(
    ("gpus", "grows", "forced", "expected"),
    [
        (0, False, "", GROWING),
        (1, False, "", WHOLE),
        (1, True, "", GROWING),
        (1, None, "", WHOLE),
        (1, True, "false", WHOLE),
        (1, False, "True", GROWING),
        (0, False, "false", GROWING),
    ],
)
def test_gpus_take_all_memory_unless_it_grows(monkeypatch, gpus, grows, forced, expected):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * gpus)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: grows)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
    assert first_region() == expected
