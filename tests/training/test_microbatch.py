"""Microbatches: the same gradients as the batch, in a loop, in less memory, or a loud error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError, HigherOrderError, NothingSavedWarning
from tests.helpers.fresh import fresh
from tests.helpers.sampling import covering, examples

ROWS, WIDTH = 24, 6


def data(rows: int = ROWS) -> tuple[tf.Tensor, tf.Tensor]:
    draw = np.random.default_rng(rows)
    x = draw.standard_normal((rows, WIDTH)).astype(np.float32)
    return tf.constant(x), tf.constant(x.sum(1, keepdims=True))


def weights(layers: int = 4) -> list[tf.Variable]:
    draw = np.random.default_rng(1)
    made = [draw.standard_normal((WIDTH, WIDTH)) for _ in range(layers)]
    return [tf.Variable(w.astype(np.float32) / 3) for w in [*made, made[0][:, :1]]]


def network(ws: list[tf.Variable]) -> Callable[..., tf.Tensor]:
    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        for w in ws[:-1]:
            x = tf.tanh(x @ w)
        return tf.reduce_mean((x @ ws[-1] - y) ** 2)

    return loss


def slopes(loss: Callable[..., Any], ws: Any, how: str = "tape", **function: Any) -> Any:
    """Return a function that computes the loss and its gradients."""

    @tf.function(**function)
    def step(*batch: tf.Tensor) -> Any:
        if how == "tape":
            with tf.GradientTape() as tape:
                value = loss(*batch)
            return value, tape.gradient(value, ws)
        value = loss(*batch)
        return value, tf.gradients(value, ws)

    return step


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance, tolerance
        )


@given(rows=st.integers(1, 40), size=st.integers(1, 45), known=st.booleans())
@settings(max_examples=examples(25), deadline=None)
def test_any_size_of_any_batch_gives_the_gradients_of_the_batch(
    rows: int, size: int, known: bool
) -> None:
    ws = weights(2)
    loss = network(ws)
    sizes = None if known else [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1])]
    cut = slopes(ms.microbatch(loss, min(size, rows) if known else size), ws, input_signature=sizes)
    close(cut(*data(rows)), slopes(loss, ws)(*data(rows)))


@pytest.mark.parametrize(
    ("options", "how"),
    covering([{}, {"checkpoints": "memory"}, {"budget": 0.8}], ["tape", "gradients"]),
)
def test_gradients_of_a_loss(options: dict[str, Any], how: str) -> None:
    ws = weights(8)
    loss = network(ws)
    batch = data(240)
    step = slopes(ms.microbatch(loss, 60, **options), ws, how)
    close(step(*batch), slopes(loss, ws)(*batch))
    assert len(ms.plans(step)) == bool(options)


@pytest.mark.parametrize(("rows", "known"), covering([24, 22, 5], [True, False]))
def test_xla(rows: int, known: bool) -> None:
    ws = weights()
    loss = network(ws)
    size = 4 if known else 8
    signature = None if known else [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1])]
    step = slopes(ms.microbatch(loss, size), ws, jit_compile=True, input_signature=signature)
    close(step(*data(rows)), slopes(loss, ws)(*data(rows)))


def test_a_patch_in_force_saves_memory_in_each_microbatch() -> None:
    ws = weights(16)
    loss = network(ws)
    step = slopes(ms.microbatch(loss, 60), ws)
    with ms.patched(checkpoints="memory"):
        found = step(*data(240))
    close(found, slopes(loss, ws)(*data(240)))
    (plan,) = ms.plans(step)
    # The peak is for 60 rows, not for 240.
    assert plan.peak_plain < 60 * WIDTH * 4 * 16 * 3


def test_eager_code() -> None:
    ws = weights()
    loss = network(ws)
    with tf.GradientTape() as tape:
        value = ms.microbatch(loss, 7)(*data())
    close((value, tape.gradient(value, ws)), slopes(loss, ws)(*data()))


def test_arrays_keywords_and_structures() -> None:
    ws = weights()
    x, y = data()

    def step(data: dict[str, Any], *, scale: float) -> Any:
        with tf.GradientTape() as tape:
            value = network(ws)(data["x"], data["y"]) * scale
        return {"loss": value, "grads": tape.gradient(value, ws)}

    whole = tf.function(step)({"x": x, "y": y}, scale=2.0)
    arrays = {"x": x.numpy(), "y": y.numpy()}
    close(ms.microbatch(step, 5)(arrays, scale=2.0), whole)


def test_the_loss_is_part_of_a_larger_one() -> None:
    ws = weights()
    loss = network(ws)

    def larger(inner: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def total(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return 3.0 * inner(x, y) + sum(tf.reduce_sum(w**2) for w in ws)

        return total

    cut = slopes(larger(ms.microbatch(loss, 5)), ws)
    close(cut(*data()), slopes(larger(loss), ws)(*data()))


@pytest.mark.parametrize(("how", "reduce"), covering(["tape", "gradients"], ["mean", "sum"]))
def test_gradients_of_what_the_batch_was_computed_from(how: str, reduce: str) -> None:
    ws = weights()
    before = tf.Variable(tf.ones([WIDTH]))
    reduced = {"mean": tf.reduce_mean, "sum": tf.reduce_sum}[reduce]

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return reduced((tf.tanh(x @ ws[0]) @ ws[-1] - y) ** 2)

    def ahead(inner: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        return lambda x, y: inner(tf.sin(x * before), y)

    cut = slopes(ahead(ms.microbatch(loss, 5, reduce=reduce)), [before, ws[0]], how)
    close(cut(*data()), slopes(ahead(loss), [before, ws[0]])(*data()), 1e-4)


def test_slices_stay_slices() -> None:
    table = tf.Variable(tf.random.stateless_normal([50, WIDTH], [1, 2]))
    ids = tf.reshape(tf.range(ROWS) % 7, [-1, 1])

    def loss(ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((tf.reduce_sum(tf.gather(table, ids), [1, 2]) - y[:, 0]) ** 2)

    y = data()[1]
    for cut in (
        slopes(ms.microbatch(loss, 5), [table]),
        slopes(ms.microbatch(loss, 5), [table], "gradients"),
    ):
        (found,) = cut(ids, y)[1]
        assert isinstance(found, tf.IndexedSlices)
        assert found.values.shape[0] == ROWS
        close(found, slopes(loss, [table])(ids, y)[1][0])


def test_an_optimizer_gets_the_gradients_of_the_batch_once() -> None:
    import keras

    def trained(cut: bool) -> list[Any]:
        ws = weights()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(ws)
        loss = network(ws)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = loss(x, y)
            optimizer.apply_gradients(zip(tape.gradient(value, ws), ws, strict=True))
            return value

        run = tf.function(ms.microbatch(step, 7) if cut else step)
        values = [run(*data()) for _ in range(5)]
        assert int(optimizer.iterations) == 5
        return [*values, *ws]

    close(trained(True), trained(False))


def test_optimizers_of_tensorflow_1() -> None:
    def trained(cut: bool) -> list[Any]:
        ws = weights()
        optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
        loss = network(ws)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            value = loss(x, y)
            grads = tf.gradients(value, ws)
            optimizer.apply_gradients(zip(grads, ws, strict=True))
            return value

        run = tf.function(ms.microbatch(step, 7) if cut else step)
        return [run(*data()), run(*data()), *ws]

    close(trained(True), trained(False))


def test_a_session_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ws = weights()
        loss = network(ws)
        x, y = data()
        both = [tf.gradients(one(x, y), ws) for one in (loss, ms.microbatch(loss, 5))]
        session.run(tf.compat.v1.global_variables_initializer())
        plain, ours = session.run(both)
    close(ours, plain)


def test_reductions_of_results() -> None:
    def parts(x: tf.Tensor, y: tf.Tensor) -> Any:
        return {
            "mean": tf.reduce_mean(x),
            "sum": tf.reduce_sum(x),
            "count": tf.shape(x)[0],
            "rows": x * y,
            "none": None,
        }

    reduce = {"mean": "mean", "sum": "sum", "count": "sum", "rows": "concat", "none": "mean"}
    x, y = data()
    found = tf.function(ms.microbatch(parts, 7, reduce=reduce))(x, y)
    assert found.pop("none") is None
    close(found, {"mean": tf.reduce_mean(x), "sum": tf.reduce_sum(x), "count": ROWS, "rows": x * y})
    last = ms.microbatch(lambda x: x[-1], 7, reduce="last")(x)
    close(last, x[-1])


def test_arguments_that_every_microbatch_gets_whole() -> None:
    ws = weights()
    per_column = tf.linspace(0.5, 1.5, WIDTH)

    def loss(x: tf.Tensor, y: tf.Tensor, per_column: tf.Tensor) -> tf.Tensor:
        return network(ws)(x * per_column, y)

    cut = slopes(ms.microbatch(loss, 5, whole=["per_column"]), ws)
    close(cut(*data(), per_column), slopes(loss, ws)(*data(), per_column))
    with pytest.raises(ArgumentError, match="'x' has 24; .* whole=\\['per_column'\\]"):
        slopes(ms.microbatch(loss, 5), ws)(*data(), per_column)


def test_dropout_is_drawn_for_each_microbatch() -> None:
    dropped = tf.function(ms.microbatch(lambda x: tf.nn.dropout(x, 0.5), 4, reduce="concat"))(
        tf.ones([8, 64])
    )
    assert not np.array_equal(dropped[:4], dropped[4:])


def test_tensors_of_python_control_flow() -> None:
    """AutoGraph converts the given function as it converts the code around it."""
    w = tf.Variable(2.0)

    def loss(x: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for row in x:
            if row > 0:
                total += row * w
        return total

    x = tf.constant([1.0, -2.0, 3.0, 4.0])
    value, (grad,) = slopes(ms.microbatch(loss, 2, reduce="sum"), [w])(x)
    assert (float(value), float(grad)) == (16.0, 8.0)


def test_a_smaller_batch_is_said_and_taken_whole() -> None:
    ws = weights()
    loss = network(ws)
    with pytest.warns(NothingSavedWarning, match="a batch of 24 is smaller than size=25"):
        found = slopes(ms.microbatch(loss, 25), ws)(*data())
    close(found, slopes(loss, ws)(*data()))


def test_gradients_of_gradients_are_refused() -> None:
    ws = weights()
    loss = ms.microbatch(network(ws), 5)

    @tf.function
    def twice(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = loss(x, y)
            slope = tf.reduce_sum(inner.gradient(value, ws[0]) ** 2)
        return outer.gradient(slope, ws[0])

    with pytest.raises(HigherOrderError, match="compute the inner gradients inside"):
        twice(*data())


def test_gradient_penalties_inside() -> None:
    ws = weights()

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.tanh(x @ ws[0]) @ ws[-1]
        penalty = tf.reduce_mean(tf.reduce_sum(tape.gradient(value, x) ** 2, 1))
        return tf.reduce_mean((value - y) ** 2) + penalty

    wanted = slopes(loss, [ws[0], ws[-1]])(*data())
    close(slopes(ms.microbatch(loss, 5), [ws[0], ws[-1]])(*data()), wanted, 1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": 0}, "size=0: give a number"),
        ({"size": -3}, "size=-3"),
        ({"size": 2.5}, "size=2.5"),
        ({"size": True}, "size=True"),
        ({"size": "10"}, "size='10'"),
        ({"function": 3}, "function=3: is not a function"),
        ({"whole": "x"}, "give a list of names: \\['x'\\]"),
        ({"batch_norm": "group"}, "batch_norm='group': give one of None, 'microbatch', 'error'"),
        ({"budgt": "1GB"}, "budgt='1GB': no such option; did you mean 'budget'"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], problem: str) -> None:
    arguments = {"function": network(weights()), "size": 5, **changes}
    with pytest.raises(ArgumentError, match=problem):
        ms.microbatch(**arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"whole": ["z"]}, "no argument of this call has that name; its arguments are 'x', 'y'"),
        ({"whole": ["x", "y"]}, "no argument has examples to cut"),
        ({"reduce": "median"}, "reduce='median': give one of 'mean', 'sum', 'concat', 'last'"),
        ({"reduce": ["mean", "mean"]}, "does not fit the result of the function"),
        ({"reduce": "concat"}, "is a scalar and has no rows"),
    ],
)
def test_bad_calls(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        ms.microbatch(network(weights()), 5, **arguments)(*data())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x, y: x, "which may differ between microbatches; give reduce='concat'"),
        (lambda x, y: tf.shape(x), "has dtype int32, which has no mean"),
        (lambda x, y: tf.reduce_all(x > 0), "has dtype bool"),
        (lambda x, y: object(), "returns a object; return tensors"),
    ],
)
def test_results_that_cannot_be_put_together(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        ms.microbatch(function, 5)(*data(23))


def test_weights_that_a_step_changes_itself_are_refused() -> None:
    ws = weights()
    loss = network(ws)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        value = loss(x, y)
        for w, grad in zip(ws, tf.gradients(value, ws), strict=True):
            w.assign_sub(grad * 0.1)
        return value

    with pytest.raises(ArgumentError, match="is changed .* for each microbatch"):
        tf.function(ms.microbatch(step, 5))(*data())
    traced = tf.function(step)
    traced(*data())
    with pytest.raises(ArgumentError, match="is changed .* for each microbatch"):
        tf.function(ms.microbatch(lambda x, y: traced(x, y), 24))(*data())


def test_two_updates_in_one_step_are_refused() -> None:
    import keras

    ws = weights()
    loss = network(ws)
    optimizer = keras.optimizers.SGD()
    optimizer.build(ws)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        value = loss(x, y)
        for _ in range(2):
            optimizer.apply(tf.gradients(value, ws), ws)
        return value

    with pytest.raises(ArgumentError, match="hands gradients to optimizers 2 times"):
        tf.function(ms.microbatch(step, 5))(*data())


def test_ragged_batches_are_refused() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(ArgumentError, match="is a RaggedTensor, which cannot be cut"):
        ms.microbatch(lambda x: tf.reduce_sum(x), 1)(ragged)


def peaks() -> dict[str, int]:
    """Return transient peaks of a wide step, plain and in microbatches (in a fresh process)."""
    from graph_tools.memory.measure import measure_peak

    ws = [tf.Variable(tf.random.normal([64, 64]) / 8) for _ in range(16)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        for w in ws:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x**2)

    x = tf.random.normal([20_000, 64])
    steps = {"plain": slopes(loss, ws), "ours": slopes(ms.microbatch(loss, 2000), ws)}
    return {name: measure_peak(lambda step=step: step(x)).peak for name, step in steps.items()}


def test_memory_falls_to_that_of_a_microbatch() -> None:
    found = fresh("tests.training.test_microbatch:peaks")
    assert found["ours"] <= 0.15 * found["plain"]
