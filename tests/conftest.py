"""TensorFlow's environment for the tests, the option for all cases, and the fixture under which
gradients must be bit-identical."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The allocator that reports peaks; read once, when TensorFlow is imported.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
# TensorFlow switches oneDNN on for new CPUs only. Without it, Eigen's convolutions take scratch
# space of the size of the cache, which no graph shows.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

from collections.abc import Iterator

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients.engine.planning import earlier_traces
from memsaving_gradients.transforms.attention import blocks
from tests.helpers import fresh, sampling, support

pytest_plugins = ["tests.helpers.interruption", "tests.helpers.slowest"]

#: Notebooks that take a minute: a thousand layers, two thousand steps.
SLOW_NOTEBOOKS = {"deep.ipynb"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="try all cases and examples, not a sample of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    sampling.thorough = config.getoption("thorough")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A worker takes many tests, some of which need fresh processes.
        fresh.start()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW_NOTEBOOKS:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    # Imported objects stay alive. Collections that visit them took a tenth of the time of tests.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    sampling.running = item


@pytest.fixture
def graph() -> Iterator[tf.Graph]:
    """A new graph, which is the default graph."""
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def exact() -> Iterator[None]:
    """Op determinism on, grappler's arithmetic rewriting off, for the duration of one test."""
    with support.exact_arithmetic():
        tf.random.set_seed(1)
        yield


@pytest.fixture(scope="module")
def exact_arithmetic() -> Iterator[None]:
    """The setting of `exact` for all tests of a module, without a seed."""
    with support.exact_arithmetic():
        yield


@pytest.fixture
def control_flow_v2() -> Iterator[None]:
    """Loops and branches in TF1 graphs built as in functions, for the duration of one test."""
    v1 = tf.compat.v1
    was_on = v1.control_flow_v2_enabled()
    v1.enable_control_flow_v2()
    yield
    if not was_on:
        v1.disable_control_flow_v2()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in blocks of the least size, for the duration of one test."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4)


@pytest.fixture(autouse=True)
def _no_plans_of_earlier_tests() -> None:
    earlier_traces.forget()


@pytest.fixture(autouse=True)
def _never_left_patched() -> Iterator[None]:
    yield
    try:
        ms.unpatch()
    except ms.errors.PatchError:
        return
    pytest.fail("the test left TensorFlow patched")
