"""The rest of a step and gradients wait for each other: only the order in which ops run changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms
from graph_tools.editing.rewiring import Rewiring
from graph_tools.tf_private import autodiff, graphs
from memsaving_gradients.rewriting.optimizer_ops import Updates
from tests.engine.test_whole_step import OPTIMIZERS, each_optimizer
from tests.helpers.greedy import greedy
from tests.helpers.sampling import covering

WIDTH, LAYERS, ROWS = 48, 6, 96


class Momentum:
    """A momentum step written by hand, traced up to its end."""

    def __init__(
        self, more: Callable[[tf.Tensor, list[tf.Tensor]], Any] = lambda x, grads: []
    ) -> None:
        self.weights = [tf.Variable(tf.ones([64, 64])) for _ in range(3)]
        self.slots = [tf.Variable(tf.zeros([64, 64])) for _ in range(3)]

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            y = x
            for weight in self.weights:
                y = tf.tanh(y @ weight)
            grads = tf.gradients(y, self.weights)
            self.known = len(grads[0].graph.get_operations())
            self.grads = grads
            kept = more(y, grads)
            for weight, slot, grad in zip(self.weights, self.slots, grads, strict=True):
                with tf.name_scope("decayed"):
                    decayed = 0.9 * slot
                slot.assign(decayed + grad)
                weight.assign_sub(0.1 * slot)
            return kept

        self.graph = step.get_concrete_function(tf.ones([64, 64])).graph
        operations = self.graph.get_operations()[self.known :]
        self.border = min(graphs.creation_index(grad.op) for grad in self.grads)
        self.updates = Updates(
            operations, {grad.op for grad in self.grads}, autodiff.ends_of(self.graph), self.border
        )

    def reads(self, name: str) -> list[tf.Operation]:
        return [
            op
            for op in self.graph.get_operations()
            if op.name.startswith(name) and op.type == "ReadVariableOp"
        ]


def test_what_needs_no_gradient_waits_for_the_one_it_meets() -> None:
    step = Momentum()
    assert not any(op.control_inputs for op in step.reads("decayed"))
    assert step.updates.defer() == 3
    for op, grad in zip(step.reads("decayed"), step.grads, strict=True):
        assert [other.name for other in op.control_inputs] == [grad.op.name]
    assert len(step.updates.steps.order()) == len([*step.updates.steps])


def test_metrics_and_what_reads_activations_are_left_alone() -> None:
    def more(y: tf.Tensor, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.name_scope("metric"):
            kept = [y * 2.0]
        with tf.name_scope("activation"):
            return [*kept, y * 3.0 + grads[0]]

    step = Momentum(more)
    assert step.updates.defer() == 3
    assert not any(
        op.control_inputs for name in ("metric", "activation") for op in step.reads(name)
    )


def test_what_several_gradients_meet_waits_for_none_of_them() -> None:
    shared = tf.Variable(tf.ones([64, 64]))

    def more(y: tf.Tensor, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.name_scope("shared"):
            both = shared * 2.0
        return [both + grads[0], both + grads[2]]

    step = Momentum(more)
    assert step.updates.defer() == 3
    assert not step.reads("shared")[0].control_inputs


def test_an_update_ends_with_its_last_op() -> None:
    step = Momentum()
    step.updates.defer()
    ends = step.updates.ends()
    assert set(ends) == {grad.op for grad in step.grads}
    for ops in ends.values():
        assert "AssignSubVariableOp" in {op.type for op in ops}


def test_what_needs_several_gradients_ends_none() -> None:
    def more(y: tf.Tensor, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.name_scope("norm"):
            return [tf.linalg.global_norm(grads)]

    step = Momentum(more)
    ends = step.updates.ends()
    kinds = {op.type for ops in ends.values() for op in ops}
    assert kinds >= {"AssignSubVariableOp", "L2Loss"}
    assert not kinds & {"Pack", "Sum", "Sqrt"}


def test_views_of_all_gradients_together_are_read_past() -> None:
    def more(y: tf.Tensor, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        grads[:] = [grad * 1.0 for grad in tf.identity_n(grads)]
        return []

    step = Momentum(more)
    makers = {grad.op.inputs[0].op.inputs[step_k].op for step_k, grad in enumerate(step.grads)}
    updates = Updates(
        step.graph.get_operations()[step.known :], makers, autodiff.ends_of(step.graph), step.border
    )
    rewiring = Rewiring()
    updates.split(rewiring)
    assert len(rewiring.edges) == 3
    assert {grad.op.inputs[0].op for grad in step.grads} == makers
    assert set(updates.ends()) == makers


def trained(name: str, callback: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input([WIDTH]), *layers])
    model.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(4 * ROWS, WIDTH)).astype("f")
    callbacks = [] if callback is None else [callback]
    losses = model.fit(
        x, x, batch_size=ROWS, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
    )
    return [
        np.array(losses.history["loss"]),
        *model.get_weights(),
        *(np.asarray(variable) for variable in model.optimizer.variables),
    ]


@pytest.mark.usefixtures("exact")
# Keras 3.3 holds more bytes in an update of RMSprop, and the weights are small.
@pytest.mark.parametrize("name", each_optimizer("momentum", "clipped"))
def test_the_same_weights_and_slots(name: str) -> None:
    saving = ms.keras.MemorySavingGradients(budget=0.7, planner=greedy, batch_size=ROWS)
    for ours, plain in zip(trained(name, saving), trained(name, None), strict=True):
        np.testing.assert_array_equal(ours, plain)
    (plan,) = saving.plans
    assert plan.whole_step is not None
    assert plan.clones


def random_variables(count: int) -> list[tf.Variable]:
    numbers = (tf.random.stateless_normal([WIDTH, WIDTH], [k, 1]) for k in range(count))
    return [tf.Variable(number / 7) for number in numbers]


def loss_and_gradients(x: tf.Tensor, weights: list[tf.Variable], options: Any) -> Any:
    """Return the loss and gradients of residual layers; plain without options."""
    y = x
    for weight in weights:
        y = tf.tanh(y @ weight) + y
    loss = tf.reduce_sum(y)
    if not options:
        return loss, tf.gradients(loss, weights)
    return loss, ms.gradients(loss, weights, **options)


@pytest.mark.usefixtures("exact")
def test_gradients_that_are_returned_and_used_in_a_function_of_the_users() -> None:
    def run(**options: Any) -> list[np.ndarray]:
        weights = random_variables(LAYERS)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01)
        optimizer.build(weights)

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> Any:
            loss, grads = loss_and_gradients(x, weights, options)
            with tf.control_dependencies(grads[:1]):
                extra = tf.reduce_sum(grads[0]) + tf.reduce_sum(grads[-1])
            optimizer.apply_gradients(zip(grads, weights, strict=True))
            return loss, extra, grads[2]

        x = tf.random.stateless_normal([ROWS, WIDTH], [9, 9])
        found = [value.numpy() for _ in range(3) for value in step(x)]
        if options:
            (plan,) = ms.plans(step)
            assert plan.whole_step is not None
        return [*found, *(weight.numpy() for weight in weights)]

    for ours, plain in zip(run(budget=0.7, planner=greedy), run(), strict=True):
        np.testing.assert_array_equal(ours, plain)


def by_hand(update: Callable[..., Any], **options: Any) -> list[np.ndarray]:
    """Return the results of three steps with an update written by hand, then weights and slots."""
    variables = random_variables(2 * LAYERS)
    weights, slots = variables[:LAYERS], variables[LAYERS:]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        loss, grads = loss_and_gradients(x, weights, options)
        return [loss, *(update(weights, slots, grads) or ())]

    x = tf.random.stateless_normal([ROWS, WIDTH], [9, 9])
    found = [value.numpy() for _ in range(3) for value in step(x)]
    if options:
        assert ms.plans(step)
    return [*found, *(variable.numpy() for variable in variables)]


def waits_together(weights: Any, slots: Any, grads: Any) -> None:
    decayed = [0.9 * s + 0.01 * w for s, w in zip(slots, weights, strict=True)]
    with tf.control_dependencies(decayed):
        grads = tf.identity_n(grads)
    for w, s, g, d in zip(weights, slots, grads, decayed, strict=True):
        s.assign(d + g * 1.5)
        w.assign_sub(0.01 * s)


def constants(weights: Any, slots: Any, grads: Any) -> None:
    for w, s, g in zip(weights, slots, grads, strict=True):
        s.assign((g * 0.37) / tf.pow(1.7, 3.0))
        w.assign_sub(0.01 * s * tf.maximum(1.0, tf.constant(2.0) / 3.0))


def fused(weights: Any, slots: Any, grads: Any) -> None:
    for k, (w, s, g) in enumerate(zip(weights, slots, grads, strict=True)):
        made = tf.nn.bias_add(w @ slots[k - 1], s[0])
        s.assign([tf.sigmoid, tf.tanh, tf.nn.elu, tf.identity][k % 4](made) + g)
        w.assign_sub(0.01 * s)


def twice(weights: Any, slots: Any, grads: Any) -> list[tf.Tensor]:
    before = [tf.reduce_sum(s) for s in slots]
    for w, s, g in zip(weights, slots, grads, strict=True):
        s.assign(0.5 * s)
        w.assign(0.99 * w)
        s.assign_add(0.1 * g)
        w.assign_sub(s)
    return [*before, *(tf.reduce_sum(s) for s in slots)]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("update", "options"),
    covering(
        [waits_together, constants, fused, twice],
        [{"budget": 0.85, "planner": greedy}, {"checkpoints": "memory"}],
    ),
)
def test_the_same_with_updates_by_hand(update: Callable[..., Any], options: Any) -> None:
    for ours, plain in zip(by_hand(update, **options), by_hand(update), strict=True):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.usefixtures("exact")
def test_what_guards_all_updates_goes_on_guarding_them() -> None:
    seen: list[tf.Variable] = []

    def update(weights: Any, slots: Any, grads: Any) -> None:
        seen[:] = slots
        bad = tf.debugging.check_numerics(tf.reduce_sum(grads[0]) / 0.0, "bad")
        with tf.control_dependencies([bad]):
            grads = tf.identity_n(grads)
        for w, s, g in zip(weights, slots, grads, strict=True):
            s.assign(tf.zeros_like(s) * g)
            w.assign_sub(tf.sqrt(tf.abs(0.9 * s + g * s)) + g)

    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        by_hand(update, budget=0.85, planner=greedy)
    assert all(np.any(slot.numpy()) for slot in seen)


def test_what_nobody_asked_for_is_not_waited_for() -> None:
    def more(y: tf.Tensor, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.name_scope("dead"):
            other = step_slots[0] * 2.0
        _ = other + grads[0]
        return [tf.reduce_sum(other)]

    step_slots = [tf.Variable(tf.zeros([64, 64]))]
    step = Momentum(more)
    assert step.updates.defer() == 3
    assert not step.reads("dead")[0].control_inputs


@pytest.mark.usefixtures("exact")
def test_the_same_where_a_gradient_is_a_value_of_the_forward_pass() -> None:
    """The gradient with respect to a factor is the other factor, whose kernels are fused."""

    def run(checkpoints: Any) -> list[np.ndarray]:
        factor, slot = (tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(2))
        weights = random_variables(LAYERS)

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> tf.Tensor:
            y = x
            for weight in weights:
                y = tf.sigmoid(tf.nn.bias_add(y @ weight, weight[0]))
            loss = tf.reduce_sum(tf.math.multiply(y, factor))
            if checkpoints:
                grads = ms.gradients(y * factor, [factor, *weights], checkpoints=checkpoints)
            else:
                grads = tf.gradients(y * factor, [factor, *weights])
            slot.assign(0.9 * slot + grads[0])
            factor.assign_sub(0.1 * slot)
            return loss

        x = tf.random.stateless_normal([WIDTH, WIDTH], [9, 9])
        return [*(step(x).numpy() for _ in range(3)), factor.numpy(), slot.numpy()]

    for ours, plain in zip(run("memory"), run(None), strict=True):
        np.testing.assert_array_equal(ours, plain)
