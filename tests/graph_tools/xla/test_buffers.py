"""The buffers that we read from XLA, compared with XLA's own files and the compiled graphs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from graph_tools.errors import GraphError
from graph_tools.memory.measure import in_fresh_process
from graph_tools.xla.program import compiled

SIZE = 256
X = tf.TensorSpec([SIZE, SIZE])


def _chain(x):
    y = x
    for _ in range(4):
        y = tf.tanh(y @ x)
    return tf.gradients(tf.reduce_sum(y), x)


def _loop(x):
    return tf.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, tf.sin(y @ x)), (0, x))[1]


def _branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x @ x) @ x, lambda: tf.reverse(x, [0]))


PROGRAMS = {"chain": _chain, "loop": _loop, "branch": _branch}


def _step(program):
    return tf.function(PROGRAMS[program], jit_compile=True, autograph=False)


def both(program: str, folder: str) -> list[int]:
    """Return the bytes of a program's temporaries: those that XLA writes to ``folder``, and
    ours."""
    step = _step(program)
    step(tf.zeros([SIZE, SIZE]))
    (file,) = Path(folder).glob("*buffer-assignment.txt")
    sizes = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", file.read_text(), re.M)
    found = compiled(step.get_concrete_function(X).graph, batch=1)
    return [sum(map(int, sizes)), found.assignment.temporaries]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_that_runs_takes_as_much(program, tmp_path):
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    task = {"program": program, "folder": str(tmp_path)}
    runs, found = in_fresh_process(
        f"{__name__}:both", task, {**flags, "CUDA_VISIBLE_DEVICES": "-1"}
    )
    assert runs == found > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak(program):
    step = _step(program)
    found = compiled(step.get_concrete_function(X).graph, batch=1)
    peak = found.assignment.peak
    assert peak.bytes == sum(live.bytes for live in peak.values)
    assert 0.9 * found.assignment.temporaries <= peak.bytes <= found.assignment.temporaries
    assert {peak.instruction, *(live.instruction for live in peak.values)} <= set(
        found.module.instructions
    )
    names = [name for live in peak.values for name in live.op_names]
    ops = step.get_concrete_function(X).graph.get_operations()
    assert names
    if program == "chain":
        assert set(names) <= {op.name for op in ops}


def test_instructions_are_in_order():
    found = compiled(_step("chain").get_concrete_function(X).graph, batch=1)
    made = set()
    for one in found.module.computations[-1].instructions:
        made.add(one.name)
        assert set(one.called) <= {other.name for other in found.module.computations}
    assert found.assignment.peak.instruction in made


def test_variables_take_their_old_place_and_results_one_of_their_own():
    weights = tf.Variable(np.ones([SIZE, SIZE], np.float32))

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        weights.assign_sub(x @ weights)
        return tf.sin(x)

    # The batch is unknown, and the outer function captures the variable as well.
    graphs = []

    @tf.function(autograph=False)
    def around(x):
        graphs.append(step.get_concrete_function(tf.TensorSpec([None, SIZE])).graph)
        return step(x)

    around.get_concrete_function(X)
    found = compiled(graphs[0], batch=SIZE).assignment
    assert SIZE * SIZE * 4 <= found.results < 2 * SIZE * SIZE * 4
    assert found.transient == found.results + found.temporaries


def test_what_xla_cannot_compile_is_an_error():
    step = tf.function(lambda x: tf.strings.length(tf.strings.as_string(x)), autograph=False)
    with pytest.raises(GraphError, match="XLA cannot compile"):
        compiled(step.get_concrete_function(X).graph, batch=1)
