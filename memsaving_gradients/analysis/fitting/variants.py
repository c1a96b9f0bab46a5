"""Variants of a training, apart from recomputation and microbatches: residuals that are offloaded
or have fewer digits, batch normalization over microbatches, and lower precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from memsaving_gradients.analysis.fitting.precision import POLICY, in_lower_precision
from memsaving_gradients.analysis.study import SOME
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.training.keras_models import holds_gradients, normalizes_batches

__all__ = ["MAY", "Variant", "variants_of"]

#: Changes to results that users may allow, the least harmful first.
MAY = ("encode", "batch_norm", "precision")
ENCODE = "bfloat16"


@dataclass(frozen=True, eq=False)
class Variant:
    """A way to train, before recomputation and microbatches are chosen.

    Attributes
    ----------
    name
        A prefix for the names of techniques; an empty string for the unchanged model.
    model
        The model to trace.
    settings
        Arguments of ``MemorySavingGradients``.
    changes
        Its changes to results, by their names in `MAY`.
    plain, whole, cut
        Whether the search tries this variant without a plan; with the whole batch; in
        microbatches.
    holds_gradients
        Whether the model's optimizer reads all gradients before it uses the first.
    """

    name: str
    model: Any
    settings: Mapping[str, Any]
    changes: tuple[str, ...]
    plain: bool
    whole: bool
    cut: bool
    holds_gradients: bool

    def options(self, *, cut: bool) -> Options:
        """Return options for planning. Microbatches add up each gradient at once and hold none."""
        held = self.holds_gradients and not cut
        return Options(budget=SOME, hold_gradients=held, **self.settings)


def variants_of(
    model: Any, may: Sequence[str], offload: Any, *, skip: bool = False
) -> Iterator[Variant]:
    """Yield the variants of a training, the least harmful first: by the number of their changes,
    then in the order of ``may``.

    ``skip``: whether to leave out variants whose model cannot be copied, instead of raising.
    """
    normalized, held = normalizes_batches(model), holds_gradients(model.optimizer)
    lower: list[Any] = []
    for changes in _subsets(may):
        if "batch_norm" in changes and not normalized:
            continue
        # With the policy of lower precision, residuals have few digits already.
        if {"encode", "precision"} <= set(changes):
            continue
        if "precision" in changes and not lower:
            try:
                lower.append(in_lower_precision(model))
            except ArgumentError:
                if not skip:
                    raise
                continue
        settings = {"encode": ENCODE} if "encode" in changes else {}
        names = [f"residuals in {ENCODE}"] if "encode" in changes else []
        names += [POLICY] if "precision" in changes else []
        now = Variant(
            "".join(f"{name}, " for name in names),
            lower[0] if "precision" in changes else model,
            settings,
            changes,
            plain="encode" not in changes and "batch_norm" not in changes,
            whole="batch_norm" not in changes,
            cut=not normalized or "batch_norm" in changes,
            holds_gradients=held,
        )
        yield now
        if offload is not None:
            settings = {**settings, "offload": offload}
            yield replace(now, name=f"{now.name}offload, ", settings=settings, plain=False)


def _subsets(may: Sequence[str]) -> list[tuple[str, ...]]:
    return [some for count in range(len(may) + 1) for some in combinations(may, count)]
