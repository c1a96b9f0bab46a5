"""Steps of loops that run before earlier steps end, compared with what a process holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from graph_tools.costs.steps_ahead import bytes_ahead
from graph_tools.memory.measure import measure_peak
from tests.helpers.fresh import fresh

SIDE, STEPS = 512, 12
#: Bytes of one tensor of a step.
SIZE = 4 * SIDE * SIDE

State = tuple[tf.Tensor, ...]


def _from_what_no_step_changes(x: tf.Tensor, i: tf.Tensor, y: tf.Tensor) -> State:
    return i + 1, y @ tf.exp(x)


def _from_its_number(x: tf.Tensor, i: tf.Tensor, y: tf.Tensor) -> State:
    return i + 1, y @ tf.fill([SIDE, SIDE], 1e-3 * tf.cast(i, tf.float32))


def _from_the_step_before(x: tf.Tensor, i: tf.Tensor, y: tf.Tensor) -> State:
    return i + 1, y @ tf.exp(y + x)


def _looped(
    body: Callable[..., State], x: tf.Tensor, parallel: int = 10, limit: bool = False
) -> Any:
    def goes_on(i: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        more = i < STEPS
        return tf.logical_and(more, tf.reduce_sum(y) < 1e9) if limit else more

    def step(i: tf.Tensor, y: tf.Tensor) -> State:
        return body(x, i, y)

    return tf.while_loop(goes_on, step, (0, x), parallel_iterations=parallel)[1]


def _ahead(body: Callable[..., State], **kwargs: Any) -> int:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [SIDE, SIDE])
        return round(bytes_ahead(_looped(body, x, **kwargs).op.inputs[0].op, batch=1) / SIZE)


@pytest.mark.parametrize("body", [_from_what_no_step_changes, _from_its_number])
def test_what_waits_for_no_step_runs_ahead(body: Callable[..., State]) -> None:
    assert _ahead(body) == 9
    assert _ahead(body, parallel=4) == 3
    assert _ahead(body, parallel=32) == STEPS - 1
    assert _ahead(body, parallel=1) == 0


def test_a_condition_that_reads_the_state_lets_no_step_run_ahead() -> None:
    assert _ahead(_from_what_no_step_changes, limit=True) == 0


def test_what_reads_the_step_before_waits_for_it() -> None:
    assert _ahead(_from_the_step_before) == 0


def _peak(parallel: int) -> int:
    x = tf.random.stateless_normal([SIDE, SIDE], [0, 1]) / 1e3
    step = tf.function(lambda: _looped(_from_what_no_step_changes, x, parallel), autograph=False)
    return measure_peak(step, warmup=1, steps=3).peak


def test_a_process_holds_as_much() -> None:
    many, one = (fresh(f"{__name__}:_peak", parallel=parallel) for parallel in (10, 1))
    held = (many - one) / SIZE
    # The number of steps ahead is random; one more may begin while the first one ends.
    assert 2 <= held <= _ahead(_from_what_no_step_changes) + 1.5
