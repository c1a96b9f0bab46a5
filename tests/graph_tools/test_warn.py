"""Warnings point at the user's line."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.warn import warn

v1 = tf.compat.v1
errors = ms.errors


def line_of(mark: str) -> int:
    """Return the number of the line of this file that ends in the comment ``mark``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [k for k, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def chain(x: tf.Tensor) -> tf.Tensor:
    for _ in range(16):
        x = tf.tanh(x)
    return x


def in_a_graph() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000])
        ms.gradients(chain(x), x, budget="1 GiB")  # in a graph


def in_a_converted_function() -> None:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        y = chain(x)
        if tf.reduce_sum(x) > 0.0:
            y = y + 1.0
        return ms.gradients(y, x, budget="1 GiB")

    # Warnings about a budget come once the function has been traced.
    step(tf.ones([1000]))  # in a converted function


def under_a_patch() -> None:
    with ms.patched(budget="1 GiB"), tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000])
        tf.gradients(chain(x), x)  # under a patch


def under_a_patch_on_a_tape() -> None:
    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain(x)
        return tape.gradient(y, x)

    with ms.patched(budget="1 GiB"):
        step(tf.ones([1000]))  # on a tape


def where_nothing_can_be_saved() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [1000])
        ms.gradients(x * 2.0, x, checkpoints="memory")  # nothing saved


def in_keras() -> None:
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
    saving = ms.keras.MemorySavingGradients(budget="1 GiB")
    x = np.zeros([8, 8], "f")
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[saving])  # in fit


@pytest.mark.parametrize(
    ("build", "mark"),
    [
        (in_a_graph, "in a graph"),
        (in_a_converted_function, "in a converted function"),
        (under_a_patch, "under a patch"),
        (under_a_patch_on_a_tape, "on a tape"),
        (where_nothing_can_be_saved, "nothing saved"),
        (in_keras, "in fit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_line_that_asked(build: Callable[[], None], mark: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        build()
    (said,) = [
        w for w in found if issubclass(w.category, (errors.PlanNote, errors.NothingSavedWarning))
    ]
    assert (said.filename, said.lineno) == (__file__, line_of(mark))


def test_filters_see_it() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("said once for each line", UserWarning)
        warn("said once for each line", UserWarning)
    assert len(found) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="an error"):
            warn("an error", UserWarning)


def test_in_a_thread_that_has_no_line_of_the_users() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("nobody's", UserWarning))
        thread.start()
        thread.join()
    assert [str(w.message) for w in found] == ["nobody's"]
