"""The examples run as their readers run them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.models import small
from tests.processor import needs_bfloat16

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_long_text():
    """Plain training exceeds the memory there is; ours does not, and learns."""
    command = [sys.executable, EXAMPLES / "long_text.py", "--only", "transformer", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OOM" in done.stdout and "memsaving" in done.stdout


@needs_bfloat16
def test_low_memory() -> None:
    """All techniques together take a small part of the memory, and train."""
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
    from benchmarks.models.dynamic import DynamicConvolution

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
