"""Sessions feed tensors in the middle of a graph: copies see the fed value, or the session refuses
and names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import memsaving_gradients as ms

v1 = tf.compat.v1

pytestmark = [
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning"),
    pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.PlanNote"),
]

LAYERS, WIDTH = 12, 16
DATA = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)
FED = 0.3 * DATA[::-1]


class _Network:
    def __init__(self, gradients: Callable[..., Any]) -> None:
        draw = np.random.default_rng(1)
        with tf.Graph().as_default() as self.graph:
            self.x = h = v1.placeholder(tf.float32, [None, WIDTH])
            weights = []
            self.hidden: list[tf.Tensor] = []
            for _ in range(LAYERS):
                value = draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4
                weights.append(v1.placeholder_with_default(value, value.shape))
                h = tf.tanh(h @ weights[-1])
                self.hidden.append(h)
            self.grads = gradients(tf.reduce_mean(h**2), weights, self.hidden)

    def run(self, fetch: Any, feed: dict[tf.Tensor, Any]) -> Any:
        with v1.Session(graph=self.graph) as session:
            return session.run(fetch, feed)


@pytest.fixture(scope="module")
def plain() -> _Network:
    return _Network(lambda y, xs, _: tf.gradients(y, xs))


@pytest.mark.parametrize(
    "options", [{}, {"checkpoints": None}, {"checkpoints": "list"}, {"budget": 0.7}], ids=str
)
def test_a_fed_tensor_is_seen_or_refused(plain: _Network, options: dict[str, Any]) -> None:
    def gradients(y: tf.Tensor, xs: Any, hidden: list[tf.Tensor]) -> Any:
        chosen = hidden[2::4] if options.get("checkpoints") == "list" else None
        return ms.gradients(y, xs, **options | ({"checkpoints": chosen} if chosen else {}))

    ours = _Network(gradients)
    answers = []
    for k in range(LAYERS):
        feed = {ours.x: DATA, ours.hidden[k]: FED}
        if not ours.graph.is_feedable(ours.hidden[k]):
            with pytest.raises(ValueError, match=f"{ours.hidden[k].name} may not be fed"):
                ours.run(ours.grads, feed)
            answers.append("refused")
            continue
        found = ours.run(ours.grads, feed)
        expected = plain.run(plain.grads, {plain.x: DATA, plain.hidden[k]: FED})
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        # Gradients of later tensors do not need the input before the fed tensor.
        alone = ours.run(ours.grads[k + 1 :], {ours.hidden[k]: FED}) if k + 1 < LAYERS else []
        for a, b in zip(alone, expected[k + 1 :], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        answers.append("seen")
    assert "refused" in answers
    (plan,) = ms.plans(ours.graph)
    kept = {d.tensor for d in plan.decisions if d.fate == "keep"}
    assert {h.name for h, a in zip(ours.hidden, answers, strict=True) if a == "refused"}.isdisjoint(
        kept
    )
    if options.get("checkpoints") == "list":
        assert [k for k, answer in enumerate(answers) if answer == "seen"] == [2, 6, 10, 11]


def test_what_is_taken_back_may_be_fed() -> None:
    """Undone attempts, and plain gradients, forbid no feeding."""
    ours = _Network(lambda y, xs, _: ms.gradients(y, xs, budget=1.0))
    assert all(ours.graph.is_feedable(h) for h in ours.hidden)


def test_what_users_forbid_stays_forbidden() -> None:
    from graph_tools.editing.rewiring import Rewiring

    with tf.Graph().as_default() as graph:
        x = tf.sin(v1.placeholder(tf.float32, [4]))
        y = tf.sin(x)
        graph.prevent_feeding(x)
        rewiring = Rewiring()
        rewiring.forbid_feeding([x, y])
        assert not graph.is_feedable(y)
        rewiring.undo()
        assert not graph.is_feedable(x) and graph.is_feedable(y)
        rewiring.redo()
        assert not graph.is_feedable(y)


def test_a_fed_place_that_is_made_for_it_is_kept() -> None:
    """The guarantees name this way out."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = h = v1.placeholder(tf.float32, [None, WIDTH])
        for k in range(LAYERS):
            h = tf.sin(tf.tanh(h))
            if k == LAYERS // 2:
                h = middle = v1.placeholder_with_default(h, h.shape)
        found = ms.gradients(tf.reduce_sum(h), [middle])
        expected = tf.gradients(tf.reduce_sum(h), [middle])
        feed = {x: DATA, middle: FED}
        np.testing.assert_allclose(*session.run([found[0], expected[0]], feed), rtol=1e-6)
        assert ms.plans(graph)[0].clones
