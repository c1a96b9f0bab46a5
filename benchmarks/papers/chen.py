"""Chen, Xu, Zhang and Guestrin 2016 (arXiv 1604.06174): a thousand layers, √n, log n, an LSTM.

- *ResNet.* The setting of `benchmarks.planning.paper`, planned. Before: the paper's strategy
  *sharing*, in GB of 2^30 bytes. After: on the card, with three times the parameters; ours is the
  fastest plan that leaves room for these within 7 GB.
- *Chains* of n layers, measured: the growth of the peak from 256 to 1024 layers; and, for 1024
  layers with ``planner="recursive"``, the peak in layers and the runs of a layer.
- *LSTM*: four layers of 1024 units, 64 steps, batch 64: unrolled, planned, against *sharing*,
  without the gradients of weights; and as a loop, measured, of `benchmarks.techniques.loops`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.experiment import Results
from benchmarks.measuring import peak
from benchmarks.networks import build
from benchmarks.papers.rows import Line, Work, in_process
from benchmarks.planning import paper
from benchmarks.planning.periodic import captured_step
from benchmarks.running import rows_of
from benchmarks.techniques import loops
from memsaving_gradients.planners import Limits, auto, chen
from memsaving_gradients.schedules.schedule import plain
from memsaving_gradients.schedules.simulate import simulate
from memsaving_gradients.schedules.training_graph import TrainingGraph

GB = 2**30
BEFORE, AFTER, EXTRA = 48, 7, 0.30
DEPTH, BATCH = 1001, 32
#: The card holds the bytes of the parameters three times: weights, gradients, momentum.
COPIES = 3
#: Lengths of chains, and floats in a layer.
LENGTHS, FLOATS = (256, 1024), 2**16
LSTM = 4.0
UNROLLED = {"length": 64, "unroll": True, **loops.STACKED}
LOOPS = {"plain": "stacked-64-plain", "ours": "stacked-64-treeverse"}


def resnet(planner: str = "chen") -> dict[str, Any]:
    """Return the strategies, and our plan within the rest of the card (in its own process)."""
    return paper.planned(DEPTH, BATCH, planner, lambda parameters: AFTER * GB - COPIES * parameters)


def unrolled() -> dict[str, Any]:
    """Plan the unrolled LSTM, without weights' gradients, within a quarter of *sharing*."""
    whole = captured_step("recurrence", UNROLLED, profile=False).graph
    weights = build("recurrence", **{**UNROLLED, "length": 1}).variables
    graph = without(whole, {4 * w.shape.num_elements() for w in weights})
    # TensorFlow holds the gradients of all steps until AddN adds them; the figures here add them
    # as they arrive.
    shared = simulate(graph, plain(graph, graph.sums)).peak
    found: dict[str, Any] = {"tensorflow": simulate(whole, plain(whole)).peak, "sharing": shared}
    plans = {
        "theirs": chen.plan(graph),
        "ours": auto.plan(graph, Limits(budget=int(shared / LSTM))),
    }
    for name, plan in plans.items():
        extra = plan.extra_seconds / graph.total_seconds
        found[name] = {"peak": plan.peak, "extra": extra}
    return found


def without(graph: TrainingGraph, sizes: set[int]) -> TrainingGraph:
    """Return the graph, with 0 bytes for backward values of the given ``sizes`` in bytes."""
    free = np.isin(graph.size, list(sizes)) & (graph.producer >= graph.first_backward)
    return replace(graph, size=np.where(free, 0, graph.size))


def chains(again: bool) -> dict[str, Any]:
    """Measure peaks of chains, in layers, with clones and extra time of their plans."""

    def of(length: int, **settings: Any) -> dict[str, Any]:
        options = {"length": length, "size": FLOATS}
        found = peak("tanh_chain", options, settings)
        return {
            "layers": found["peak"] / (4 * FLOATS),
            "clones": found["plan"]["clones"],
            "extra": found["plan"]["extra_time"],
        }

    found = {str(length): of(length, checkpoints="memory") for length in LENGTHS}
    return {**found, "recursive": of(LENGTHS[-1], planner="recursive")}


def recurrence(again: bool) -> dict[str, Any]:
    """Return the peaks of the loop, plain and replayed."""
    found = rows_of(loops.EXPERIMENT, LOOPS.values(), again=again)
    return {side: found[row]["peak"] for side, row in LOOPS.items()}


def lines(results: Results) -> list[Line]:
    """Return the lines: memory of the ResNet, growth with depth, memory of the LSTM."""
    of = {
        "chen-resnet": _of_resnet,
        "chen-chains": _of_chains,
        "chen-lstm": _of_lstm,
        "chen-loop": _of_loop,
    }
    return [line for job, made in of.items() if job in results for line in made(results[job])]


def _of_resnet(result: Mapping[str, Any]) -> Iterator[Line]:
    rows = {row["name"]: row for row in result["rows"]}
    theirs, ours = rows["sublinear plan"], result["rows"][-1]
    what = "ResNet of 1001 layers, batch 32"
    yield Line(f"{what}: sharing", BEFORE, rows["sharing"]["peak"] / GB, "GB", "planned", "same")
    for row, by in ((ours, ""), (theirs, ", by the paper's algorithm")):
        card = (row["peak"] + COPIES * result["parameters"]) / GB
        yield Line(f"{what}: on the card{by}", AFTER, card, "GB", "planned", "less")
        yield Line("… extra time", EXTRA, row["extra"], "%", "planned", "less")


def _of_chains(result: Mapping[str, Any]) -> Iterator[Line]:
    few, many = (result[str(length)]["layers"] for length in LENGTHS)
    recursive, log = result["recursive"], math.log2(LENGTHS[-1])
    note = f"{few:.1f} and {many:.1f} layers' bytes"
    what = "chain, peak with 1024 layers / with 256: √n"
    yield Line(what, 2, many / few, better="less", note=note)
    note = f"log₂ n is {log:.0f}; the order O(log n) has no constant"
    what = "chain of 1024, recursive: layers' memory, of log₂ n"
    yield Line(what, None, recursive["layers"], "", note=note)
    runs = 1 + recursive["clones"] / LENGTHS[-1]
    yield Line("… runs of a layer, of log₂ n", log, runs, "", better="less")


def _of_lstm(result: Mapping[str, Any]) -> Iterator[Line]:
    what, shared = "LSTM, 4 x 1024, 64 steps unrolled, batch 64: sharing", result["sharing"]
    for key, name in (("ours", "ours"), ("theirs", "the paper's algorithm")):
        peak, extra = result[key]["peak"], result[key]["extra"]
        note = (
            f"{shared / 1e6:,.0f} → {peak / 1e6:,.0f} MB, extra time {extra:.1%}; "
            "gradients of weights not counted"
        )
        yield Line(f"{what} / {name}", LSTM, shared / peak, how="planned", note=note)


def _of_loop(result: Mapping[str, Any]) -> Iterator[Line]:
    note = f"{result['plain'] / 1e6:,.0f} → {result['ours'] / 1e6:,.0f} MB"
    what = "LSTM, the same as a loop: plain TensorFlow / ours"
    yield Line(what, LSTM, result["plain"] / result["ours"], note=note)


WORK = Work(
    key="chen",
    title="Chen, Xu, Zhang and Guestrin 2016, Training deep nets with sublinear memory cost",
    source="arXiv 1604.06174: abstract and section 5; sizes from dmlc/mxnet-memonger",
    about=(
        "With plain training, the network of a thousand layers takes 48 GB, more than any card of"
        " the paper had. The paper estimates this figure; here it is planned. *On the card* adds"
        " three times the parameters (weights, gradients, momentum), since the paper's card held"
        " them too. Extra time is estimated here from floating-point operations and bytes; the"
        " paper measured it on a Titan X. O(√n) and O(log n) are orders. Four times the layers"
        " should take twice the memory, and the recursive plan should run each layer at most log₂ n"
        " times. The unrolled LSTM is compared with the paper's strategy *sharing*, which frees"
        " every buffer at its last use. The paper does not count gradients of weights. So the"
        " comparison leaves out these gradients, and their 64 addends, which TensorFlow would hold"
        " together. The loop is compared with plain TensorFlow, and everything counts."
    ),
    jobs={
        "chen-resnet": in_process("papers.chen:resnet"),
        "chen-chains": chains,
        "chen-lstm": in_process("papers.chen:unrolled"),
        "chen-loop": recurrence,
    },
    lines=lines,
)
