"""When weights move, with which slots; and arguments that cannot be used."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import memsaving_gradients as ms
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.sparsity.slots import slots_of
from tests.training.test_sparsity_models import X, Y, chain, compiled, dense, fitted, moving, pair

pytestmark = pytest.mark.filterwarnings("ignore::memsaving_gradients.errors.NothingSavedWarning")


@pytest.mark.parametrize(
    ("optimizer", "first"),
    [
        (lambda: keras.optimizers.Ftrl(0.1), [0.1, 0]),
        (lambda: keras.optimizers.Adagrad(0.1, 0.3), [0.3]),
        (lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)), [0, 0]),
        (lambda: keras.optimizers.Adam(lambda: 0.1), [0, 0]),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adagrad(0.1, 0.3)), [0.3]),
    ],
)
def test_slots_of_new_weights_begin_as_the_optimizers_do(
    optimizer: Any, first: list[float]
) -> None:
    sparse, _ = pair()
    compiled(sparse, optimizer())
    fitted(sparse, moving(), epochs=3)
    assert np.isfinite(sparse.store.values.numpy()).all()
    last = moving()
    last.set_model(sparse)
    last.rewire()
    new = sparse.store.values.numpy() == 0
    assert new.any()
    for slot, value in zip(slots_of(sparse.optimizer, sparse.store.values), first, strict=True):
        np.testing.assert_allclose(slot.numpy()[new], value)


def test_an_optimizer_that_cannot_be_made_again_says_so() -> None:
    class Strange(keras.optimizers.SGD):
        def __init__(self, must: int) -> None:
            super().__init__(0.1, momentum=0.9)

    sparse, _ = pair()
    with pytest.warns(UserWarning, match="those of new weights begin at zero"):
        fitted(compiled(sparse, Strange(1)), moving())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_weights_move_where_nobody_knows_how_long_an_epoch_is() -> None:
    def batches() -> Any:
        for _ in range(6):
            yield X, Y

    for epochs, times in ((1, 2), (3, 6)):
        sparse, _ = pair()
        data = tf.data.Dataset.from_generator(
            batches, output_signature=(tf.TensorSpec([32, 8]), tf.TensorSpec([32, 4]))
        )
        every_third = ms.keras.Reparameterize([(0, 3)], until=1)
        compiled(sparse).fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[every_third])
        assert every_third.rewirings == times


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "bfloat16"])
def test_everything_together(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        blocks = [
            part
            for _ in range(3)
            for part in (dense(16), layers.BatchNormalization(), layers.ReLU())
        ]
        sparse = ms.keras.sparsify(chain(*blocks, dense()), 0.5)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = keras.optimizers.Adam(1e-2)
    if policy == "bfloat16":
        optimizer = ms.keras.low_precision(optimizer)
    saving = ms.keras.MemorySavingGradients(
        microbatch=8, batch_norm="microbatch", checkpoints="memory"
    )
    weights = ms.keras.Reparameterize([(0, 2)], until=1, moved=0.1, threshold=0.05)
    compiled(sparse, optimizer)
    found = sparse.fit(X, Y, 16, 8, verbose=0, callbacks=[saving, weights])
    assert weights.rewirings == 8
    assert found.history["loss"][-1] < found.history["loss"][0]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("sparsity", [np.float32(0.5), np.float64(0.5), np.int64(0), 0])
def test_real_numbers_of_all_types(sparsity: Any) -> None:
    assert ms.keras.sparsify(chain(dense()), sparsity).store.total == (16 if sparsity else 32)


@pytest.mark.parametrize(
    "given",
    [
        {"layers": 5},
        {"layers": [["a"]]},
        {"dense": [3]},
        {"seed": "x"},
        {"seed": -1},
        {"seed": 1.5},
        {"sparsity": float("nan")},
        {"sparsity": True},
        {"sparsity": None},
    ],
)
def test_bad_arguments_of_sparsify(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(given))}="):
        ms.keras.sparsify(**{"model": chain(dense()), "sparsity": 0.5, **given})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"schedule": schedule}
            for schedule in (
                None,
                5,
                [5],
                (0, 100),
                {0: 100},
                [(0, "a")],
                [("0", 100)],
                [(NAN, 100)],
                [(-1, 100)],
                [(2, 100)],
                [(0, 1.5)],
                [(0, 0)],
                [(0, 1, 2)],
            )
        ),
        *(
            {name: bad}
            for name in ("until", "moved", "threshold")
            for bad in ("1", NAN, INF, None, 0)
        ),
        {"seed": "x"},
        {"seed": -1},
    ],
)
def test_bad_arguments_of_reparameterize(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(given))}="):
        ms.keras.Reparameterize(**given)


def test_models_that_do_not_fit() -> None:
    sparse, other = pair()
    weights = moving()
    weights.set_model(sparse)
    with pytest.raises(ArgumentError, match="has no optimizer.*compile it first"):
        weights.rewire()
    for model, optimizer, problem in (
        (chain(dense()), None, "is not sparse"),
        (3, None, "is not sparse"),
        (chain(keras.Sequential([sparse]), dense(8), other), None, "has 2 sparse models"),
        (sparse, "adam", "optimizer='adam': give a Keras optimizer"),
        (sparse, keras.optimizers.Adam(), "with slots: optimizer.build"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            ms.keras.sparse_bytes(model, optimizer)
