"""The dynamic program over chains: against exhaustive search, against closed forms, and against its
own promises."""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass

import numpy as np
import pytest

from memsaving_gradients.planners.chains.rotor import Chain, Table


@dataclass(frozen=True)
class Network:
    """A chain by its tensors: the tensors in the input of each stage, and numbers for each stage
    and option."""

    bytes: tuple[int, ...]
    inputs: tuple[
        frozenset[int], ...
    ]  # of stages 0 … L; input 0 costs nothing, input L is the output
    gradient: tuple[int, ...]
    transient: tuple[int, ...]
    history: tuple[tuple[int, ...], ...]  # without the output
    forward_peak: tuple[tuple[int, ...], ...]
    backward_peak: tuple[tuple[int, ...], ...]
    run: tuple[int, ...]
    run_history: tuple[tuple[int, ...], ...]
    run_last: tuple[tuple[int, ...], ...]
    inside: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> int:
        return len(self.run)

    def size(self, tensors) -> int:
        return sum(self.bytes[v] for v in tensors)

    def chain(self) -> Chain:
        length = self.length

        def beyond(s, j):
            return self.size(self.inputs[j] - self.inputs[s])

        def columns(rows):
            return np.array(rows, float)

        saved = [[extra + beyond(s, s + 1) for extra in self.history[s]] for s in range(length)]
        return Chain(
            added=columns([[beyond(s, j) for j in range(length)] for s in range(length)]),
            resident=columns([self.gradient[1:] for _ in range(length)]),
            running=columns(
                [[beyond(s, k) + self.transient[k] for k in range(length)] for s in range(length)]
            ),
            saved=columns(saved),
            forward_peak=columns(self.forward_peak),
            backward_peak=columns(self.backward_peak),
            run=columns(self.run),
            run_history=columns(self.run_history),
            run_last=columns(self.run_last),
            inside=columns(self.inside),
        )


def random_network(seed: int, length: int, options: int) -> Network:
    draw = random.Random(seed)
    inputs: list[set[int]] = [set() for _ in range(length + 1)]
    sizes = []
    for j in range(1, length + 1):
        for _ in range(draw.randint(1, 2)):
            # Made before stage j; some are read much later.
            last = j if draw.random() < 0.7 else draw.randint(j, length)
            for k in range(j, last + 1):
                inputs[k].add(len(sizes))
            sizes.append(draw.randint(1, 3))
    history, inside, run_history = [], [], []
    run = [draw.randint(1, 5) for _ in range(length)]
    for s in range(length):
        kept = sorted((draw.randint(0, 6) for _ in range(options)), reverse=True)
        history.append(tuple(kept))
        inside.append(tuple(sorted(draw.randint(0, 3) * (o > 0) for o in range(options))))
        run_history.append(tuple(run[s] + draw.randint(0, 1) for _ in range(options)))
    output = [sum(sizes[v] for v in inputs[s + 1] - inputs[s]) for s in range(length)]
    gradient = (1, *(draw.randint(1, 3) for _ in range(length)))
    return Network(
        bytes=tuple(sizes),
        inputs=tuple(frozenset(i) for i in inputs),
        gradient=gradient,
        transient=tuple(output[s] + draw.randint(0, 4) for s in range(length)),
        history=tuple(history),
        forward_peak=tuple(
            tuple(output[s] + kept + draw.randint(0, 3) for kept in history[s])
            for s in range(length)
        ),
        backward_peak=tuple(
            tuple(kept + gradient[s] + gradient[s + 1] + draw.randint(0, 3) for kept in history[s])
            for s in range(length)
        ),
        run=tuple(run),
        run_history=tuple(run_history),
        run_last=tuple(tuple(max(x - draw.randint(0, 1), 0) for x in row) for row in run_history),
        inside=tuple(inside),
    )


def kept_bytes(net: Network, inputs, histories, beside=frozenset()) -> int:
    """Return the bytes of kept inputs, of kept histories with their outputs, and of ``beside``."""
    tensors = set(beside)
    for j in inputs:
        tensors |= net.inputs[j]
    for s, _ in histories:
        tensors |= net.inputs[s + 1]
    return net.size(tensors) + sum(net.history[s][o] for s, o in histories)


def exhaustive(net: Network, budget: int) -> float:
    """Return the least extra time of all ways to run forward and backward in which a kept value
    stays until it was used."""
    last = net.length - 1
    options = range(len(net.inside[0]))
    begin = (
        last,
        0,
        frozenset(),
        frozenset(),
    )  # next backward, position of forward, inputs, histories
    best = {begin: 0}
    queue = [(0, 0, begin)]
    number = 1
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        b, at, inputs, histories = state
        if b < 0:
            return seconds
        moves = []
        if b < last:  # the step itself runs everything once, from the first stage to the last
            starts = {0} | inputs | {s + 1 for s, _ in histories}
            moves += [(0, (b, c, inputs, histories)) for c in starts if c <= b]
        if at is not None and at <= b:
            again = b < last
            base = kept_bytes(net, inputs, histories, net.inputs[at]) + net.gradient[b + 1]
            if at < b and base + net.transient[at] <= budget:
                step = net.run[at] * again
                moves.append((step, (b, at + 1, inputs, histories)))
                moves.append((step, (b, at + 1, inputs | {at}, histories)))
            for o in options:
                if any(s == at for s, _ in histories) or base + net.forward_peak[at][o] > budget:
                    continue
                step = (net.run_history if at < b else net.run_last)[at][o] * again
                after = at + 1 if at < b else None
                moves.append((step, (b, after, inputs | {at}, histories | {(at, o)})))
        for s, o in histories:
            if s == b:
                rest = histories - {(s, o)}
                if kept_bytes(net, inputs, rest) + net.backward_peak[b][o] <= budget:
                    moves.append((net.inside[b][o], (b - 1, None, inputs - {b}, rest)))
        for step, new in moves:
            if seconds + step < best.get(new, math.inf):
                best[new] = seconds + step
                heapq.heappush(queue, (seconds + step, number, new))
                number += 1
    return math.inf


def follow(net: Network, actions) -> tuple[int, int]:
    """Return the peak and the extra time of ``actions``; fail if they are no valid way through the
    chain."""
    b, at = net.length - 1, 0
    inputs: set[int] = set()
    histories: dict[int, int] = {}
    peak = seconds = 0
    for kind, stage, option in actions:
        again = b < net.length - 1
        if kind == "backward":
            assert stage == b
            assert stage in histories
            assert stage == 0 or stage in inputs or stage - 1 in histories
            assert histories.pop(stage) == option
            need = kept_bytes(net, inputs, histories.items(), net.inputs[stage])
            peak = max(peak, need + net.backward_peak[stage][option])
            seconds += net.inside[stage][option]
            inputs.discard(stage)
            b, at = b - 1, None
            continue
        assert at == stage or stage in inputs or stage == 0 or stage - 1 in histories
        if kind != "drop":
            inputs.add(stage)
        base = kept_bytes(net, inputs, histories.items(), net.inputs[stage]) + net.gradient[b + 1]
        if kind == "history":
            peak = max(peak, base + net.forward_peak[stage][option])
            row = net.run_history if stage < b else net.run_last
            seconds += row[stage][option] * again
            histories[stage] = option
        else:
            peak = max(peak, base + net.transient[stage])
            seconds += net.run[stage] * again
        at = stage + 1
    assert b == -1
    return peak, seconds


@pytest.mark.parametrize(
    ("length", "options", "seeds"),
    [(1, 3, 5), (2, 3, 10), (3, 2, 20), (4, 2, 12), (5, 1, 8), (6, 1, 3)],
)
def test_the_least_time_is_that_of_exhaustive_search(length, options, seeds):
    feasible = recomputing = 0
    for seed in range(seeds):
        net = random_network(seed, length, options)
        chain = net.chain()
        table = Table(chain, chain.most)
        assert table.unit == 1
        for budget in range(math.ceil(chain.most) + 1):
            expected = exhaustive(net, budget)
            assert table.seconds(budget) == pytest.approx(expected), (seed, budget)
            if expected < math.inf:
                peak, seconds = follow(net, table.actions(budget))
                assert (peak <= budget, seconds) == (True, expected), (seed, budget)
                feasible += 1
                recomputing += expected > 0
    assert feasible > seeds
    assert recomputing or length == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slots", [10, 23, 60])
def test_rounding_never_breaks_a_promise(seed, slots):
    draw = random.Random(seed)
    net = random_network(seed, draw.randint(8, 25), draw.randint(1, 4))
    chain = net.chain()
    for share in (1.0, 0.5, 0.3):
        table = Table(chain, share * chain.most, slots)
        for budget in table.budgets:
            peak, seconds = follow(net, table.actions(budget))
            assert peak <= budget
            assert seconds == pytest.approx(table.seconds(budget), rel=1e-4)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 24])
def test_inputs_only_on_a_unit_chain_take_the_steps_of_revolve(length, slots):
    # Backward runs a stage again itself, so its history takes no memory. Its input takes memory in
    # place of the first input, which is free here and takes a slot there.
    free, column = np.zeros((length, length)), np.zeros((length, 1))
    chain = Chain(
        added=free + 1, resident=free, running=free, saved=column + 10**6, forward_peak=column,
        backward_peak=column, run=np.ones(length), run_history=column, run_last=column,
        inside=column,
    )  # fmt: skip
    steps = _revolve(length, slots)
    assert Table(chain, length + 1).seconds(slots) == steps - (length - 1)


def _revolve(length: int, slots: int) -> int:
    """Return a unit chain's forward steps by the closed form of Griewank and Walther (2000)."""
    repeats = 1
    while math.comb(slots + repeats, slots) < length:
        repeats += 1
    return repeats * length - math.comb(slots + repeats, slots + 1)


def _unit_chain(length: int) -> Chain:
    ones, column = np.ones((length, length)), np.ones((length, 1))
    return Chain(
        added=ones, resident=ones, running=1 + np.triu(ones, 1), saved=column, forward_peak=column,
        backward_peak=2 * column, run=np.ones(length), run_history=column, run_last=0 * column,
        inside=0 * column,
    )  # fmt: skip


def least_budget(chain):
    """Return about the least bytes, without the first stage's input, that a table has a way for."""
    top = chain.most
    while True:
        table = Table(chain, top)
        least = table.budgets[-1]
        if top - least <= 0.01 * top or table.unit <= 0.001 * least:
            return least
        top = least


def test_the_least_budget_of_a_unit_chain_is_three_at_any_length():
    # An input, the next one, a gradient: for each stage, forward starts from the beginning.
    for length in (3, 10, 60):
        chain = _unit_chain(length)
        assert least_budget(chain) == 3
        assert Table(chain, 3).seconds(3) == (length - 2) * (length - 1) / 2


def test_more_memory_never_takes_more_time():
    table = Table(random_network(3, 30, 3).chain(), 150)
    times = [table.seconds(budget) for budget in range(151)]
    assert times == sorted(times, reverse=True)
    assert [table.seconds(budget) for budget in table.budgets] == sorted(set(times) - {math.inf})


def test_too_little_memory_is_no_way():
    table = Table(_unit_chain(5), 2)
    assert table.budgets == []
    assert table.seconds(2) == math.inf
    assert table.seconds(-1) == math.inf


def test_least_budgets_of_unequal_chains_have_a_way_and_little_less_has_none():
    for seed in range(5):
        chain = random_network(seed, 20, 3).chain()
        least = least_budget(chain)
        exact = Table(chain, chain.most, slots=10**6)
        assert exact.seconds(least) < math.inf
        assert exact.seconds(least * 0.97) == math.inf


def test_time_grows_with_the_cube_of_the_number_of_stages():
    def spent(length):
        """Return the least time of three, as other processes may run at the same time."""
        chain, times = random_network(1, length, 4).chain(), []
        for _ in range(3):
            begin = time.process_time()
            table = Table(chain, 4 * length)
            times.append(time.process_time() - begin)
            assert table.budgets
        return min(times)

    assert spent(160) <= 2 * 4**3 * spent(40)
