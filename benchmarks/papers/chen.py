"""Chen, Xu, Zhang and Guestrin 2016 (arXiv 1604.06174): a thousand layers, square root and logarithm, an unrolled LSTM.

- *ResNet.* The setting of `benchmarks.planning.paper`, planned. Before: what the paper calls *sharing*, in GB of 2^30 bytes. After: on the card, that is with three times
  the parameters; ours is the fastest plan that leaves room for these within 7 GB.
- *Chains* of n layers, measured: how the peak grows from 256 to 1024 layers; and with ``planner="recursive"``, how many layers' memory 1024 of them take, and how often
  a layer runs.
- *LSTM*: four layers of 1024 units, 64 steps, batch 64: unrolled, planned, against *sharing*, without the gradients of weights; and as a loop, measured, of `benchmarks.techniques.loops`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.experiment import Results
from benchmarks.measuring import peak
from benchmarks.papers.rows import Line, Work, in_process
from benchmarks.planning import paper
from benchmarks.running import rows_of
from benchmarks.techniques import loops
from memsaving_gradients.schedules.training_graph import TrainingGraph

GB = 2**30
BEFORE, AFTER, EXTRA = 48, 7, 0.30
DEPTH, BATCH = 1001, 32
#: Parameters are on the card three times: weights, gradients, momentum.
COPIES = 3
#: Lengths of chains, and floats in a layer.
LENGTHS, FLOATS = (256, 1024), 2**16
LSTM = 4.0
UNROLLED = {"length": 64, "unroll": True, **loops.STACKED}
LOOPS = {"plain": "stacked-64-plain", "ours": "stacked-64-treeverse"}


def resnet(planner: str = "chen") -> dict[str, Any]:
    """The strategies, and our plan within what the card has left (in a process of its own)."""
    return paper.planned(DEPTH, BATCH, planner, lambda parameters: AFTER * GB - COPIES * parameters)


def unrolled() -> dict[str, Any]:
    """The strategies on the unrolled LSTM, its weights' gradients not counted, and our plan within a quarter of *sharing* (in a process of its own)."""
    from benchmarks.networks import build
    from benchmarks.planning.periodic import captured_step
    from memsaving_gradients.planners import Limits, auto, chen
    from memsaving_gradients.schedules.schedule import plain
    from memsaving_gradients.schedules.simulate import simulate

    whole = captured_step("recurrence", UNROLLED, profile=False).graph
    weights = build("recurrence", **{**UNROLLED, "length": 1}).variables
    graph = without(whole, {4 * w.shape.num_elements() for w in weights})
    # TensorFlow holds the gradient of every step until AddN adds them; as they come, they are no part of this.
    shared = simulate(graph, plain(graph, graph.sums)).peak
    found: dict[str, Any] = {
        "tensorflow": simulate(whole, plain(whole)).peak,
        "sharing": shared,
    }
    plans = {
        "theirs": chen.plan(graph),
        "ours": auto.plan(graph, Limits(budget=int(shared / LSTM))),
    }
    for name, plan in plans.items():
        extra = plan.extra_seconds / graph.total_seconds
        found[name] = {"peak": plan.peak, "extra": extra}
    return found


def without(graph: TrainingGraph, sizes: set[int]) -> TrainingGraph:
    """The graph with values of the backward pass of such sizes, in bytes, as if they took nothing."""
    free = np.isin(graph.size, list(sizes)) & (graph.producer >= graph.first_backward)
    return replace(graph, size=np.where(free, 0, graph.size))


def chains(again: bool) -> dict[str, Any]:
    """Peaks of chains, in layers, and the plan of the recursive one."""

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
    """Peaks of the loop, plain and replayed."""
    found = rows_of(loops.EXPERIMENT, LOOPS.values(), again=again)
    return {side: found[row]["peak"] for side, row in LOOPS.items()}


def lines(results: Results) -> list[Line]:
    """Memory of the ResNet, growth with depth, memory of the LSTM."""
    found = []
    if result := results.get("chen-resnet"):
        rows = {row["name"]: row for row in result["rows"]}
        before, theirs, ours = rows["sharing"], rows["sublinear plan"], result["rows"][-1]
        card = {row["name"]: row["peak"] + COPIES * result["parameters"] for row in (theirs, ours)}
        what = "ResNet of 1001 layers, batch 32"
        found += [
            Line(f"{what}: sharing", BEFORE, before["peak"] / GB, "GB", "planned", "same"),
            Line(f"{what}: on the card", AFTER, card[ours["name"]] / GB, "GB", "planned", "less"),
            Line("… extra time", EXTRA, ours["extra"], "%", "planned", "less"),
            Line(
                f"{what}: on the card, by the paper's algorithm",
                AFTER,
                card[theirs["name"]] / GB,
                "GB",
                "planned",
                "less",
            ),
            Line("… extra time", EXTRA, theirs["extra"], "%", "planned", "less"),
        ]
    if result := results.get("chen-chains"):
        few, many = (result[str(length)] for length in LENGTHS)
        recursive = result["recursive"]
        log = math.log2(LENGTHS[-1])
        found += [
            Line(
                "chain, peak with 1024 layers / with 256: √n",
                2,
                many["layers"] / few["layers"],
                better="less",
                note=f"{few['layers']:.1f} and {many['layers']:.1f} layers' bytes",
            ),
            Line(
                "chain of 1024, recursive: layers' memory, of log₂ n",
                None,
                recursive["layers"],
                "",
                note=f"log₂ n is {log:.0f}; the order O(log n) has no constant",
            ),
            Line(
                "… runs of a layer, of log₂ n",
                log,
                1 + recursive["clones"] / LENGTHS[-1],
                "",
                better="less",
            ),
        ]
    if result := results.get("chen-lstm"):
        shared, theirs, ours = result["sharing"], result["theirs"], result["ours"]
        what = "LSTM, 4 x 1024, 64 steps unrolled, batch 64: sharing"
        for name, plan in (("ours", ours), ("the paper's algorithm", theirs)):
            note = f"{shared / 1e6:,.0f} → {plan['peak'] / 1e6:,.0f} MB, extra time {plan['extra']:.1%}; gradients of weights not counted"
            ratio = shared / plan["peak"]
            found.append(Line(f"{what} / {name}", LSTM, ratio, how="planned", note=note))
    if result := results.get("chen-loop"):
        note = f"{result['plain'] / 1e6:,.0f} → {result['ours'] / 1e6:,.0f} MB"
        ratio = result["plain"] / result["ours"]
        found.append(
            Line("LSTM, the same as a loop: plain TensorFlow / ours", LSTM, ratio, note=note)
        )
    return found


WORK = Work(
    key="chen",
    title="Chen, Xu, Zhang and Guestrin 2016, Training deep nets with sublinear memory cost",
    source="arXiv 1604.06174: abstract and section 5; sizes from dmlc/mxnet-memonger",
    about=(
        "The network of a thousand layers takes 48 GB plainly, which no card of the paper had, either: that figure is an estimate there, and planned here. *On the card* "
        "are three times the parameters besides (weights, gradients, momentum), as in what the paper's card held. Extra time is estimated from floating-point operations "
        "and bytes here, and was measured on a Titan X there. O(√n) and O(log n) are orders: four times the layers are to take twice the memory, and the recursive plan "
        "no more than log₂ n runs of each layer. The unrolled LSTM is compared with the paper's *sharing*, which frees every buffer at its last use; gradients of weights, which the paper does not count, are "
        "left out, and so are their 64 addends, which TensorFlow would hold together. The loop is compared with plain TensorFlow, everything counted."
    ),
    jobs={
        "chen-resnet": in_process("papers.chen:resnet"),
        "chen-chains": chains,
        "chen-lstm": in_process("papers.chen:unrolled"),
        "chen-loop": recurrence,
    },
    lines=lines,
)
