"""The examples run as their readers run them."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

import memsaving_gradients as ms
from benchmarks.networks import small
from tests.helpers.fresh import fresh
from tests.helpers.processor import needs_bfloat16

EXAMPLES = Path(__file__).parents[2] / "examples"


def long_text_trained(run: str, settings: dict[str, Any], results: Path) -> None:
    """Train as the example does (in a fresh process)."""
    from examples import long_text

    long_text.train(run, long_text.Settings(**settings), results)


def test_long_text_of_little_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our run takes less memory than plain training, and learns. A network that exceeds the memory
    is reported."""
    from examples import long_text

    found = {}

    def apart(run: str, settings: Any) -> Any:
        file = tmp_path / "results.json"
        given = {"run": run, "settings": asdict(settings), "results": file}
        fresh("tests.project.test_examples:long_text_trained", given)
        found[run] = json.loads(file.read_text())
        return found[run]

    little = {"length": 256, "batch": 4, "width": 64, "steps": 4, "limit": 0}
    settings = replace(long_text.DEFAULTS["lstm"], **little)
    text = io.StringIO()
    monkeypatch.setattr(long_text, "run_apart", apart)
    assert long_text.compare(settings, Console(file=text, width=120))
    assert 0 < found["ours"]["peak"] < found["plain"]["peak"]
    assert "memsaving_gradients" in text.getvalue() and "more than" not in text.getvalue()
    ended = {"ended": "OOM"}
    monkeypatch.setattr(long_text, "run_apart", lambda run, _: found[run] | ended)
    assert not long_text.compare(settings, Console(file=text, width=120))
    assert "OOM" in text.getvalue() and "more than there is" in text.getvalue()
    # Plain training has to exceed a limit, ours must not.
    out = {"plain": found["plain"] | ended, "ours": found["ours"]}
    monkeypatch.setattr(long_text, "run_apart", lambda run, _: out[run])
    assert long_text.compare(replace(settings, limit=9), Console(file=text, width=120))
    assert not long_text.compare(settings, Console(file=text, width=120))


def test_long_text_has_the_same_transformer_twice() -> None:
    from examples import long_text

    settings = replace(long_text.DEFAULTS["transformer"], length=64, width=32)
    x, y = long_text.batches(settings)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    logits = []
    for ours in (False, True):
        keras.utils.set_random_seed(0)
        logits.append(long_text.build(settings, ours)(x[:2]).numpy())
    assert logits[0].shape == (2, 64, long_text.UNKNOWN + 1)
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_long_text():
    """Plain training exceeds the memory of the machine; our training does not, and learns."""
    command = [sys.executable, EXAMPLES / "long_text.py", "--only", "transformer", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OOM" in done.stdout and "memsaving" in done.stdout


def low_memory_trained(**what: Any) -> dict[str, Any]:
    """Train a small network of convolutions (in a fresh process)."""
    from benchmarks import networks
    from examples import low_memory

    made = networks.build
    networks.build = lambda name, **more: made(name, depth=4, **more)
    return low_memory.train(**what)


@needs_bfloat16
def test_low_memory_of_a_small_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All techniques together take a small part of the memory, and train."""
    from examples import low_memory

    def trained(target: str, what: dict[str, Any], env: Any) -> Any:
        assert target == "examples.low_memory:train"
        return fresh("tests.project.test_examples:low_memory_trained", what)

    monkeypatch.setattr("graph_tools.memory.measure.in_fresh_process", trained)
    options = ["digits", "--runs", "float32,all", "--epochs", "1", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["low_memory.py", *options])
    assert low_memory.main() == 0
    (share,) = re.findall(r"all .* 1/([\d.]+) ", capsys.readouterr().out)
    # 12 to 16 on a quiet machine. On a busy one, another thread's scratch adds a third.
    assert float(share) > 5


@pytest.mark.slow
@needs_bfloat16
def test_low_memory() -> None:
    """The whole network also takes a small part of the memory."""
    options = ["digits", "--runs", "float32,all", "--epochs", "1", "--steps", "3"]
    command = [sys.executable, EXAMPLES / "low_memory.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (share,) = re.findall(r"all .* 1/([\d.]+) ", done.stdout)
    assert float(share) > 25


def test_translation_is_a_dictionary_and_a_reversal_of_clauses() -> None:
    from examples.low_memory import translation

    ((source, target), labels), (_, test_labels) = translation()
    assert source.shape == target.shape == labels.shape and len(test_labels) >= 128
    assert 5_000 < max(source.max(), labels.max()) < 10_000
    np.testing.assert_array_equal(target[:, 1:], labels[:, :-1])
    possible: dict[int, set[int]] = {}
    for one, other in zip(source.tolist(), labels.tolist(), strict=True):
        assert one[-1] == other[-1] == 0
        # A word and its translation occur equally often in each pair of sentences.
        words, others = Counter(one), Counter(other)
        for word, times in words.items():
            alike = {found for found in others if others[found] == times}
            possible[word] = possible.get(word, alike) & alike
    assert all(possible.values())
    clauses = source[:, :-1] != labels[:, :-1]
    assert clauses.mean() > 0.5


def test_a_dynamic_convolution_is_a_sum_over_a_window() -> None:
    from benchmarks.networks.dynamic import DynamicConvolution

    draw = np.random.default_rng(0)
    x, weights = draw.standard_normal((2, 6, 8)), draw.random((2, 6, 2, 3))
    for causal, before in ((True, 2), (False, 1)):
        found = DynamicConvolution(causal, dtype="float64")([x, weights]).numpy()
        wanted = np.zeros_like(x)
        for word, place in itertools.product(range(6), range(3)):
            other = word + place - before
            if 0 <= other < 6:
                for head in range(2):
                    part = slice(4 * head, 4 * head + 4)
                    wanted[:, word, part] += weights[:, word, head, place, None] * x[:, other, part]
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_dynamic_convolutions_have_the_gradients_of_tensorflow() -> None:
    model = small("dynamic_conv")
    batch = [tf.constant(one) for one in model.batch]

    def step(ours: bool) -> Any:
        keras.utils.set_random_seed(0)

        @tf.function
        def computed(*batch: tf.Tensor) -> Any:
            loss = model.loss(*batch)
            if ours:
                return ms.gradients(loss, list(model.variables), checkpoints="memory")
            return tf.gradients(loss, list(model.variables))

        return computed(*batch)

    for layer in model.layers.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    for plain, mine in zip(step(ours=False), step(ours=True), strict=True):
        plain, mine = tf.convert_to_tensor(plain), tf.convert_to_tensor(mine)
        np.testing.assert_allclose(plain, mine, rtol=1e-5, atol=1e-7)
