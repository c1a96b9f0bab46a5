"""Traces of steps that show the bytes they need: plain, or with the least memory, in any number of
microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graph_tools.graph.capture import capture
from graph_tools.tf_private import autodiff
from memsaving_gradients.analysis.fitting.rehearsal import held_by_stalled
from memsaving_gradients.analysis.fitting.variants import Variant
from memsaving_gradients.analysis.study import Study
from memsaving_gradients.engine.options import Options
from memsaving_gradients.errors import ArgumentError, MemorySavingError

__all__ = ["Rung", "Steps", "bytes_of_specs"]


@dataclass(frozen=True)
class Rung:
    """The bytes and the time of a technique, for a number of microbatches.

    Attributes
    ----------
    need, plain
        Bytes that the gradients need, and that they need if nothing is recomputed.
    unsteady
        Bytes to leave free for a stalled thread, and for the copy of a microbatch.
    extra_time
        Time beyond a plain step of the whole batch, as a fraction of that step's time.
    """

    need: int
    plain: int
    unsteady: int
    extra_time: float


class Steps:
    """The steps of a variant, by number of microbatches.

    Parameters
    ----------
    variant
        The way to train.
    specs, examples
        The specs of a whole batch, and its number of examples.
    room
        A function that returns the bytes a step may take, for a variant and number of microbatches.
    """

    def __init__(
        self,
        variant: Variant,
        specs: Sequence[Any],
        examples: int,
        room: Callable[[Variant, int], int],
    ) -> None:
        self.variant, self.specs, self.examples, self.room = variant, specs, examples, room
        self._plain: dict[int, Rung] = {}
        self._least: dict[int, Rung] = {}
        self._seconds: float | None = None

    def plain(self, count: int) -> Rung:
        """Return the needs of a step that recomputes nothing."""
        if count not in self._plain:
            self._plain[count] = self._traced(count)[1]
        return self._plain[count]

    def least(self, count: int) -> Rung:
        """Return the needs of a step with the least memory that recomputation reaches."""
        if count not in self._least:
            study, plain = self._traced(count)
            self._plain[count] = plain
            found = study.least()
            self._least[count] = plain
            if found is not None and found.need < plain.need:
                room = self.room(self.variant, count) - plain.unsteady
                extra = study.extra_time(found.proposal)
                if found.need <= room:
                    extra = study.extra_within(room, found)
                seconds = study.graph.total_seconds * (1 + extra)
                self._least[count] = replace(
                    plain, need=found.need, extra_time=self._extra(count, seconds)
                )
        return self._least[count]

    def _traced(self, count: int) -> tuple[Study, Rung]:
        examples = -(-self.examples // count)
        specs = [
            tf.nest.map_structure(lambda leaf: _rows(leaf, examples), one) for one in self.specs
        ]
        study = self._study(specs, self.variant.options(cut=count > 1))
        seconds = study.graph.total_seconds
        if self._seconds is None and count == 1:
            self._seconds = seconds
        ops = capture(autodiff.ends_of(study.site.graph))
        unsteady = held_by_stalled(ops, study.site.options.batch)
        if count > 1:
            unsteady += bytes_of_specs(specs)
        plain = study.plain_budget
        return study, Rung(plain, plain, unsteady, self._extra(count, seconds))

    def _study(self, specs: Sequence[Any], options: Options) -> Study:
        try:
            return Study(self.variant.model, specs, options)
        except MemorySavingError:
            raise
        except Exception as error:
            # Keras and layers raise errors of any type for a batch they cannot use.
            shapes = ", ".join(str(tuple(spec.shape)) for spec in tf.nest.flatten(specs))
            raise ArgumentError(
                "batch",
                shapes,
                f"train_step cannot be traced with it ({_gist(error)}); give the parts of a batch"
                " as in fit, one after the other: x, y",
            ) from error

    def _extra(self, count: int, seconds: float) -> float:
        """Return the time of all microbatches beyond one plain pass, as a fraction of that."""
        assert self._seconds is not None
        return max(0.0, count * seconds / max(self._seconds, 1e-12) - 1)


def _gist(error: Exception) -> str:
    """Return the line that says what is wrong; before it, AutoGraph says where it happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    inside = [k for k, line in enumerate(lines[:-1]) if "Exception encountered when" in line]
    if inside:
        return lines[inside[-1] + 1]
    said = [line for line in lines if "Error: " in line]
    return (said or [f"{type(error).__name__}: {(lines or ['?'])[0]}"])[0]


def bytes_of_specs(specs: Sequence[Any]) -> int:
    """Return the bytes of a batch, given as tensor specs."""
    leaves = tf.nest.flatten(specs)
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in leaves)


def _rows(leaf: Any, examples: int) -> tf.TensorSpec:
    return tf.TensorSpec([examples, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))
