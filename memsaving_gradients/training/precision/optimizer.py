"""Optimizers of 16-bit variables that do not lose small updates.

Keras' optimizers compute in the type of the variable, in which 1 - 0.999 is 0, and round sums to
nearest. Here they see weights and slots as 32-bit variables, and compute in 32 bits. The values
that they write are rounded at random (:mod:`~memsaving_gradients.training.precision.rounding`). In
Kahan summation weights are rounded to nearest: the error is rounded at random, kept in 16 bits more
a weight, and added the next time. Slots of ``float16`` weights are kept in ``bfloat16``: the square
of a gradient of 1e-4 is zero in ``float16``, and a quotient by its root diverges.

Only one variable at a time exists in 32 bits. If the optimizer treats each element by itself, a
large variable is updated some rows at a time: the optimizer sees these rows in place of the
variable and its slots. The cost is a few elementwise ops on each variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from memsaving_gradients._keras import (
    AutocastScope,
    MultiOptimizer,
    Muon,
    unannounced_slots,
    value_of,
)
from memsaving_gradients.budget import is_integer
from memsaving_gradients.engine.options import check_one_of
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.precision.clipping import Clipping
from memsaving_gradients.training.precision.remaking import made_again
from memsaving_gradients.training.precision.rounding import LOW, number_of, rounded
from memsaving_gradients.training.precision.rows import Rows, Wide, stored_in
from memsaving_gradients.training.precision.runs import runs_of

__all__ = ["ROUNDINGS", "low_precision"]

ROUNDINGS = ("stochastic", "kahan", "nearest")
#: Optimizers that treat each element by itself: they update large variables in runs of rows.
ELEMENTWISE = {
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
}
_ADDS_UP = "adds up in variables of 16 bits, rounding to nearest"
#: Settings of optimizers that do not work in 16 bits: the reason, and what to use instead.
EXCLUDED = {
    "use_ema": (_ADDS_UP, ", and average float32 copies of the weights if you need it"),
    "gradient_accumulation_steps": (
        _ADDS_UP,
        ", and give microbatch= to MemorySavingGradients if you need it",
    ),
    "centered": (
        (
            "subtracts the square of one slot from another slot that is hardly larger, and in 16"
            " bits the difference may be negative"
        ),
        "",
    ),
}
_PACKAGE = "memsaving_gradients"


def low_precision(
    optimizer: Any, rounding: str = "stochastic", *, seed: int = 0
) -> keras.optimizers.Optimizer:
    """Return an optimizer like ``optimizer``, for weights and slots in 16 bits.

    Weights are in ``bfloat16`` or ``float16``. Slots are in ``bfloat16`` for both: it has the range
    of ``float32``, which second moments need.

    Parameters
    ----------
    optimizer
        A Keras optimizer that was not used, or the name of one.
    rounding
        ``"stochastic"``: written values are rounded at random, without bias. ``"kahan"``: weights
        are rounded to nearest, and their errors kept in 16 bits more a weight; slots are rounded at
        random. ``"nearest"``: as Keras does, but computed in ``float32``.
    seed
        The seed of random numbers, an int; it gives the same numbers in every run of a program, but
        other numbers under XLA.

    Returns
    -------
    keras.optimizers.Optimizer
        An optimizer for ``compile``. Variables of other types are updated as usual. Models saved
        with it can be loaded once this module is imported; for an optimizer of your own class, once
        low_precision was called with that class.

    Raises
    ------
    ArgumentError
        If an argument cannot be used, the optimizer was used before, or has a setting that does not
        work in 16 bits: averages of weights, accumulation of gradients, ``RMSprop(centered=True)``;
        when it is built, if no variable has 16 bits.

    Examples
    --------
    >>> import keras
    >>> import memsaving_gradients as ms
    >>> weight = keras.Variable([1.0], dtype="bfloat16")
    >>> optimizer = ms.keras.low_precision(keras.optimizers.SGD(1e-4), "kahan")
    >>> for _ in range(1000):
    ...     optimizer.apply([[1.0]], [weight])
    >>> float(weight[0])  # Keras would have left it at 1
    0.8984375
    """
    check_one_of("rounding", rounding, ROUNDINGS)
    if not is_integer(seed):
        raise ArgumentError("seed", seed, "give an int")
    optimizer = _found(optimizer)
    for name, (reason, way_out) in EXCLUDED.items():
        if getattr(optimizer, name, None):
            raise ArgumentError(
                name,
                getattr(optimizer, name),
                f"cannot be combined with low_precision: it {reason}; drop {name}{way_out}",
            )
    kind = _kind_of(type(optimizer))
    made: keras.optimizers.Optimizer = made_again(
        optimizer, kind, rounding=rounding, seed=int(seed)
    )
    return made


def _found(optimizer: Any) -> Any:
    """Return a Keras optimizer that low_precision can use; raise for any other."""
    try:
        found = keras.optimizers.get(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError("optimizer", optimizer, _NO_OPTIMIZER) from error
    if found is None:
        raise ArgumentError("optimizer", optimizer, _NO_OPTIMIZER)
    for kind, problem in _NOT_INSIDE.items():
        if isinstance(found, kind):
            raise ArgumentError("optimizer", found.name, problem)
    if found.built:
        raise ArgumentError(
            "optimizer", found.name, "has slots already; give one that was not used"
        )
    return found


if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Optimizer
else:
    # A mixin: the optimizer's class follows it in the method resolution order.
    _Optimizer = object


class _LowPrecision(_Optimizer):
    """A mixin that makes a class of optimizers work with variables of 16 bits."""

    def __init__(self, *args: Any, rounding: str = "stochastic", seed: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rounding, self.seed = rounding, seed
        self._slots: dict[Any, list[Any]] = {}
        self._lost: dict[Any, Any] = {}
        self._numbers: dict[Any, int] = {}
        #: Whether slots exist; while Keras makes them, their values are written as they are.
        self._ready = False
        #: While some rows are updated: their places, and the slots that the optimizer sees.
        self._places: tuple[int, int] | None = None
        self._seen: keras.StatelessScope | None = None
        self._last: Any = None
        self._clipping = Clipping()
        #: Whether weights decay at the moment; decay is rounded with random numbers of its own.
        self._decays = False

    def add_variable(
        self, shape: Any, initializer: Any = "zeros", dtype: Any = None, **kwargs: Any
    ) -> Any:
        """Make a variable of the optimizer; ``float16`` becomes ``bfloat16``, for its range."""
        if dtype is not None and tf.as_dtype(dtype) == tf.float16:
            dtype = "bfloat16"
        return super().add_variable(shape, initializer, dtype, **kwargs)

    def add_variable_from_reference(
        self, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a slot."""
        slot = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        self._slots.setdefault(self._var_key(reference_variable), []).append(slot)
        return slot

    def build(self, variables: Sequence[Any]) -> None:
        """Make slots."""
        if self._ready:
            return
        low = [v for v in variables if tf.as_dtype(v.dtype) in LOW]
        if not low:
            raise ArgumentError(
                "optimizer",
                self.name,
                "low_precision is for weights of 16 bits, and there are none: either drop it, or"
                " drop the policy that keeps weights in float32, and call"
                " keras.config.set_dtype_policy('bfloat16') before you create the model",
            )
        super().build(variables)
        for v, slot in unannounced_slots(self):
            slots = self._slots.setdefault(self._var_key(v), [])
            if all(slot is not known for known in slots):
                slots.append(slot)
        if isinstance(self, keras.optimizers.Nadam):
            self._widen_product()
        if self.rounding == "kahan":
            for v in low:
                self._lost[self._var_key(v)] = self.add_variable_from_reference(v, name="lost")
        # Random numbers differ by these numbers, which are the same in every trace.
        known = [*variables, *self.variables]
        self._numbers = {self._var_key(v): number for number, v in enumerate(known)}
        self._ready = True

    def _widen_product(self) -> None:
        # One number for all steps. Keras keeps it in the type of the first weight, and does not
        # track it inside of LossScaleOptimizer.
        self._untrack_variable(vars(self)["_u_product"])
        self._u_product: Any = keras.Variable(
            1.0, dtype="float32", trainable=False, name="u_product"
        )
        if not self._tracker.is_in_store("variables", self._u_product):
            self._track_variable(self._u_product)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Update variables; gradients are unscaled and clipped when they are used."""
        scale: float | None = getattr(self, "loss_scale_factor", None)
        self.loss_scale_factor: float | None = None
        # As in Keras, a limit that is not positive does not clip.
        norm, value = (
            most if most and most > 0 else None for most in (self.clipnorm, self.clipvalue)
        )
        self._clipping = Clipping(scale, norm, value)
        try:
            super().apply(grads, trainable_variables)
        finally:
            self.loss_scale_factor, self._clipping = scale, Clipping()

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        if self.global_clipnorm and self.global_clipnorm > 0:
            self._clipping = self._clipping.together(grads, self.global_clipnorm)
        return grads

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable, computing in 32 bits."""
        stored, sparse = stored_in(variable), isinstance(gradient, tf.IndexedSlices)
        if not sparse:
            gradient = tf.convert_to_tensor(gradient)
        parts = [gradient.values, gradient.indices] if sparse else [gradient]
        # Computations in 32 bits and random numbers wait for the gradient and for the previous
        # update.
        with tf.control_dependencies([*parts, *self._updated(parts[0])]):
            clipping = self._clipping.alone(gradient)
        if stored is None:
            super().update_step(clipping.whole(gradient), variable, learning_rate)
            return
        count = stored.shape[0] if stored.shape.rank else 1
        for rows in self._runs_of(stored):
            with tf.control_dependencies([*parts, *self._updated(parts[0])]), self._only(rows):
                wide = clipping.rows(gradient, rows.places, count)
                super().update_step(wide, Wide(rows), learning_rate)

    def _runs_of(self, stored: tf.Variable) -> list[Rows]:
        """Return the runs of rows of a variable that are updated together."""
        if not ELEMENTWISE.intersection(type(self).__bases__):
            return [Rows(stored)]
        runs = runs_of(stored.shape)
        return [Rows(stored, places) for places in runs] or [Rows(stored)]

    @contextmanager
    def _only(self, rows: Rows) -> Iterator[None]:
        """Show slots in 32 bits to the optimizer, and only these rows of the variable's slots."""
        if rows.places is None:
            with AutocastScope("float32"):
                yield
            return
        with AutocastScope("float32"), keras.StatelessScope() as self._seen:
            self._places = rows.places
            for slot in self._slots.get(rows.stored._unique_id, ()):
                stored = Rows(value_of(slot), rows.places)
                self._seen.add_update((slot, stored.read()))
            try:
                yield
            finally:
                self._places = self._seen = None

    def assign(self, variable: Any, value: Any) -> None:
        """Store a value."""
        rows = self._rows(variable)
        if rows is None:
            super().assign(variable, value)
        else:
            self._store(
                variable, rows, tf.cast(value, tf.float32) - tf.cast(rows.read(), tf.float32)
            )

    def assign_add(self, variable: Any, value: Any) -> None:
        """Store a sum."""
        rows = self._rows(variable)
        if rows is None:
            super().assign_add(variable, value)
        else:
            self._store(variable, rows, tf.cast(value, tf.float32))

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Store a difference."""
        rows = self._rows(variable)
        if rows is None:
            super().assign_sub(variable, value)
        else:
            self._store(variable, rows, -tf.cast(value, tf.float32))

    def _rows(self, variable: Any) -> Rows | None:
        """Return the rows of a 16-bit variable to write; ``None`` for any other variable."""
        if isinstance(variable, Wide):
            return variable.rows
        stored = stored_in(variable) if self._ready else None
        return None if stored is None else Rows(stored, self._places)

    def _store(self, variable: Any, rows: Rows, change: tf.Tensor) -> None:
        # One write after the other: each needs several times the variable's bytes, in 32 bits.
        with tf.control_dependencies([change, *self._updated(change)]):
            self._last = self._written(rows, change)
        if self._seen is not None and not isinstance(variable, Wide):
            with tf.control_dependencies(self._updated(change)):
                self._seen.add_update((variable, rows.read()))

    def _written(self, rows: Rows, change: tf.Tensor) -> Any:
        stored = rows.stored
        old, dtype = tf.cast(rows.read(), tf.float32), stored.dtype
        lost = self._lost.get(stored._unique_id)
        # Random numbers differ between runs of rows.
        first = rows.places[0] if rows.places else 0
        number = self._numbers.setdefault(stored._unique_id, len(self._numbers))
        drawn = number_of(self.seed, number, first, self._decays)
        seed = tf.stack([tf.constant(drawn, tf.int64), tf.cast(self.iterations.value, tf.int64)])
        if lost is not None:
            wanted = change + tf.cast(rows.of(value_of(lost)), tf.float32)
            new = tf.cast(old + wanted, dtype)
            # Rounded to nearest, equal changes would have equal errors, which add up.
            left = rounded(wanted - (tf.cast(new, tf.float32) - old), value_of(lost).dtype, seed)
            rows.write(left, into=value_of(lost))
        elif self.rounding == "nearest":
            new = tf.cast(old + change, dtype)
        else:
            new = rounded(old + change, dtype, seed)
        return rows.write(new)

    def _updated(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Return the op that wrote last, if it is in the graph of ``tensor``; else nothing."""
        last = self._last
        there = tf.is_symbolic_tensor(tensor) and isinstance(last, tf.Operation)
        return [last] if there and last.graph is tensor.graph else []

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        self._decays = True
        try:
            self._decay(variables)
        finally:
            self._decays = False

    def _decay(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            decay = self._decay_of(variable)
            if decay is None or not self._use_weight_decay(variable):
                continue
            rate = tf.cast(self.learning_rate, tf.float32) * decay
            stored = stored_in(variable)
            if stored is None:
                self.assign_sub(variable, tf.cast(variable, tf.float32) * rate)
                continue
            for rows in self._runs_of(stored):
                wide = Wide(rows)
                self.assign_sub(wide, tf.convert_to_tensor(wide) * rate)

    def _decay_of(self, variable: Any) -> float | None:
        if isinstance(self, Muon) and self._should_use_adamw(variable):
            return self.adam_weight_decay
        return self.weight_decay

    def get_config(self) -> dict[str, Any]:
        """Return the optimizer's own config, with the rounding and the seed."""
        return {**super().get_config(), "rounding": self.rounding, "seed": self.seed}


_NO_OPTIMIZER = (
    "is not a Keras optimizer; give one, such as keras.optimizers.Adam(1e-3), or the name of one,"
    " such as 'adam'"
)
#: Classes of optimizers that are refused, and why.
_NOT_INSIDE: dict[Any, str] = {
    _LowPrecision: "has low precision already; use it as it is",
    keras.optimizers.LossScaleOptimizer: (
        "scales losses; give its inner optimizer, and put LossScaleOptimizer around the result"
    ),
    MultiOptimizer: (
        "consists of several optimizers; give each of them, and put MultiOptimizer around the"
        " results"
    ),
}
_kinds: dict[type, Any] = {}


def _kind_of(kind: type) -> Any:
    """Return the low-precision class for optimizers of class ``kind``, which Keras can load."""
    if kind not in _kinds:
        name = kind.__name__
        if kind not in OPTIMIZERS:
            # A class of Keras, or of another module, may have the same name.
            name = f"({kind.__module__}.{kind.__qualname__})"
        name = f"LowPrecision{name}"
        made = type(name, (_LowPrecision, kind), {"__doc__": f"{kind.__name__} in 16 bits."})
        _kinds[kind] = keras.saving.register_keras_serializable(_PACKAGE, name)(made)
    return _kinds[kind]


#: All optimizers of Keras that can have low precision: saved models may name them.
OPTIMIZERS = tuple(
    kind
    for kind in vars(keras.optimizers).values()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and kind is not keras.optimizers.Optimizer
    and kind not in _NOT_INSIDE
)
for _kind in OPTIMIZERS:
    _kind_of(_kind)
