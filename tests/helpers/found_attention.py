"""Steps with attention by its formula, plain and in blocks, and what was found in them."""

from __future__ import annotations

import tensorflow as tf

import memsaving_gradients as ms
from tests.helpers.attention_cases import assert_close
from tests.helpers.support import numbers

#: Longer than one block of the least size.
LONG = 150


def tensors(*shapes, dtype=tf.float32):
    return [tf.cast(numbers(f"found {i}", *shape), dtype) for i, shape in enumerate(shapes)]


def one(*shape):
    return tensors(shape)[0]


def loss_of(output):
    count = tf.cast(tf.range(tf.size(output)), tf.float32)
    weights = tf.reshape(tf.sin(count), tf.shape(output))
    return tf.reduce_sum(tf.tanh(output * tf.cast(weights, output.dtype)))


def stepped(function, variables=(), *, differentiate=None, compiled=False, signature=None):
    """Return a function of the output and the gradients of a loss; plain without
    ``differentiate``."""

    @tf.function(autograph=False, jit_compile=compiled, input_signature=signature)
    def step(*inputs):
        output = tf.identity(function(*inputs))
        xs = [x for x in inputs if x.dtype.is_floating] + [v.value for v in variables]
        grads = (differentiate or tf.gradients)(loss_of(output), xs)
        return [output, *(g for g in grads if g is not None)]

    return step


def in_blocks(*args, **options):
    return ms.gradients(*args, attention="blocks", **options)


def found_by(step):
    """Return how many attentions the last plan has in blocks, and why others are not."""
    plan = ms.plans(step)[-1]
    return len(plan.attention), dict(plan.attention_kept)


def same(function, *inputs, tolerance=1e-5, finds=1, compiled=False, signature=None, **options):
    """Check that plain and in blocks the results are the same; return the function in blocks."""
    plain = stepped(function, compiled=compiled, signature=signature)
    ours = stepped(
        function,
        differentiate=lambda y, xs: in_blocks(y, xs, **options),
        compiled=compiled,
        signature=signature,
    )
    assert_close(ours(*inputs), plain(*inputs), tolerance)
    assert blocks_in(ours, *inputs) == finds
    return ours


def blocks_in(step, *inputs):
    """Return how many softmax ops of the traced function no live op reads."""
    graph = step.get_concrete_function(*inputs).graph
    softmaxes = [op for op in graph.get_operations() if op.type == "Softmax"]
    live = ancestors(graph.outputs)
    return sum(op not in live for op in softmaxes)


def ancestors(tensors):
    seen = {t.op for t in tensors}
    stack = list(seen)
    while stack:
        op = stack.pop()
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return seen


def pairs_in(graph, length):
    """Return the names of live tensors with two long axes."""
    return [
        t.name
        for op in ancestors(graph.outputs)
        for t in op.outputs
        if t.shape.rank is not None and t.shape.as_list().count(length) > 1
    ]


def by_hand(query, key, value):
    scores = tf.matmul(query, key, transpose_b=True) / 4.0
    return tf.matmul(tf.nn.softmax(scores), value)


def dropped(query, key, value):
    weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
    return tf.matmul(tf.nn.experimental.stateless_dropout(weights, 0.5, seed=[1, 2]), value)
