"""The fastest way through a chain of unequal stages within a budget, by dynamic programming.

A chain runs forward and then backward, stage by stage. A stage can run keeping its input only,
keeping nothing, or keeping the values that its backward reads: its history, in one of several
*options* (less kept, more to recompute inside). If a stage's history is missing when backward
arrives, stages run again from the last kept input. The least time to run stages s … t forward and
backward, with m bytes in addition to the input of s, is the smaller of two:

- *cut* at j: run s … j−1 once, keep the input of j, solve j … t with the remaining bytes, then
  solve s … j−1 with all of m;
- *history*: run s keeping its history, solve s+1 … t with the remaining bytes, run backward
  through s.

That is the recurrence of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2019, RR-9302, arXiv
1911.13214), with the options of Rockmate (Zhao et al. 2023). Three things differ. An input may be
several tensors, shared with other inputs (long skips), so a cut counts only bytes that the cut
before it does not keep. The program minimizes *extra* time: the step itself runs chains that end at
the last stage, for nothing, and the last stage of a recomputation need not make its output. And a
cut at j needs memory for the stages before j only, not for the stages behind.

Optimal in this model among schedules that keep a value until backward has used it. Bytes are
rounded up to slots, so promises hold in spite of rounding. With S slots and L stages, the table
takes S·L²/2 numbers and S·L³/6 additions, in L²/2 vectorized steps. One table answers for every
budget up to its top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memsaving_gradients.schedules.arrays import FloatArray, IntArray

__all__ = ["Action", "Chain", "Table"]


#: Fact: times that differ by less are the same in the ``float32`` of the tables.
CERTAIN = 1 - 1e-6


class Action(NamedTuple):
    """One step through a chain.

    ``"keep"``: run the stage, its input stays. ``"drop"``: run it, its input goes. ``"history"``:
    run it, its input and the history of this option stay. ``"backward"``: run backward through it;
    its history and its input go.
    """

    kind: Literal["keep", "drop", "history", "backward"]
    stage: int
    option: int = 0


@dataclass(frozen=True, eq=False)
class Chain:
    """A chain of L stages with up to O options each, in bytes and seconds. Options that a stage
    does not have save infinitely many bytes.

    Attributes
    ----------
    added
        ``[s, j]``: bytes that the kept input of j adds to the input of s, for s < j. (L, L)
    resident
        ``[s, t]``: bytes in addition to kept inputs and histories while stages of s … t run forward
        and backward is about to enter t: the gradient of its output. (L, L)
    running
        ``[s, k]``: the most bytes that stage k ≥ s takes while it runs keeping nothing, beyond the
        input of s: input, output and workspace. (L, L)
    saved
        ``[s, o]``: bytes that option o keeps beyond the input of s, including the output. (L, O)
    forward_peak
        ``[s, o]``: the most bytes beyond its input while s runs keeping option o. (L, O)
    backward_peak
        ``[s, o]``: the most bytes that backward through s takes beyond its input: history,
        gradients, temporaries. (L, O)
    run
        ``[s]``: seconds to run s once more, keeping nothing. (L,)
    run_history
        ``[s, o]``: seconds to run s once more, keeping option o. (L, O)
    run_last
        ``[s, o]``: the same, if no other stage needs its output. (L, O)
    inside
        ``[s, o]``: seconds of recomputation during backward through s. (L, O)
    """

    added: FloatArray
    resident: FloatArray
    running: FloatArray
    saved: FloatArray
    forward_peak: FloatArray
    backward_peak: FloatArray
    run: FloatArray
    run_history: FloatArray
    run_last: FloatArray
    inside: FloatArray

    @property
    def length(self) -> int:
        """Number of stages."""
        return len(self.run)

    @cached_property
    def most(self) -> float:
        """Bytes that are enough to keep every stage's first option."""
        before = np.concatenate([[0.0], np.cumsum(self.saved[:, 0])[:-1]])
        forward = before + self.resident[:, -1] + self.forward_peak[:, 0]
        return float(np.maximum(forward, before + self.backward_peak[:, 0]).max(initial=0.0))


class Table:
    """The least extra time of every part of a chain, for every number of slots.

    Parameters
    ----------
    chain
        The chain to run.
    top
        The largest budget that callers will ask for, bytes.
    slots
        The most slots in which to count these bytes.

    Attributes
    ----------
    unit
        Bytes of a slot.

    Examples
    --------
    Four stages; each input takes a byte, each history is the output. A gradient takes a byte, too.

    >>> import numpy as np
    >>> ones = np.ones((4, 4))
    >>> column = np.ones((4, 1))
    >>> chain = Chain(
    ...     added=ones, resident=ones, running=1 + np.triu(ones, 1), saved=column,
    ...     forward_peak=column, backward_peak=2 * column, run=np.ones(4), run_history=column,
    ...     run_last=0 * column, inside=0 * column)
    >>> table = Table(chain, top=5)
    >>> [table.seconds(budget) for budget in (2, 3, 4, 5)]
    [inf, 3.0, 1.0, 0.0]
    >>> [f"{kind} {stage}" for kind, stage, _ in table.actions(4)]
    ['history 0', 'keep 1', 'drop 2', 'history 3', 'backward 3',
     'history 1', 'history 2', 'backward 2', 'backward 1', 'backward 0']
    """

    def __init__(self, chain: Chain, top: float, slots: int = 500) -> None:
        self.chain = chain
        self.unit = _unit(chain, top, slots)
        self.top = int(top / self.unit)
        # Costs are exact to a millionth of the whole; half the memory makes twice the speed.
        self._least: list[npt.NDArray[np.float32]] = [np.zeros((0, 0), np.float32)] * chain.length
        self._first: list[IntArray] = [np.zeros(0, np.int64)] * chain.length
        self._added = self._round(chain.added)
        self._saved = self._round(chain.saved)
        self._resident = self._round(chain.resident)
        self._forward_peak = self._round(chain.forward_peak)
        self._backward_peak = self._round(chain.backward_peak)
        # The most bytes that running s … j−1 takes: [s, j].
        running = np.where(np.tri(chain.length, k=-1, dtype=bool), 0.0, chain.running)
        self._running = np.zeros((chain.length, chain.length + 1), np.int64)
        self._running[:, 1:] = self._round(np.maximum.accumulate(running, axis=1))
        self._until = np.concatenate([[0.0], np.cumsum(chain.run)])
        self._fill()

    def seconds(self, budget: float) -> float:
        """Return the least extra time within ``budget`` bytes in addition to the input of the first
        stage; infinite if there is none."""
        slot = self._slot(budget)
        return float(self._least[0][-1, slot]) if slot >= 0 else float("inf")

    @property
    def budgets(self) -> list[float]:
        """The budgets at which the least time changes, from the largest down to the least that is
        enough."""
        row = self._least[0][-1]
        finite = np.flatnonzero(np.isfinite(row))
        changes = finite[np.flatnonzero(np.diff(row[finite], prepend=np.float32(np.inf)))]
        return [float(slot * self.unit) for slot in changes[::-1]]

    def actions(self, budget: float) -> list[Action]:
        """Return the actions of a fastest way within ``budget`` bytes, which must not be less than
        the last of `budgets`."""
        return list(self._actions(self._slot(budget)))

    def _slot(self, budget: float) -> int:
        return min(int(budget / self.unit * (1 + 1e-12)), self.top)

    def _round(self, size: FloatArray) -> IntArray:
        # Sizes above the top become one slot more than the top. Whole multiples of the unit must
        # not be rounded up for their last bit.
        slots = np.ceil(np.minimum(size / self.unit * (1 - 1e-12), self.top + 1))
        return np.maximum(slots, 0).astype(np.int64)

    def _history(self, s: int) -> npt.NDArray[np.float32]:
        """Return the least time for s … t, all t, if s keeps its history by any option."""
        chain, top, length = self.chain, self.top, self.chain.length
        block = np.full((length - s, top + 1), np.inf, np.float32)
        slots = np.arange(top + 1)
        for o in range(chain.saved.shape[1]):
            need = np.maximum(
                self._resident[s, s:] + self._forward_peak[s, o], self._backward_peak[s, o]
            )
            if need[0] <= top:
                alone = 0.0 if s == length - 1 else chain.run_last[s, o]
                block[0, need[0] :] = np.minimum(block[0, need[0] :], alone + chain.inside[s, o])
            kept = self._saved[s, o]
            if s == length - 1 or kept > top:
                continue
            behind = self._least[s + 1][:, : top + 1 - kept] + np.float32(chain.inside[s, o])
            behind[:-1] += np.float32(chain.run_history[s, o])
            behind[slots[None, kept:] < need[1:, None]] = np.inf
            np.minimum(block[1:, kept:], behind, out=block[1:, kept:])
        return block

    def _fill(self) -> None:
        length, top = self.chain.length, self.top
        room = np.empty(length * (top + 1), np.float32)
        for s in reversed(range(length)):
            block = self._history(s)
            first = _first_finite(block)
            worst = np.maximum.accumulate(self._resident[s, ::-1])[::-1]
            for j in range(s + 1, length):
                # The row for s … j−1 is final: all cuts before j are done.
                row, kept = block[j - 1 - s], int(self._added[s, j])
                first[j - 1 - s] = _first_finite(row[None])[0]
                begin = max(int(first[j - 1 - s]), kept + int(self._first[j].min()))
                if begin > top:
                    continue
                right = self._least[j][:, begin - kept : top + 1 - kept]
                way = room[: right.size].reshape(right.shape)
                # The step itself runs chains that end at the last stage.
                run = np.float32(self._until[j] - self._until[s])
                np.add(right[:-1], row[begin:] + run, out=way[:-1])
                np.add(right[-1], row[begin:], out=way[-1])
                need = int(self._running[s, j])
                if worst[j] + need > begin:
                    short = self._resident[s, j:] + need
                    begins = np.maximum(begin, self._first[j] + kept)
                    for r in np.flatnonzero(short > begins).tolist():
                        way[r, : short[r] - begin] = np.inf
                target = block[j - s :, begin:]
                np.minimum(target, way, out=target)
            self._least[s] = block
            self._first[s] = _first_finite(block)

    def _actions(self, slots: int) -> Iterator[Action]:
        todo: list[tuple[int, int, int] | Action] = [(0, self.chain.length - 1, slots)]
        while todo:
            part = todo.pop()
            if isinstance(part, Action):
                yield part
                continue
            s, t, m = part
            j, o = self._choice(s, t, m)
            if j > s:
                yield Action("keep", s)
                yield from (Action("drop", k) for k in range(s + 1, j))
                todo += [(s, j - 1, m), (j, t, m - int(self._added[s, j]))]
                continue
            yield Action("history", s, o)
            todo.append(Action("backward", s, o))
            if s < t:
                todo.append((s + 1, t, m - int(self._saved[s, o])))

    def _choice(self, s: int, t: int, m: int) -> tuple[int, int]:
        """Return the cut (j, 0) or the option (s, o) of a fastest way from s to t."""
        chain, again = self.chain, t < self.chain.length - 1
        best, found = np.inf, (s, 0)
        for o in range(chain.saved.shape[1]):
            need = max(self._resident[s, t] + self._forward_peak[s, o], self._backward_peak[s, o])
            left = m - int(self._saved[s, o])
            if need > m or (s < t and left < 0):
                continue
            seconds = chain.inside[s, o]
            if s < t:
                seconds += self._least[s + 1][t - s - 1, left]
            if again:
                seconds += chain.run_history[s, o] if s < t else chain.run_last[s, o]
            if seconds < best:
                best, found = seconds, (s, o)
        cuts = np.arange(s + 1, t + 1)
        left = m - self._added[s, cuts]
        cuts = cuts[(left >= 0) & (self._running[s, cuts] + self._resident[s, t] <= m)]
        if len(cuts):
            right = np.array([self._least[j][t - j, m - self._added[s, j]] for j in cuts.tolist()])
            way = right + self._least[s][cuts - 1 - s, m]
            if again:
                way = way + (self._until[cuts] - self._until[s])
            k = int(np.argmin(way))
            # Histories save steps, so they win if times are equal up to the last bits.
            if way[k] < best * CERTAIN:
                return int(cuts[k]), 0
        return found


def _first_finite(block: npt.NDArray[np.float32]) -> IntArray:
    """Return the first finite column of each row, or the number of columns; rows never go from
    finite back to infinite."""
    return np.isinf(block).sum(axis=1)


def _unit(chain: Chain, top: float, slots: int) -> float:
    """Return the bytes of a slot, the least possible or a little more, with which rounding of kept
    bytes wastes least."""
    least = max(top / slots, 1e-300)
    tables = (
        chain.added,
        chain.resident,
        chain.running,
        chain.saved,
        chain.forward_peak,
        chain.backward_peak,
    )
    sizes = np.unique(np.concatenate([t[np.isfinite(t)].ravel() for t in tables]))
    if np.allclose(sizes, np.rint(sizes), rtol=0, atol=1e-9):
        common = float(np.gcd.reduce(np.rint(sizes).astype(np.int64), initial=0))
        if common >= least:
            return common
    kept = np.concatenate([chain.saved.ravel(), np.diag(chain.added, 1)])
    sizes, counts = np.unique(kept[np.isfinite(kept) & (kept > 0)], return_counts=True)
    large = sizes[sizes >= least]
    units = np.concatenate([[least], large / (large // least)])
    waste = [float((np.ceil(sizes / u * (1 - 1e-12)) * u - sizes) @ counts) for u in units]
    return float(units[int(np.argmin(waste))])
