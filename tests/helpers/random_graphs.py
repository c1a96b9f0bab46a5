"""Random training graphs for the tests of planners: small graphs for exhaustive search, and graphs
with every feature."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from hypothesis import strategies as st

from memsaving_gradients.schedules.order import run_order
from memsaving_gradients.schedules.training_graph import TrainingGraph
from tests.helpers.graphs import Maker


def small(seed: int, most: int = 7) -> TrainingGraph:
    """Return a random graph of up to ``most`` forward ops for exhaustive search: no views, nothing
    written in place."""
    draw = random.Random(seed)
    make = Maker()
    values: list[int] = []
    many = draw.randint(2, most)
    for k in range(many):
        read = draw.sample(values, min(len(values), draw.choice([1, 1, 1, 2, 2, 3])))
        kinds = ["inputs", "inputs", "output", "both", "none"]
        values.append(
            make.op(
                *(read or [make.source()]),
                size=draw.randint(1, 4),
                # The loss's backward op reads the loss's inputs: else it could be postponed.
                residual=draw.choice(kinds) if k < many - 1 else "inputs",
                clonable=draw.random() < 0.9,
            )
        )
    graph = make.graph()
    assert run_order(graph) == list(range(graph.length))
    return dataclasses.replace(
        rigid(graph), seconds=np.array([float(draw.randint(1, 5)) for _ in range(graph.length)])
    )


def rigid(graph: TrainingGraph) -> TrainingGraph:
    """Return ``graph`` with nothing written in place."""
    return dataclasses.replace(graph, forwards=np.zeros_like(graph.forwards))


@st.composite
def rich(draw, *, most: int = 14, sums: bool = False):
    """Forward ops with views, several outputs, concatenations, ops that must run once, and tiny
    values; their backward ops.

    One or several losses; some gradients are held to the end; some ops take scratch space.
    ``sums``: sums of gradients are single ops, which may add their addends as they arrive.
    """
    make = Maker()
    sizes = st.one_of(st.integers(1, 9), st.integers(1, 9).map(lambda n: 4000 * n))
    values = [make.op(make.source(), size=draw(sizes))]
    for _ in range(draw(st.integers(1, most))):
        read = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        kind = draw(st.sampled_from(["op", "op", "op", "view", "pair", "once", "join", "mask"]))
        if kind == "view":
            read = read[:1]
        size: int | tuple[int, int] = draw(sizes)
        if kind == "pair":
            size = (draw(sizes), draw(sizes))
        if kind == "mask":
            read = [make.op(make.source(), size=draw(sizes), clonable=False), *read]
        first = make.op(
            *read,
            size=size,
            view=kind == "view",
            joins=kind == "join",
            clonable=kind != "once",
            forwards=kind not in ("view", "join") and draw(st.booleans()),
            expensive=draw(st.booleans()),
            residual=draw(st.sampled_from(["inputs", "output", "both", "none"])),
        )
        values += [first, first + 1] if kind == "pair" else [first]
    last = make.op(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)), size=1)
    losses = {last, *draw(st.lists(st.sampled_from(values), max_size=2))}
    graph = make.graph(hold=draw(st.booleans()), losses=tuple(sorted(losses)))
    if draw(st.booleans()):
        scratch = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 9, graph.length)
        graph = dataclasses.replace(graph, workspace=scratch * draw(st.sampled_from([1, 1000])))
    # Views and sources take no time.
    works = np.array([any(graph.size[v] for v in made) for made in graph.writes])
    graph = dataclasses.replace(graph, seconds=graph.seconds * works)
    return long_sums(graph) if sums else graph


def long_sums(graph: TrainingGraph) -> TrainingGraph:
    """Return ``graph`` with each chain of additions of two gradients merged into one op, which may
    add its addends as they arrive."""
    border, producer = graph.first_backward, graph.producer.tolist()
    readers: dict[int, int] = {}
    for read in graph.reads:
        for value in read:
            readers[value] = readers.get(value, 0) + 1

    def adds(op: int) -> bool:
        sizes = {int(graph.size[v]) for v in (*graph.reads[op], *graph.writes[op])}
        late = all(producer[v] >= border for v in graph.reads[op])
        return (
            op >= border
            and late
            and len(set(graph.reads[op])) == 2
            and len(graph.writes[op]) == 1
            and len(sizes) == 1
        )

    reads = list(graph.reads)
    gone: set[int] = set()
    sums: set[int] = set()
    for op in range(border, graph.length):
        if not adds(op):
            continue
        sums.add(op)
        first = reads[op][0]
        before = producer[first]
        if before in sums and readers[first] == 1 and first not in graph.targets:
            reads[op] = (*reads[before], *reads[op][1:])
            gone.add(before)
    ops = [op for op in range(graph.length) if op not in gone]
    values = [v for v in range(len(producer)) if producer[v] not in gone]
    new_op = {op: k for k, op in enumerate(ops)}
    new_value = {v: k for k, v in enumerate(values)}

    def renumbered(rows):
        return [tuple(new_value[v] for v in rows[op]) for op in ops]

    return dataclasses.replace(
        graph,
        reads=renumbered(reads),
        writes=renumbered(graph.writes),
        producer=np.array([new_op[producer[v]] for v in values], np.int64),
        storage=np.array([new_value[int(graph.storage[v])] for v in values], np.int64),
        size=graph.size[values],
        source=graph.source[values],
        clonable=graph.clonable[ops],
        joins=graph.joins[ops],
        forwards=graph.forwards[ops],
        fuses=graph.fuses[ops],
        seconds=graph.seconds[ops],
        expensive=graph.expensive[ops],
        targets=tuple(new_value[v] for v in graph.targets),
        sums={new_op[op]: tuple(new_value[v] for v in reads[op]) for op in sums - gone},
        workspace=None if graph.workspace is None else graph.workspace[ops],
    )
