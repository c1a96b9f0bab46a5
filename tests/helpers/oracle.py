"""The least extra time of any schedule of a small graph, by exhaustive search; written apart from
planners and simulator.

A state is the number of originals that have run, and the set of forward values alive. A transition
drops a value, recomputes a forward op, or runs the next original. Dijkstra's search finds the least
time to the end in which the bytes never exceed the budget. A forward value takes its bytes until it
is dropped, a gradient from its op to its last reader, an output while its op runs.
"""

from __future__ import annotations

import heapq

from memsaving_gradients.schedules.training_graph import TrainingGraph


def least_seconds(graph: TrainingGraph, budget: int, *, forward_first: bool = True) -> float:
    """Return the least extra seconds within ``budget``; ``inf`` if no schedule fits. Graphs must
    have no views and no in-place writes.

    ``forward_first``: nothing is recomputed before all forward ops have run.
    """
    assert not graph.forwards.any() and (graph.storage == range(len(graph.storage))).all()
    early = [v for v in range(len(graph.producer)) if graph.producer[v] < graph.first_backward]
    sizes = [0 if graph.source[v] else int(graph.size[v]) for v in range(len(graph.producer))]
    last_read = {v: op for op in range(graph.length) for v in graph.reads[op]}
    # Bytes of gradients alive while an op runs, including the op's own.
    late = [
        sum(
            sizes[v]
            for v in range(len(graph.producer))
            if graph.producer[v] >= graph.first_backward
            and graph.producer[v] <= op <= last_read.get(v, graph.producer[v])
        )
        for op in range(graph.length)
    ]
    waiting = [
        sum(
            sizes[v]
            for v in range(len(graph.producer))
            if graph.first_backward <= graph.producer[v] < op <= last_read.get(v, -1)
        )
        for op in range(graph.length + 1)
    ]
    done: set[tuple[int, frozenset[int]]] = set()
    queue: list[tuple[float, int, int, list[int]]] = [(0.0, 0, 0, [])]
    number = 0
    while queue:
        seconds, _, position, there = heapq.heappop(queue)
        state = (position, frozenset(there))
        if state in done:
            continue
        done.add(state)
        if position == graph.length:
            return seconds
        held = sum(sizes[v] for v in there)
        following = []
        if all(v in there for v in graph.reads[position] if v in early):
            new = [v for v in graph.writes[position] if v in early]
            beside = sum(sizes[v] for v in new)
            if held + beside + late[position] <= budget:
                following.append((seconds, position + 1, [*there, *new]))
        for value in there:
            following.append((seconds, position, [v for v in there if v != value]))
        again = 0 if forward_first and position < graph.first_backward else position
        for op in range(min(again, graph.first_backward)):
            missing = [v for v in graph.writes[op] if v not in there]
            if not graph.clonable[op] or not missing:
                continue
            if not all(v in there for v in graph.reads[op]):
                continue
            made = sum(sizes[v] for v in graph.writes[op])
            if held + made + waiting[position] <= budget:
                following.append((seconds + float(graph.seconds[op]), position, [*there, *missing]))
        for cost, at, values in following:
            number += 1
            heapq.heappush(queue, (cost, number, at, sorted(values)))
    return float("inf")
