"""Wrapped functions of TensorFlow: when, by which code, and what remains afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gradients_util

import memsaving_gradients as ms
from graph_tools.tf_private.hooks import Hook, differentiation

UNTOUCHED = """
import json
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import transform
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import gradients_util

def functions():
    tape = tf.GradientTape
    registry = ops.gradient_registry._registry
    loops = [registry[kind]["type"] for kind in ("While", "StatelessWhile")]
    return [
        gradients_util._GradientsHelper, func_graph.func_graph_from_py_func, *loops,
        tape.gradient, tape.jacobian, tape.batch_jacobian, *transform.FUNC_GRAPH_TRANSFORMS,
    ]

before = functions()
import memsaving_gradients as ms
import memsaving_gradients.keras
print(json.dumps(before == functions()))
"""


def test_importing_changes_nothing_in_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1])


def _hook() -> tuple[dict[str, Any], Hook]:
    functions: dict[str, Any] = {"f": abs}
    return functions, Hook(lambda: functions["f"], lambda new: functions.update(f=new))


def test_subscribers_wrap_in_order_and_leave_in_any() -> None:
    functions, hook = _hook()
    called: list[str] = []

    def subscriber(name: str) -> Any:
        def around(inner: Any, x: int) -> int:
            called.append(name)
            return int(inner(x))

        return around

    ends = [hook.wrap(subscriber("a")), hook.wrap(subscriber("b"))]
    ends.append(hook.wrap(subscriber("inner"), innermost=True))
    assert functions["f"](-3) == 3
    assert called == ["b", "a", "inner"]
    called.clear()
    ends[0]()
    assert functions["f"](-3) == 3 and called == ["b", "inner"]
    ends[1]()
    ends[2]()
    assert functions["f"] is abs


def test_a_call_within_a_call_goes_through_all_subscribers_again() -> None:
    functions, hook = _hook()
    depth: list[int] = []

    def around(inner: Any, x: int) -> int:
        depth.append(x)
        return int(functions["f"](x - 1)) if x > 0 else int(inner(x))

    hook.wrap(around)
    assert functions["f"](2) == 0
    assert depth == [2, 1, 0]


def test_what_others_wrapped_since_stays() -> None:
    functions, hook = _hook()
    end = hook.wrap(lambda inner, x: inner(x) + 1)
    wrapped = functions["f"]
    functions["f"] = lambda x: wrapped(x) * 10
    assert functions["f"](-2) == 30
    end()
    # Another library's wrapper is not removed, and still calls the original function.
    assert functions["f"](-2) == 20
    end = hook.wrap(lambda inner, x: inner(x) + 2)
    assert functions["f"](-2) == 40
    end()
    assert functions["f"](-2) == 20


def test_a_patch_that_ends_while_graphs_are_edited_keeps_later_gradients_exact() -> None:
    with tf.Graph().as_default():
        x = y = tf.compat.v1.placeholder(tf.float32, [1024])
        for _ in range(12):
            y = tf.sin(y)
        with ms.patched(checkpoints="memory"):
            (slope,) = tf.gradients(y, x)
        (curvature,) = tf.gradients(slope, x)
        with tf.compat.v1.Session() as session:
            found = session.run(curvature, {x: [0.5] * 1024})
    with tf.Graph().as_default():
        x = y = tf.compat.v1.placeholder(tf.float32, [1024])
        for _ in range(12):
            y = tf.sin(y)
        (slope,) = tf.gradients(y, x)
        (curvature,) = tf.gradients(slope, x)
        with tf.compat.v1.Session() as session:
            plain = session.run(curvature, {x: [0.5] * 1024})
    assert found == pytest.approx(plain, rel=1e-6)
    assert gradients_util._GradientsHelper is differentiation._dispatch


LOOPS_BEFORE = """
import json
import numpy as np, tensorflow as tf

def looped(x):
    return tf.while_loop(lambda k, h: k < 20, lambda k, h: (k + 1, tf.sin(h * 1.1)), (0, x))[1]

def step(gradients):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [64])
        y = looped(x)
        (plain,) = tf.gradients(y, x)
        later = gradients(y, x)[0]
        second = gradients(plain, x)[0]
        return [v.tolist() for v in session.run([plain, later, second], {x: np.linspace(0, 1, 64)})]

before = step(tf.gradients)
import memsaving_gradients as ms
def saving(y, x):
    # The first gradients of this process that are asked of this library.
    return ms.gradients(y, x, loops="segments", checkpoints=None)
import sys, warnings
warnings.simplefilter("ignore")
print(json.dumps([before, step(saving)]))
"""


def test_loops_that_were_differentiated_before_the_first_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOPS_BEFORE], capture_output=True, text=True, check=True
    )
    plain, found = json.loads(done.stdout.splitlines()[-1])
    for ours, theirs in zip(found, plain, strict=True):
        # Grappler runs with its defaults; a value of a wrong step would be off by tenths.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
