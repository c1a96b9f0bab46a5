"""Positions in a loop at which its state is kept, found by dividing its steps into segments.

The backward pass recomputes the steps between two kept states from the first of the two. With one
level of segments of ``leaf`` steps, every step runs twice. The loop holds T / leaf states and the
values that the steps of one segment keep. With leaf = √T this is the scheme of Chen, Xu, Zhang and
Guestrin ("Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).

With ``repeats`` levels of nested segments, every step runs ``repeats`` more times. The segments
follow *treeverse* (Griewank, "Achieving logarithmic growth of temporal and spatial complexity in
reverse automatic differentiation", 1992; "revolve", 2000). While n states may be kept, the first
segment is as long as n states and ``repeats - 1`` levels can reverse. The next one is as long as
n - 1 states can reverse, and so on:

    steps = leaf · C(n + repeats, repeats)

No other scheme with as many states and repetitions reverses more steps. A fixed number of levels
needs n ∝ T^(1/repeats); log T levels need n ∝ log T.

Scalar ops in the graph compute the positions, so the number of steps may be known at run time only.
Without any bound, segment c has (c + 1) · ``leaf`` steps: about √(2T / leaf) states, and at most
about √(2T · leaf) steps in a segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tensorflow as tf

__all__ = ["Cut", "Division", "Replayed", "leaf_for", "states_for", "steps_for"]


def steps_for(states: int, repeats: int, leaf: int) -> int:
    """Return how many steps can be reversed with ``states`` kept states and the first one.

    Examples
    --------
    >>> [steps_for(states, repeats=3, leaf=1) for states in range(5)]
    [1, 4, 10, 20, 35]
    """
    return leaf * math.comb(states + repeats, repeats)


def states_for(steps: int, repeats: int, leaf: int) -> int:
    """Return the fewest states, not counting the first one, with which ``steps`` can be reversed.

    Examples
    --------
    >>> states_for(1000, repeats=1, leaf=10), states_for(1000, repeats=3, leaf=1)
    (99, 17)
    """
    if repeats == 1:
        return max(0, -(-steps // leaf) - 1)
    states = 0
    while steps_for(states, repeats, leaf) < steps:
        states += 1
    return states


def leaf_for(steps: int, repeats: int, state: float, step: float) -> int:
    """Return the length of innermost segments for which a loop holds the fewest bytes.

    Parameters
    ----------
    steps
        Number of steps of the loop.
    repeats
        Levels of segments.
    state
        Bytes of one kept state.
    step
        Bytes that one step keeps for its gradient.

    Examples
    --------
    >>> leaf_for(1024, 1, state=1, step=1), leaf_for(1024, 1, state=1, step=16)
    (32, 8)
    >>> leaf_for(4096, 3, state=1, step=1)
    4
    """
    if repeats == 1:
        best = math.sqrt(steps * state / step) if step else float(steps)
        return min(max(1, round(best)), max(1, steps))
    _, leaf = min(
        (states_for(steps, repeats, leaf) * state + leaf * step, leaf)
        for leaf in range(1, 2 + math.isqrt(max(1, steps)))
    )
    return leaf


class Cut:
    """A division of a range of steps into segments; all numbers are int32 scalars."""

    def after(self, step: tf.Tensor) -> tf.Tensor:
        """Return the end of the segment that contains ``step`` (the range may end before)."""
        raise NotImplementedError

    def before(self, step: tf.Tensor) -> tf.Tensor:
        """Return the start of the segment that contains the step before ``step``."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Uniform(Cut):
    """A division into segments of equal length, from ``first`` on."""

    first: tf.Tensor
    leaf: tf.Tensor

    def after(self, step: tf.Tensor) -> tf.Tensor:
        return self.first + ((step - self.first) // self.leaf + 1) * self.leaf

    def before(self, step: tf.Tensor) -> tf.Tensor:
        return self.first + (step - 1 - self.first) // self.leaf * self.leaf


@dataclass(frozen=True, eq=False)
class Triangular(Cut):
    """A division into segments of 1, 2, 3, … times ``leaf`` steps, from step 0 on."""

    leaf: tf.Tensor

    def after(self, step: tf.Tensor) -> tf.Tensor:
        return self._start(self._number(step) + 1)

    def before(self, step: tf.Tensor) -> tf.Tensor:
        return self._start(self._number(step - 1))

    def _start(self, number: tf.Tensor) -> tf.Tensor:
        # int64: the product is twice the start, which may be one segment beyond an int32.
        wide = tf.cast(number, tf.int64)
        start = tf.cast(self.leaf, tf.int64) * (wide * (wide + 1) // 2)
        return tf.cast(tf.minimum(start, tf.int32.max), tf.int32)

    def _number(self, step: tf.Tensor) -> tf.Tensor:
        # The largest c with c (c + 1) / 2 <= step / leaf. It is exact, since double precision holds
        # 8 · units + 1 for every int32.
        units = tf.cast(step // self.leaf, tf.float64)
        return tf.cast((tf.sqrt(8.0 * units + 1.0) - 1.0) / 2.0, tf.int32)


@dataclass(frozen=True, eq=False)
class Binomial(Cut):
    """The treeverse division of ``length`` steps from ``first`` on. Each segment is later divided
    into ``repeats - 1`` more levels."""

    first: tf.Tensor
    length: tf.Tensor
    leaf: tf.Tensor
    repeats: int
    most_states: int

    def after(self, step: tf.Tensor) -> tf.Tensor:
        starts = self._starts()
        later = tf.where(starts > tf.cast(step - self.first, tf.int64), starts, tf.int64.max)
        # The last segment ends where the range does.
        end = tf.cast(self.length, tf.int64)
        return self.first + tf.cast(tf.minimum(tf.reduce_min(later), end), tf.int32)

    def before(self, step: tf.Tensor) -> tf.Tensor:
        starts = self._starts()
        earlier = starts < tf.cast(step - self.first, tf.int64)
        return self.first + tf.cast(tf.reduce_max(tf.where(earlier, starts, 0)), tf.int32)

    def _starts(self) -> tf.Tensor:
        """Return the starts of segments, relative to ``first``: one for each possible state, and
        the largest int64 for states that the range does not need."""
        leaf = tf.cast(self.leaf, tf.int64)
        reach = leaf * tf.constant(self._reaches(), tf.int64)
        enough = tf.cast(reach < tf.cast(self.length, tf.int64), tf.int64)
        states = tf.reduce_sum(enough)
        number = tf.range(self.most_states + 1, dtype=tf.int64)
        left = tf.maximum(states - number, -1)
        # left = -1 means that not even the first state is left: no step can be reversed.
        table = tf.concat([tf.zeros([1], tf.int64), reach], 0)
        starts = tf.gather(table, states + 1) - tf.gather(table, left + 1)
        return tf.where(number <= states, starts, tf.int64.max)

    def _reaches(self) -> list[int]:
        largest = 2**40
        return [
            min(steps_for(states, self.repeats, 1), largest)
            for states in range(self.most_states + 1)
        ]


@dataclass(frozen=True, eq=False)
class Blocks(Cut):
    """A division into ranges of ``length`` steps from step 0 on, each of which is divided as
    ``block`` divides the first one."""

    length: tf.Tensor
    block: Cut

    def after(self, step: tf.Tensor) -> tf.Tensor:
        first = step // self.length * self.length
        # The last segment of a range ends with the range, even if ``block`` ends it later.
        return first + tf.minimum(self.block.after(step - first), self.length)

    def before(self, step: tf.Tensor) -> tf.Tensor:
        first = (step - 1) // self.length * self.length
        return first + self.block.before(step - first)


@dataclass(frozen=True)
class Division:
    """A division of a loop's steps into levels of segments.

    Attributes
    ----------
    repeats
        The number of levels, which is how often each step runs again; 1: segments of equal length.
    steps
        The most steps; ``None``: known at run time, if at all.
    leaf
        Steps of an innermost segment; if `planned` is ``None``, the unit of `Triangular` segments.
    ratio
        The bytes of a step divided by the bytes of a state; used if `planned` is ``None``.
    told
        If ``steps`` is ``None``: the most steps as the user stated them, for which memory is
        planned; ``None``: not stated. More steps work, too, and take more memory.
    """

    repeats: int
    steps: int | None
    leaf: int
    ratio: float = 1.0
    told: int | None = None

    def __str__(self) -> str:
        how = f"{self.leaf} steps to a segment" if self.planned else "segments of √T steps"
        return how if self.repeats == 1 else f"{how}, {self.repeats} levels"

    @property
    def planned(self) -> int | None:
        """The most steps for which memory is planned; ``None``: unknown."""
        return self.told if self.steps is None else self.steps

    @property
    def most_states(self) -> int | None:
        """The most states kept at the outermost level, with the first one; ``None``: unknown."""
        if self.steps is None:
            return None
        return states_for(self.steps, self.repeats, self.leaf) + 1

    @property
    def most_leaf(self) -> int | None:
        """The most steps of an innermost segment; ``None``: unknown."""
        return None if self.planned is None else self.leaf

    def counts(self, usual_steps: int) -> list[int]:
        """Estimate into how many segments each level divides the one above, and, as the last
        number, the steps of an innermost segment.

        Examples
        --------
        >>> Division(1, 1024, 32).counts(0), Division(3, 4096, 4).counts(0)
        ([32, 32], [18, 8, 7, 4])
        >>> Division(1, None, 1).counts(64)
        [8, 8]
        """
        steps = self.planned or usual_steps
        known = self.planned is not None
        leaf = self.leaf if known else max(1, round(steps ** (1 / (self.repeats + 1))))
        found = [states_for(steps, self.repeats, leaf) + 1]
        left = steps / leaf / found[0]
        for level in range(1, self.repeats):
            found.append(max(1, round(left ** (1 / (self.repeats - level)))))
            left /= found[-1]
        return [*found, leaf]

    def cut(self, bound: tf.Tensor) -> Cut:
        """Return the outermost division of the loop; ``bound`` is the most steps, or negative
        where there is no bound."""
        zero = tf.constant(0)
        if self.steps is not None:
            return self._divide(zero, tf.constant(self.steps), tf.constant(self.leaf), self.repeats)
        if self.told is not None:
            length = tf.constant(self.told)
            return Blocks(length, self._divide(zero, length, tf.constant(self.leaf), self.repeats))
        length = tf.maximum(bound, 1)
        bounded = self._divide(zero, length, self._leaf_of(length, self.repeats), self.repeats)
        return _Either(bound >= 0, bounded, Triangular(tf.constant(self.leaf)))

    def inner(self, first: tf.Tensor, stop: tf.Tensor, level: int) -> Cut:
        """Return the division of one segment at ``level`` (from 1), the range from ``first`` to
        ``stop``."""
        repeats = self.repeats - level
        length = stop - first
        known = self.planned is not None
        leaf = tf.constant(self.leaf) if known else self._leaf_of(length, repeats)
        return self._divide(first, length, leaf, repeats)

    def _divide(self, first: tf.Tensor, length: tf.Tensor, leaf: tf.Tensor, repeats: int) -> Cut:
        if repeats == 1:
            return Uniform(first, leaf)
        steps = self.planned
        if steps is None:
            # The number of steps is an int32.
            most = states_for(tf.int32.max, self.repeats, 1)
        else:
            most = states_for(steps, self.repeats, self.leaf)
        return Binomial(first, length, leaf, repeats, most + 1)

    def _leaf_of(self, length: tf.Tensor, repeats: int) -> tf.Tensor:
        """Return a length of innermost segments that balances the bytes of states and steps."""
        root = tf.pow(tf.cast(length, tf.float32) / self.ratio, 1.0 / (repeats + 1))
        return tf.maximum(1, tf.cast(tf.math.ceil(root), tf.int32))


@dataclass(frozen=True)
class Replayed:
    """A loop that is replayed.

    Attributes
    ----------
    name
        The name of the loop's op.
    division
        The division of its steps, which decides where its state is kept.
    """

    name: str
    division: Division

    @property
    def steps(self) -> int | None:
        """The most steps; ``None``: known at run time."""
        return self.division.steps

    def __str__(self) -> str:
        steps = "an unknown number of steps" if self.steps is None else f"{self.steps:,} steps"
        if self.division.told is not None:
            steps = f"at most {self.division.told:,} steps (loop_steps=)"
        return f"{self.name}: {steps}, {self.division}"


@dataclass(frozen=True, eq=False)
class _Either(Cut):
    first: tf.Tensor
    one: Cut
    other: Cut

    def after(self, step: tf.Tensor) -> tf.Tensor:
        return tf.where(self.first, self.one.after(step), self.other.after(step))

    def before(self, step: tf.Tensor) -> tf.Tensor:
        return tf.where(self.first, self.one.before(step), self.other.before(step))
