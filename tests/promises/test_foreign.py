"""Tests of other projects, run with gradients that recompute: the machinery, on a file of its own,
and a sample of Keras' tests."""

from __future__ import annotations

import pytest

from memsaving_gradients.engine import graph_state
from tests.foreign import __main__ as driver
from tests.foreign import known, processes, results, suite, verdict
from tests.foreign.known import KNOWN, Known
from tests.foreign.modes import MODES, PATCHED
from tests.foreign.results import Result

LIMITS = (suite.LIBRARY / "docs" / "limits.md").read_text()

OWN = """
import os, time

import keras, numpy as np, tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients import patching

PATCHED = bool(patching._stack)


def deep(x):
    for _ in range(8):
        x = tf.sin(x)
    return x


def slope(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = deep(x)
    return tape.gradient(y, x)


def trained(rate=0.01, **compiled):
    layers = [keras.layers.Dense(16, "gelu") for _ in range(6)]
    model = keras.Sequential([keras.Input([8]), *layers])
    model.compile(keras.optimizers.SGD(rate), "mse", jit_compile=False, **compiled)
    # As Keras' tests do, which draw other numbers each time.
    np.random.seed(None)
    data = np.random.normal(size=[64, 8]), np.random.normal(size=[64, 16])
    model.fit(*data, verbose=0, batch_size=64)


def test_trains():
    trained()


def test_trains_eagerly():
    trained(run_eagerly=True)


def test_differentiates_eagerly():
    assert slope(tf.zeros([1024]))[0] == 1.0


def test_fails():
    assert slope(tf.zeros([1024]))[0] == 2.0


def test_passes_plain_only():
    step = tf.function(slope)
    step(tf.zeros([1024]))
    assert not ms.plans(step)


def test_trains_to_other_weights():
    trained(1.0 if patching._stack else 0.01)


def test_dies():
    if patching._stack:
        os._exit(7)


def test_comes_after():
    assert tf.function(slope)(tf.zeros([1024]))[0] == 1.0


def test_passes_the_second_time(request):
    # A file beside this one is there when it is tried once more.
    if patching._stack:
        was_tried = request.path.with_name(f"tried-{request.config.getoption('foreign')}")
        first, _ = not was_tried.exists(), was_tried.touch()
        assert not first
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs the driver as a command; it returns the exit code and the
    output."""
    for name in ("KERAS_BACKEND", "KERAS_HOME", "PYTHONPATH"):
        # The environment that the driver sets is restored at the end of the test.
        monkeypatch.setenv(name, "tensorflow")

    def run(*arguments: str) -> tuple[int, str]:
        command = ["tests.foreign", "--results", str(tmp_path / "results"), *arguments]
        monkeypatch.setattr("sys.argv", command)
        code = driver.main()
        return code, capsys.readouterr().out

    return run


def test_what_passes_plain_only_is_listed(run, tmp_path, monkeypatch):
    (tmp_path / "own_test.py").write_text(OWN)
    code, printed = run("--root", str(tmp_path), "--modes", "recompute")
    assert code == 1
    _, _, listed = printed.partition("pass plain only:")
    name = "recompute: own_test.py::test"
    assert f"{name}_passes_plain_only: failed: AssertionError: assert not " in listed
    assert f"{name}_trains_to_other_weights: trained a model to other weights" in listed
    assert f"{name}_dies: failed: the process ended early, with exit code 7" in listed
    assert listed.count(name) == 3
    # A second run continues from here: it only tries the failed tests once more.
    found = results.read(tmp_path / "results" / "recompute" / "own_test.jsonl")
    assert found["own_test.py::test_trains"].rewired == 1
    assert found["own_test.py::test_trains_eagerly"].planned == 0
    assert found["own_test.py::test_differentiates_eagerly"].planned == 0
    assert found["own_test.py::test_fails"].outcome == "failed"
    assert found["own_test.py::test_comes_after"].rewired == 1
    assert found["own_test.py::test_passes_the_second_time"].outcome == "passed"
    plain = results.read(tmp_path / "results" / "plain" / "own_test.jsonl")
    assert [test for test, one in plain.items() if one.outcome != "passed"] == [
        "own_test.py::test_fails"
    ]
    assert not any(one.planned for one in plain.values())
    limits = [Known(f"*_{which}", "") for which in ("plain_only", "other_weights", "dies")]
    monkeypatch.setattr(known, "KNOWN", tuple(limits))
    failed = verdict.failures({"plain": plain, "recompute": found})
    assert len(failed) == 3 and all(str(one).endswith("(a known limit)") for one in failed)


def test_a_budget_that_is_too_small_is_no_failure(run, tmp_path):
    small = "def test_small():\n    tf.function(slope)(tf.zeros([1024]))\n"
    few = OWN.partition("def trained")[0].replace("range(8)", "range(3)")
    (tmp_path / "own_test.py").write_text(few + small)
    assert run("--root", str(tmp_path), "--modes", "budget")[0] == 0
    found = results.read(tmp_path / "results" / "budget" / "own_test.jsonl")
    assert found["own_test.py::test_small"].infeasible == 1
    assert found["own_test.py::test_small"].planned == 1


def test_a_second_mode_leaves_out_what_asks_for_no_gradients(run, tmp_path):
    deep = OWN.partition("def trained")[0].replace("PATCHED = bool(patching._stack)", "")
    (tmp_path / "own_test.py").write_text(
        deep
        + "def test_no_gradients():\n    pass\n\n\n"
        + "def test_gradients():\n    tf.function(slope)(tf.zeros([1024]))\n"
    )
    (tmp_path / "plain_test.py").write_text("def test_no_gradients():\n    pass\n")
    code, printed = run("--root", str(tmp_path))
    assert code == 0
    assert "budget    plain_test.py: no test asks for gradients" in printed
    found = results.read(tmp_path / "results" / "budget" / "own_test.jsonl")
    assert {test: one.rewired for test, one in found.items()} == {"own_test.py::test_gradients": 1}


TENSORFLOWS = """
from tensorflow.python.eager import backprop, def_function
from tensorflow.python.framework import ops, test_util
from tensorflow.python.ops import array_ops, gradients_impl, math_ops
from tensorflow.python.platform import test


def given():
    # Nothing is recomputed of what is constant.
    return array_ops.placeholder_with_default(array_ops.zeros([1024]), [1024])


def deep(x):
    for _ in range(8):
        x = math_ops.sin(x)
    return x


class DeepTest(test.TestCase):
    def testSession(self):
        with ops.Graph().as_default(), self.cached_session():
            x = given()
            self.assertAllClose(gradients_impl.gradients(deep(x), x)[0], [1.0] * 1024)
            self.assertNotEmpty(self.get_temp_dir())

    @test_util.run_in_graph_and_eager_modes
    def testTapes(self):
        x = given()
        with backprop.GradientTape() as tape:
            tape.watch(x)
            y = deep(x)
        self.assertAllClose(self.evaluate(tape.gradient(y, x)), [1.0] * 1024)

    def testFunction(self):
        @def_function.function
        def slope(x):
            return gradients_impl.gradients(deep(x), x)[0]

        self.assertAllClose(slope(array_ops.zeros([1024])), [1.0] * 1024)


if __name__ == "__main__":
    test.main()
"""


def test_tests_in_the_style_of_tensorflow_are_run(run, tmp_path):
    (tmp_path / "deep_test.py").write_text(TENSORFLOWS)
    assert run("--root", str(tmp_path), "--modes", "recompute")[0] == 0
    found = results.read(tmp_path / "results" / "recompute" / "deep_test.jsonl")
    rewired = {test.rpartition("::")[2]: one.rewired for test, one in found.items()}
    assert rewired == {"testSession": 1, "testTapes": 1, "testFunction": 1, "test_session": 0}


def test_results_of_another_state_of_the_library_are_made_anew(tmp_path):
    file = tmp_path / "some_test.jsonl"
    results.begin(file, "before")
    results.note(file, "test", Result("passed", rewired=3))
    results.note(file, "interrupted", Result("began"))
    results.begin(file, "before")
    assert results.read(file) == {"test": Result("passed", rewired=3)}
    results.begin(file, "after")
    assert results.read(file) == {}
    assert suite.key_of("recompute") != suite.key_of("plain")


def test_known_failures_name_a_limit():
    assert [one for one in KNOWN if one.limit not in LIMITS or not one.limit] == []


def test_known_failures_are_of_a_mode(monkeypatch):
    monkeypatch.setattr(known, "KNOWN", (Known("layers/*::test_a", "", ("budget",)),))
    name = "layers/core/some_test.py::test_"
    tried = {
        (mode, which): known.is_known(name + which, mode) for mode in PATCHED for which in "ab"
    }
    assert [case for case, answer in tried.items() if answer] == [("budget", "a")]


def test_watches_that_saw_the_same_end_by_themselves():
    outer, inner = graph_state.Watch(), graph_state.Watch()
    with graph_state.watching(outer), graph_state.watching(inner):
        pass
    with graph_state.watching(outer):
        with graph_state.watching(inner):
            pass
        assert graph_state._watches[-1] is outer


@pytest.mark.slow
def test_what_hangs_is_ended(tmp_path):
    (tmp_path / "own_test.py").write_text(
        "import time\n\ndef test_hangs():\n    time.sleep(1000)\n\ndef test_after():\n    pass\n"
    )
    written = tmp_path / "own_test.jsonl"
    results.begin(written, "")
    processes.run_tests(["own_test.py"], tmp_path, "plain", written, seconds=30)
    found = results.read(written)
    assert found["own_test.py::test_hangs"].error == "did not end within 30 seconds"
    assert found["own_test.py::test_after"].outcome == "passed"


@pytest.mark.slow
def test_a_sample_of_the_tests_of_keras(run, tmp_path):
    files = ("layers/core/dense_test", "layers/rnn/lstm_test", "layers/convolutional/conv_test")
    more = ("layers/attention/multi_head", "layers/normalization/batch_norm", "models/cloning")
    code, printed = run(*(f"--only={part}" for part in (*files, *more)))
    assert code == 0, printed
    for mode in PATCHED:
        folder = tmp_path / "results" / mode
        found = [results.read(file) for file in sorted(folder.rglob("*_test.jsonl"))]
        # Only the files that ask for gradients are run again within a budget.
        assert len(found) == (6 if mode == "recompute" else 5)
        assert sum(one.rewired for each in found for one in each.values()) > 10
    assert printed.count("\n") > len(MODES)
