"""Lists of checkpoints under a patch: each of several computations takes its own tensors."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import memsaving_gradients as ms
from memsaving_gradients import patching
from tests.engine.test_patching import chain, compare, data

errors = ms.errors


def two_losses(x: tf.Tensor) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with tf.name_scope("first"):
            a = chain(ms.checkpoint(chain(x, 8), name="mark"), 8)
        with tf.name_scope("second"):
            b = chain(ms.checkpoint(chain(x, 8), name="mark"), 8)
    return tape.gradient(a, x), tape.gradient(b, x)


@pytest.mark.parametrize("listed", [["first/mark", "second/mark"], ["mark"]])
def test_each_computation_takes_its_own(listed: list[str]) -> None:
    plans = compare(two_losses, data(), checkpoints=listed)
    assert [plan.clones > 0 for plan in plans] == [True, True]


def test_computation_that_can_use_none() -> None:
    with (
        ms.patched(checkpoints=["first/mark"]),
        pytest.raises(errors.SelectionError, match="is not between"),
    ):
        tf.function(two_losses)(data())


def test_name_that_matches_nothing_is_an_error_at_once() -> None:
    with (
        ms.patched(checkpoints=["mark", "mrak"]),
        pytest.raises(errors.SelectionError, match="did you mean.*mark"),
    ):
        tf.function(two_losses)(data())


def aside(x: tf.Tensor) -> tf.Tensor:
    tf.exp(x, name="aside")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = chain(x)
    return tape.gradient(y, x)


def test_checkpoint_of_no_use_is_an_error_at_the_end_of_the_block() -> None:
    with (
        pytest.raises(errors.SelectionError, match=r"'aside'.*is not between"),
        ms.patched(checkpoints=["Sin_7", "aside"]),
    ):
        tf.function(aside)(data())
    assert not patching._stack


def test_checkpoint_of_no_use_is_an_error_when_unpatching() -> None:
    ms.patch(checkpoints=["Sin_7", "aside"])
    tf.function(aside)(data())
    with pytest.raises(errors.SelectionError, match="'aside'"):
        ms.unpatch()
    assert not patching._stack


def test_error_of_the_block_goes_before_checkpoints_of_no_use() -> None:
    def fails(x: tf.Tensor) -> tf.Tensor:
        aside(x)
        raise KeyError

    with pytest.raises(KeyError), ms.patched(checkpoints=["Sin_7", "aside"]):
        tf.function(fails)(data())
