"""Training graphs made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memsaving_gradients.schedules.training_graph import TrainingGraph

UNIT = 1


@dataclass
class _Op:
    reads: tuple[int, ...]
    sizes: tuple[int, ...]
    residual: str = "inputs"
    joins: bool = False
    expensive: bool = False
    clonable: bool = True
    view: bool = False
    forwards: bool = False


@dataclass
class Maker:
    """A maker of forward ops by hand, and of their backward ops by the chain rule.

    The backward op of a forward op reads the gradient of its output. In addition, ``residual`` says
    whether it reads the op's ``"inputs"``, its ``"output"``, both (``"both"``) or neither
    (``"none"``). It makes one gradient for each input that is not a source. The gradients of a
    value that several ops read are added, two at a time.
    """

    forwards: bool = False
    ops: list[_Op] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)

    def op(self, *reads: int, size: int | tuple[int, ...] = UNIT, **what) -> int:
        """Add an op; return the number of its first value (several sizes: several values)."""
        sizes = size if isinstance(size, tuple) else (size,)
        self.ops.append(_Op(reads, sizes, **{"forwards": self.forwards, **what}))
        first = len(self.producer)
        self.producer += [len(self.ops) - 1] * len(sizes)
        return first

    def source(self) -> int:
        """Add a value without bytes, such as a fed input."""
        return self.op(size=0, clonable=False)

    def graph(self, *, hold: bool = False, losses: tuple[int, ...] = ()) -> TrainingGraph:
        """Return the training graph; ``losses``: values to differentiate, by default the last."""
        ops = list(self.ops)
        reads = [op.reads for op in ops]
        size: list[int] = []
        storage: list[int] = []
        source: list[bool] = []
        for op in ops:
            for s in op.sizes:
                value = len(size)
                root = storage[op.reads[0]] if op.view else value
                storage.append(root)
                size.append(0 if op.view else s)
                source.append(source[root] if op.view else not op.reads)
        first_of: list[int] = []
        at = 0
        for op in ops:
            first_of.append(at)
            at += len(op.sizes)
        producer = list(self.producer)
        writes = [tuple(range(f, f + len(op.sizes))) for f, op in zip(first_of, ops, strict=True)]
        flags = [(op.clonable, op.joins, op.forwards, op.expensive) for op in ops]
        border = len(ops)

        def emit(read: tuple[int, ...], sizes: list[int], forwards: bool) -> tuple[int, ...]:
            made = tuple(range(len(size), len(size) + len(sizes)))
            for s in sizes:
                size.append(s)
                storage.append(len(storage))
                source.append(False)
                producer.append(len(reads))
            reads.append(read)
            writes.append(made)
            flags.append((False, False, forwards, False))
            return made

        losses = losses or (len(self.producer) - 1,)
        gradient = {v: emit((), [size[storage[v]]], False)[0] for v in losses}
        for i in reversed(range(border)):
            op = ops[i]
            known = [gradient[v] for v in writes[i] if v in gradient]
            wanted = [v for v in dict.fromkeys(op.reads) if not source[storage[v]]]
            if not known or not wanted:
                continue
            extra: tuple[int, ...] = ()
            if op.residual in ("inputs", "both"):
                extra += tuple(op.reads)
            if op.residual in ("output", "both"):
                extra += writes[i]
            made = emit((*known, *extra), [size[storage[v]] for v in wanted], op.forwards)
            for v, new in zip(wanted, made, strict=True):
                if v in gradient:
                    (new,) = emit((gradient[v], new), [size[storage[v]]], True)
                gradient[v] = new
        clonable, joins, forwards, expensive = (
            np.array(column, np.bool_) for column in zip(*flags, strict=True)
        )
        seconds = np.array([10.0 if e else 1.0 for e in expensive])
        return TrainingGraph(
            first_backward=border,
            reads=reads,
            writes=writes,
            producer=np.array(producer, np.int64),
            storage=np.array(storage, np.int64),
            size=np.array(size, np.int64),
            source=np.array(source, np.bool_),
            clonable=clonable,
            joins=joins,
            forwards=forwards,
            fuses=np.zeros(len(reads), np.bool_),
            seconds=seconds,
            expensive=expensive,
            ends=tuple(sorted({producer[v] for v in losses})),
            targets=tuple(sorted(gradient.values())) if hold else (),
        )


def chain(sizes, *, residual="inputs", forwards=False) -> TrainingGraph:
    """Return a chain of ops with outputs of these bytes."""
    make = Maker(forwards)
    at = make.source()
    for size in sizes:
        at = make.op(at, size=size, residual=residual)
    return make.graph()


def residual_chain(n: int, *, forwards=True, size=UNIT) -> TrainingGraph:
    """Return n blocks ``x + f(x)``: two ops each; the addition needs no residual."""
    make = Maker(forwards)
    at = make.op(make.source(), size=size)
    for _ in range(n):
        inner = make.op(at, size=size)
        at = make.op(at, inner, size=size, residual="none")
    return make.graph()


def two_states(n: int) -> TrainingGraph:
    """Return a graph with a state of two tensors, as in recurrences: no single tensor cuts it."""
    make = Maker()
    a = make.op(make.source())
    b = make.op(make.source())
    for _ in range(n):
        a, b = make.op(a, b), make.op(b, a)
    make.op(a, b, size=1)
    return make.graph()


def u_shape(n: int) -> TrainingGraph:
    """Return a graph that goes down n levels of shrinking bytes and up again, with a skip and a
    concatenation at each level."""
    make = Maker()
    at = make.source()
    skips = []
    for level in range(n):
        at = make.op(at, size=8 * 2 ** (n - level))
        skips.append((at, 8 * 2 ** (n - level)))
        at = make.op(at, size=8 * 2 ** (n - level - 1))
    for skip, size in reversed(skips):
        up = make.op(at, size=size)
        both = make.op(up, skip, size=2 * size, joins=True, residual="none")
        at = make.op(both, size=size)
    make.op(at, size=8)
    return make.graph()


def growing(n: int, *, size=4) -> TrainingGraph:
    """Return a graph in which every layer reads the concatenation of all before it (DenseNet)."""
    make = Maker()
    features = [make.op(make.source(), size=size)]
    for _ in range(n):
        whole = make.op(*features, size=size * len(features), joins=True, residual="none")
        features.append(make.op(whole, size=size))
    make.op(*features, size=1)
    return make.graph()


def with_draws(n: int) -> TrainingGraph:
    """Return a chain in which every third op multiplies by a mask that must not be recomputed."""
    make = Maker()
    at = make.op(make.source(), size=4)
    for k in range(n):
        if k % 3 == 2:
            mask = make.op(make.source(), size=4, clonable=False)
            bits = make.op(mask, size=1, residual="none")
            at = make.op(at, bits, size=4)
        else:
            at = make.op(at, size=4)
    return make.graph()


GRAPHS = {
    "chain": lambda: chain([1] * 30),
    "chain, outputs read": lambda: chain([1] * 30, residual="output"),
    "chain, both read": lambda: chain([1] * 30, residual="both", forwards=True),
    "unequal chain": lambda: chain([1 + 7 * (k % 5 == 0) + k % 3 for k in range(40)]),
    "residual chain": lambda: residual_chain(20),
    "two states": lambda: two_states(15),
    "u": lambda: u_shape(4),
    "growing": lambda: growing(12),
    "draws": lambda: with_draws(24),
    "one op": lambda: chain([1]),
    "two ops": lambda: chain([5, 1]),
}
