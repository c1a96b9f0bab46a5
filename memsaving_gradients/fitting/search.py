"""`fit_to`: the techniques of this package composed for a stated memory, in the order of least harm.

What changes no gradient comes first: nothing at all, recomputation, microbatches, both; then the same with residuals on another device, if there is one.
Of those that fit, the fastest by estimate is taken. Only where none fits, and only what the user has allowed, is looked at next, one
after the other: residuals with fewer digits, batch normalization over microbatches, a policy of lower precision. Steps are traced and
planned, none is run. Needs grow along a line with the batch, so that two traces say about how many microbatches there must be, and a third makes sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from memsaving_gradients.device import DeviceMemory
from memsaving_gradients.errors import ArgumentError, BudgetError
from memsaving_gradients.fitting.fit import Candidate, Fit
from memsaving_gradients.fitting.variants import Variant, in_lower_precision, variants_of
from memsaving_gradients.options import Options
from memsaving_gradients.study import Study
from memsaving_gradients.units import exact_bytes

__all__ = ["MAY", "fit_to"]

#: What may be changed that matters to the result, in the order of least harm.
MAY = ("encode", "batch_norm", "precision")
#: Numbers of microbatches that are tried until one fits, at most.
MOST_TRIALS = 4


def fit_to(
    model: Any,
    *batch: Any,
    memory: int | str,
    may: Sequence[str] = (),
    offload: Any = None,
) -> Fit:
    """How to train a Keras model on a device of so much memory; no step is run.

    Parameters
    ----------
    model
        Compiled, and built.
    *batch
        What its ``train_step`` gets, such as x and y, of a whole batch: tensors, arrays or ``tf.TensorSpec``. Only shapes and dtypes matter.
    memory
        What the device has: bytes, or a string with a unit.
    may
        What may be changed that matters to the result: ``"encode"`` (residuals in ``bfloat16``), ``"batch_norm"`` (statistics of microbatches instead of the batch),
        ``"precision"`` (the policy ``"mixed_bfloat16"``). Nothing that is not named is changed.
    offload
        Where residuals may be offloaded to, as for `memsaving_gradients.gradients`.

    Returns
    -------
    Fit
        ``fit.callback()`` is for ``fit.model.fit``; ``print(fit)`` says what was chosen, and what else there is.

    Raises
    ------
    BudgetError
        If nothing fits; it names the least memory, and what would do if it were allowed.
    ArgumentError
        If an argument cannot be used.

    Examples
    --------
    >>> import keras, tensorflow as tf
    >>> import memsaving_gradients as ms
    >>> layers = [keras.layers.Dense(64, activation="gelu") for _ in range(12)]
    >>> model = keras.Sequential([keras.Input([64]), *layers])
    >>> model.compile("sgd", "mse")
    >>> x = tf.TensorSpec([4096, 64])
    >>> fit = ms.fit_to(model, x, x, memory="12 MB")
    >>> fit.chosen.changes, fit.chosen.device <= 12_000_000
    ((), True)
    """
    unknown = [one for one in may if one not in MAY] if not isinstance(may, str) else [may]
    if unknown:
        raise ArgumentError(
            "may", unknown[0], f"give a list of some of {', '.join(map(repr, MAY))}"
        )
    if elsewhere := Options(offload=offload).offload:
        # What cannot be used is an error now, and not when it is needed.
        elsewhere.name()
    examples = _examples(model, batch)
    device = _device(model, memory)
    search = _Search(batch, examples, device)
    for variant in variants_of(model, tuple(one for one in MAY if one in may), offload):
        if (chosen := search.look_at(variant)) is not None:
            changed = in_lower_precision(model) if "precision" in chosen.changes else model
            return Fit(device, chosen, tuple(search.found), changed, examples)
    raise search.nothing_fits(model, may, offload)


def _examples(model: Any, batch: Sequence[Any]) -> int:
    """How many examples a batch has."""
    if not getattr(model, "built", False) or getattr(model, "optimizer", None) is None:
        raise ArgumentError("model", model, "is no Keras model that is compiled and built")
    leaves = [leaf for leaf in tf.nest.flatten(list(batch)) if getattr(leaf, "shape", None)]
    rows = leaves[0].shape[0] if leaves else None
    if rows is None or any(leaf.shape[0] != rows for leaf in leaves):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise ArgumentError(
            "batch",
            shapes,
            "give what train_step gets, of a whole batch, with its size in all shapes",
        )
    return int(rows)


def _device(model: Any, memory: int | str) -> DeviceMemory:
    from memsaving_gradients.keras_models import bytes_of

    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    device = DeviceMemory(memory, bytes_of(model.variables), bytes_of(model.optimizer.variables))
    if device.left <= 0:
        raise ArgumentError(
            "memory",
            memory,
            f"{device.taken}: nothing is left for training, nor on any device below {device.enough_for(1):,} bytes; take an "
            "optimizer with fewer slots, weights of 16 bits (low_precision) or sparse ones",
        )
    return device


@dataclass(frozen=True)
class _Rung:
    """A technique for a number of microbatches: what its step needs (bytes), and what it takes beside a plain one of the whole batch."""

    need: int
    extra_time: float


class _Search:
    """Steps that were traced so far."""

    def __init__(self, batch: Sequence[Any], examples: int, device: DeviceMemory) -> None:
        self.batch, self.examples, self.device = list(batch), examples, device
        self.found: list[Candidate] = []

    def look_at(self, variant: Variant) -> Candidate | None:
        """The fastest way of a variant that fits; ``None``: none does."""
        here: list[Candidate] = []
        for one in self._ways(variant):
            here.append(one)
            self.found.append(one)
            if not one.extra_time and self._fits(one):
                break
        fits = [one for one in here if self._fits(one)]
        return min(fits, key=lambda one: (one.extra_time, one.device), default=None)

    def _fits(self, one: Candidate) -> bool:
        return one.device <= self.device.whole

    def _ways(self, variant: Variant) -> Iterator[Candidate]:
        """In the order of how much they do; what only costs more than what fits before it is left out."""
        steps, fits = _Steps(self, variant), False
        if variant.plain:
            yield self._candidate(variant, "plain", 1, steps.plain(1))
        if variant.whole:
            recomputed = self._candidate(variant, "checkpoints", 1, steps.least(1))
            fits = self._fits(recomputed)
            yield recomputed
        if not variant.cut or self.examples == 1:
            return
        if variant.plain or not variant.whole:
            plain = self._in_pieces(variant, "microbatches", steps.plain)
            fits = fits or self._fits(plain)
            yield plain
        if not fits:
            yield self._in_pieces(variant, "microbatches and checkpoints", steps.least)

    def _in_pieces(self, variant: Variant, technique: str, rung_of: Any) -> Candidate:
        """As few microbatches as fit; if none do, single examples."""
        whole, half = rung_of(1), rung_of(2)
        rows = self.examples - self.examples // 2
        rate = (whole.need - half.need) / max(rows, 1)
        room = self.room(variant, 2) - (whole.need - rate * self.examples)
        count = self.examples
        if rate > 0 and room > 0:
            count = min(self.examples, max(2, math.ceil(self.examples / (room / rate))))
        for _ in range(MOST_TRIALS):
            one = self._candidate(variant, technique, count, rung_of(count))
            if self._fits(one) or count == self.examples:
                return one
            count = min(self.examples, math.ceil(count * 1.25) + 1)
        return self._candidate(variant, technique, self.examples, rung_of(self.examples))

    def _candidate(self, variant: Variant, technique: str, count: int, rung: _Rung) -> Candidate:
        settings, device = dict(variant.settings), self._device(variant, count)
        if count > 1:
            size = -(-self.examples // count)
            technique = f"{count} {technique} of {size}"
            settings["microbatch"] = size
            if "batch_norm" in variant.changes:
                settings["batch_norm"] = "microbatch"
        return Candidate(
            f"{variant.name}{technique}",
            settings,
            variant.changes,
            device.enough_for(rung.need),
            rung.extra_time,
        )

    def _device(self, variant: Variant, count: int) -> DeviceMemory:
        """With the buffer of gradients that microbatches are added up in."""
        from memsaving_gradients.keras_models import bytes_of

        buffers = bytes_of(variant.model.trainable_variables) if count > 1 else 0
        return replace(self.device, buffers=buffers)

    def room(self, variant: Variant, count: int) -> int:
        """What a step of one of ``count`` microbatches may take, bytes."""
        return max(0, self._device(variant, count).left)

    def nothing_fits(self, model: Any, may: Sequence[str], offload: Any) -> BudgetError:
        """The error where nothing does; what is not allowed is looked at for it."""
        best = min(self.found, key=lambda one: one.device)
        rest = tuple(one for one in MAY if one not in may)
        would = None
        for variant in variants_of(model, MAY, offload) if rest else ():
            if set(variant.changes) - set(may) and (would := self.look_at(variant)) is not None:
                break
        hint = (
            f"may={[*would.changes]} would do ({would.technique}), and changes results; or "
            if would is not None
            else ""
        )
        least = best.device
        return BudgetError(
            "memory",
            self.device.value,
            f"nothing that may be done fits: {self.device.taken}, which leaves {exact_bytes(max(self.device.left, 0))} for a step; the least "
            f"device memory is {exact_bytes(least)} ({best.technique}); {hint}take a larger device or a smaller batch",
            max(self.device.left, 0),
            least,
            1.0,
        )


class _Steps:
    """The steps of a variant, by number of microbatches."""

    def __init__(self, search: _Search, variant: Variant) -> None:
        self.search, self.variant = search, variant
        self._plain: dict[int, _Rung] = {}
        self._least: dict[int, _Rung] = {}
        self._seconds: float | None = None

    def plain(self, count: int) -> _Rung:
        """Nothing is recomputed."""
        if count not in self._plain:
            self._plain[count] = self._traced(count)[1]
        return self._plain[count]

    def least(self, count: int) -> _Rung:
        """The least memory that recomputation comes to."""
        if count not in self._least:
            study, plain = self._traced(count)
            self._plain[count] = plain
            found = study.least()
            self._least[count] = plain
            if found is not None and found.need < plain.need:
                room = self.search.room(self.variant, count)
                extra = study.extra_time(found.proposal)
                if found.need <= room:
                    extra = study.extra_within(room, found)
                seconds = study.graph.total_seconds * (1 + extra)
                self._least[count] = _Rung(found.need, self._extra(count, seconds))
        return self._least[count]

    def _traced(self, count: int) -> tuple[Study, _Rung]:
        examples = -(-self.search.examples // count)
        specs = [
            tf.nest.map_structure(lambda leaf: _rows(leaf, examples), one)
            for one in self.search.batch
        ]
        study = Study(self.variant.model, specs, self.variant.options(cut=count > 1))
        seconds = study.graph.total_seconds
        if self._seconds is None and count == 1:
            self._seconds = seconds
        return study, _Rung(study.plain_budget, self._extra(count, seconds))

    def _extra(self, count: int, seconds: float) -> float:
        """Time of all microbatches, beside that of one plain pass."""
        assert self._seconds is not None
        return max(0.0, count * seconds / max(self._seconds, 1e-12) - 1)


def _rows(leaf: Any, examples: int) -> tf.TensorSpec:
    return tf.TensorSpec([examples, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))
