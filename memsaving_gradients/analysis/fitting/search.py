"""`fit_to`: techniques of this package combined for a given memory, the least harmful first.

Techniques that change no gradient come first: plain training, recomputation, microbatches, both;
then the same with residuals on another device, if there is one. The search takes the fastest that
fits, by estimate. If none fits, it tries the changes that the user has allowed, one after the
other: residuals with fewer digits, batch normalization over microbatches, a policy of lower
precision. Steps are traced and planned; none runs. A step's bytes grow linearly with the batch. So
two traces give an estimate of the number of microbatches, and a third checks it. The chosen
candidate is rehearsed (:mod:`~memsaving_gradients.analysis.fitting.rehearsal`): traced as the
callback will trace it, with the optimizer. If it does not keep the memory, the next one is taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaving_gradients.analysis.fitting.arguments import checked_batch, checked_may, checked_model
from memsaving_gradients.analysis.fitting.fit import Candidate, Fit
from memsaving_gradients.analysis.fitting.rehearsal import Rehearsal, rehearse
from memsaving_gradients.analysis.fitting.steps import Rung, Steps, bytes_of_specs
from memsaving_gradients.analysis.fitting.variants import MAY, Variant, variants_of
from memsaving_gradients.analysis.study import MOST_PROOFS
from memsaving_gradients.budget import BATCHES, DeviceMemory, exact_bytes, parse_bytes
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError, BudgetError
from memsaving_gradients.training.keras_models import bytes_of
from memsaving_gradients.training.microbatches.pieces import Cut

__all__ = ["fit_to"]

PLAIN = "plain"


def fit_to(
    model: Any,
    *batch: Any,
    memory: int | str,
    may: Sequence[str] = (),
    offload: Any = None,
) -> Fit:
    """Find how to train a Keras model on a device with the given memory, without running a step.

    Parameters
    ----------
    model
        A compiled and built model. Its optimizer is built if necessary; nothing else changes.
    *batch
        The parts of a whole batch as ``train_step`` gets them, such as x and y: tensors, arrays or
        ``tf.TensorSpec``. Only shapes and dtypes matter. The bytes of a batch count twice, because
        the next batch is fetched during a step.
    memory
        The memory of the device: bytes, or a string with a unit.
    may
        The allowed changes to results: ``"encode"`` (residuals in ``bfloat16``), ``"batch_norm"``
        (statistics of microbatches instead of the batch), ``"precision"`` (the policy
        ``"mixed_bfloat16"``). No other change is made.
    offload
        The device for offloaded residuals, as for `memsaving_gradients.gradients`.

    Returns
    -------
    Fit
        The chosen way to train. Give ``fit.callback()`` to ``fit.model.fit``; ``print(fit)`` shows
        a table of all candidates.

    Raises
    ------
    BudgetError
        If nothing fits. The error names the least memory, and changes that would fit, if any.
    ArgumentError
        If an argument cannot be used; if ``"precision"`` is needed, and the model cannot be copied.
    EagerExecutionError
        If the model was compiled with ``run_eagerly=True``.

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
    allowed = checked_may(may)
    parse_bytes(memory, "memory")
    if elsewhere := Options(offload=offload).offload:
        # Raise now if the device cannot be used, and not only when the search needs it.
        elsewhere.name()
    checked_model(model)
    specs, examples = checked_batch(batch)
    search = _Search(specs, examples, _device(model, specs, memory))
    for variant in variants_of(model, allowed, offload):
        if (chosen := search.look_at(variant)) is not None:
            return Fit(search.device, chosen, tuple(search.found), variant.model, examples)
    raise search.nothing_fits(model, allowed, offload)


def _device(model: Any, specs: Sequence[Any], memory: int | str) -> DeviceMemory:
    if not model.optimizer.built:
        try:
            model.optimizer.build(model.trainable_variables)
        except ArgumentError as error:
            raise ArgumentError(
                "model",
                model.name,
                "was compiled with low_precision(...), and its weights have 32 bits, which"
                " 'precision' does not change; compile it with the optimizer itself, or call"
                " keras.config.set_dtype_policy('bfloat16') before you create the model",
            ) from error
    device = DeviceMemory(
        memory,
        bytes_of(model.variables),
        bytes_of(model.optimizer.variables),
        inputs=BATCHES * bytes_of_specs(specs),
    )
    device.check_room(
        "memory",
        "use a smaller batch, an optimizer with fewer slots, weights of 16 bits (low_precision) or"
        " sparse ones",
    )
    return device


@dataclass(frozen=True, eq=False)
class _Way:
    """A way to train: a candidate, by its place in the list, and the data to try it again."""

    variant: Variant
    technique: str
    count: int
    rung: Rung
    rung_of: Callable[[int], Rung]
    place: int


class _Search:
    """A search: the candidates tried so far, for one batch and one device."""

    def __init__(self, specs: Sequence[Any], examples: int, device: DeviceMemory) -> None:
        self.specs, self.examples, self.device = list(specs), examples, device
        self.found: list[Candidate] = []
        self.ways: list[_Way] = []

    def look_at(self, variant: Variant) -> Candidate | None:
        """Return the fastest candidate of a variant that keeps the memory; ``None``: none does."""
        here: list[_Way] = []
        for one in self._ways(variant):
            here.append(one)
            if not one.rung.extra_time and self._keeps(one):
                return self.found[one.place]
        while fits := [one for one in here if self._fits(one)]:
            one = min(fits, key=lambda way: (way.rung.extra_time, self.found[way.place].device))
            if self._keeps(one):
                return self.found[one.place]
            if 1 < one.count < self.examples:
                here[here.index(one)] = self._smaller(one)
        return None

    def _fits(self, one: _Way) -> bool:
        return self.found[one.place].device <= self.device.whole

    def _keeps(self, one: _Way) -> bool:
        """Return whether a way fits, and keeps the memory in a rehearsal. The rehearsal corrects
        the settings and the least device memory of its candidate."""
        return self._fits(one) and self._rehearsed(one, self.device)

    def _rehearsed(self, one: _Way, device: DeviceMemory) -> bool:
        budget = self._device(one.variant, one.count, device).left - one.rung.unsteady
        if one.technique != PLAIN and one.rung.need < one.rung.plain:
            # With a larger budget, the step would be plain, which is another way.
            budget = min(budget, one.rung.plain - 1)
        done = self._rehearsal(one, budget)
        found = self.found[one.place]
        enough = self._device(one.variant, one.count).enough_for(done.need + one.rung.unsteady)
        if done.keeps:
            settings = dict(found.settings)
            if one.technique != PLAIN:
                settings["budget"] = budget
            # A plan may fill a larger budget than it needs; a plain step needs all of its bytes.
            least = max(found.device, enough) if one.rung.need == one.rung.plain else found.device
            self.found[one.place] = replace(found, settings=settings, device=least)
            return True
        self.found[one.place] = replace(found, device=max(enough, device.whole + 1))
        return False

    def _rehearsal(self, one: _Way, budget: int) -> Rehearsal:
        variant, cut, buffers = one.variant, None, 0
        if one.count > 1:
            cut = Cut(-(-self.examples // one.count), batch_norm=_batch_norm(variant))
            buffers = bytes_of(variant.model.trainable_variables)
        options = replace(variant.options(cut=one.count > 1), budget=budget)
        return rehearse(variant.model, self.specs, options, cut, buffers)

    def _ways(self, variant: Variant) -> Iterator[_Way]:
        """Yield the ways of a variant, the simplest first. Leave out microbatches with checkpoints
        if one of the two alone fits, because both only take longer."""
        steps, fits = Steps(variant, self.specs, self.examples, self.room), False
        if variant.plain:
            yield self._way(variant, PLAIN, 1, steps.plain)
        if variant.whole:
            recomputed = self._way(variant, "checkpoints", 1, steps.least)
            yield recomputed
            fits = self._fits(recomputed)
        if not variant.cut or self.examples == 1:
            return
        if variant.plain or not variant.whole:
            plain = self._in_pieces(variant, "microbatches", steps.plain)
            yield plain
            fits = fits or self._fits(plain)
        if not fits:
            yield self._in_pieces(variant, "microbatches and checkpoints", steps.least)

    def _in_pieces(self, variant: Variant, technique: str, rung_of: Callable[[int], Rung]) -> _Way:
        """Return a way with as few microbatches as fit; if none fit, with single examples."""
        whole, half = rung_of(1), rung_of(2)
        rows = self.examples - self.examples // 2
        rate = (whole.need - half.need) / max(rows, 1)
        room = self.room(variant, 2) - half.unsteady - (whole.need - rate * self.examples)
        count = self.examples
        if rate > 0 and room > 0:
            count = min(self.examples, max(2, math.ceil(self.examples / (room / rate))))
        return self._pieces_from(count, variant, technique, rung_of)

    def _smaller(self, one: _Way) -> _Way:
        """Return the same way with more microbatches."""
        return self._pieces_from(_more(one.count), one.variant, one.technique, one.rung_of)

    def _pieces_from(
        self, count: int, variant: Variant, technique: str, rung_of: Callable[[int], Rung]
    ) -> _Way:
        for _ in range(MOST_PROOFS):
            count = min(self.examples, count)
            one = self._way(variant, technique, count, rung_of)
            if self._fits(one) or count == self.examples:
                return one
            self._forget(one)
            count = _more(count)
        return self._way(variant, technique, self.examples, rung_of)

    def _forget(self, one: _Way) -> None:
        """Remove ``one``, which must be the newest way, and its candidate."""
        assert one.place == len(self.found) - 1
        del self.found[-1], self.ways[-1]

    def _way(
        self, variant: Variant, technique: str, count: int, rung_of: Callable[[int], Rung]
    ) -> _Way:
        rung = rung_of(count)
        settings, device = dict(variant.settings), self._device(variant, count)
        name = technique
        if count > 1:
            size = -(-self.examples // count)
            name = f"{count} {technique} of {size}"
            settings["microbatch"] = size
            if (policy := _batch_norm(variant)) is not None:
                settings["batch_norm"] = policy
        one = _Way(variant, technique, count, rung, rung_of, len(self.found))
        needs = device.enough_for(rung.need + rung.unsteady)
        self.found.append(
            Candidate(f"{variant.name}{name}", settings, variant.changes, needs, rung.extra_time)
        )
        self.ways.append(one)
        return one

    def _device(
        self, variant: Variant, count: int, device: DeviceMemory | None = None
    ) -> DeviceMemory:
        """Return the device, with the buffer in which microbatches add up gradients."""
        buffers = bytes_of(variant.model.trainable_variables) if count > 1 else 0
        return replace(device or self.device, buffers=buffers)

    def room(self, variant: Variant, count: int) -> int:
        """Return the bytes that a step in ``count`` microbatches may take."""
        return max(0, self._device(variant, count).left)

    def _least(self) -> Candidate:
        """Return the candidate of least device memory, checked by rehearsals with that memory."""
        for _ in range(MOST_PROOFS):
            best = min(self.ways, key=lambda way: self.found[way.place].device)
            device = replace(self.device, value=self.found[best.place].device)
            if self._rehearsed(best, device):
                break
        return self.found[best.place]

    def nothing_fits(self, model: Any, may: Sequence[str], offload: Any) -> BudgetError:
        """Return the error for a memory too small. Its hint names changes that would fit."""
        best = self._least()
        would = self._would_do(model, may, offload)
        hint = (
            f"may={[*would.changes]} would fit ({would.technique}), but changes results; or "
            if would is not None
            else ""
        )
        return BudgetError(
            "memory",
            self.device.value,
            f"no allowed technique fits: {self.device.taken}, which leaves"
            f" {exact_bytes(max(self.device.left, 0))} for a step; the least device memory is"
            f" {exact_bytes(best.device)} ({best.technique}); {hint}use a larger device or a"
            " smaller batch",
            max(self.device.left, 0),
            best.device,
            1.0,
        )

    def _would_do(self, model: Any, may: Sequence[str], offload: Any) -> Candidate | None:
        """Return a candidate that fits, with changes that are not allowed; ``None``: none does."""
        rest = tuple(one for one in MAY if one not in may)
        for variant in variants_of(model, MAY, offload, skip=True) if rest else ():
            # The candidate is only for a hint: failures here must not hide the error.
            with contextlib.suppress(Exception):
                if set(variant.changes) - set(may) and (found := self.look_at(variant)):
                    return found
        return None


def _batch_norm(variant: Variant) -> str | None:
    return "microbatch" if "batch_norm" in variant.changes else None


def _more(count: int) -> int:
    """Return a larger number of microbatches, by a quarter and one."""
    return math.ceil(count * 1.25) + 1
