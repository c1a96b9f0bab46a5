"""What the reader says of XLA's own files, against figures that are computed in another way."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from graph_tools.memory.measure import in_fresh_process
from graph_tools.xla import buffers, dumps, hlo


def compiled(program: str, dump: str) -> None:
    """Compile a program in this process, which writes to the folder that ``XLA_FLAGS`` name."""
    x = tf.constant(np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256))
    _PROGRAMS[program](x)


@tf.function(jit_compile=True, autograph=False)
def _chain(x):
    y = x
    for _ in range(4):
        y = tf.tanh(y @ x)
    return tf.gradients(tf.reduce_sum(y), x)


@tf.function(jit_compile=True, autograph=False)
def _loop(x):
    return tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.sin(y @ x)), (0, x))[1]


@tf.function(jit_compile=True, autograph=False)
def _branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x @ x) @ x, lambda: tf.reverse(x, [0]))


_PROGRAMS = {"chain": _chain, "loop": _loop, "branch": _branch}


@pytest.fixture(scope="module", params=list(_PROGRAMS))
def written(request, tmp_path_factory):
    """The module and the buffer assignment of one program."""
    folder = tmp_path_factory.mktemp("dump")
    in_fresh_process(
        f"{__name__}:compiled",
        {"program": request.param, "dump": str(folder)},
        {"XLA_FLAGS": dumps.flags(folder), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    module = hlo.parse(dumps.module_file(folder).read_text(encoding="utf-8"))
    return module, buffers.parse(dumps.assignment_file(folder).read_text(encoding="utf-8"))


def test_instructions(written):
    module, assignment = written
    called = {name for i in module.instructions.values() for name in i.called}
    assert called <= {one.name for one in module.computations}
    for instruction in module.instructions.values():
        assert set(instruction.operands) <= set(module.instructions)
    assert set(assignment.sequence) <= set(module.instructions)
    assert module.counts()["dot"] >= 1
    ops = {name for i in module.instructions for name in module.op_names(i)}
    assert any("MatMul" in name or "matmul" in name for name in ops)


def test_sizes(written):
    module, assignment = written
    for one in assignment.allocations:
        for value in one.values:
            made = module.instructions[value.instruction]
            assert value.offset + value.bytes <= one.bytes
            if not made.shape.startswith("("):
                assert value.bytes == made.bytes, made


def test_the_peak_is_that_of_live_ranges(written):
    module, assignment = written
    peak = assignment.peak(module)
    # The largest sum of places that are taken at one time, one place counted once.
    most = 0
    for place in range(len(assignment.sequence)):
        taken = {
            (value.offset, value.bytes)
            for one in assignment.allocations
            if one.temporary
            for value in one.values
            if value.name in assignment.ranges
            and assignment.ranges[value.name][0] <= place <= assignment.ranges[value.name][1]
        }
        most = max(most, sum(size for _, size in taken))
    assert peak.bytes == most
    assert 0.9 * assignment.temporaries <= peak.bytes <= assignment.temporaries
    assert all(live.first <= peak.place <= live.last for live in peak.values)
    assert peak.instruction in module.instructions


def test_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="XLA_FLAGS"):
        dumps.module_file(tmp_path)
