"""The largest batch of ResNet-50 in a memory that the allocator enforces.

`memsaving_gradients.largest_batch` names a batch for the memory, and proves it. Then TensorFlow's
allocator gets this memory and no more in further processes (``TF_CPU_BFC_MEM_LIMIT_IN_MB``;
variables and inputs count as well). Each trains for some steps or ends in TensorFlow's own error.
The named batch must run. One and a half times as many examples, planned for as much more memory,
must not. The largest batch of plain training is found by trials, from the batch named for it. The
batch that must not fit is tried without oneDNN: its convolutions end the process when they get no
memory (TensorFlow 2.21).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Setting
from benchmarks.measuring import ENVIRONMENT, fresh
from benchmarks.settings import count
from graph_tools.memory.measure import EndedBySignalError

MIB = 2**20
NETWORK = "ResNet50"
#: The memory of a process in MiB; examples at which the search starts; steps in each process.
MEMORY, START, STEPS = 700, 12, 3
#: Bar for the named batch over plain training's; the multiple of the named batch that must not run.
TIMES, TOO_MANY = 2.0, 1.5


def run(job: Job) -> dict[str, Any]:
    """Find the batch, and try batches that must run and must not."""
    memory = job.settings["memory"]
    results: dict[str, Any] = fresh("claims.largest:found", memory=memory)
    job.say(results["text"])
    batch, outcomes = results["batch"], results.setdefault("outcomes", [])

    def runs(batch: int, budget: int | None, **settings: str) -> bool:
        outcome = _outcome(memory, batch, budget, settings)
        job.say(f"{batch} {'plain' if budget is None else 'ours'}: {outcome}")
        outcomes.append([batch, budget, outcome])
        return outcome == "ran"

    results["plain_ran"] = _most(lambda many: runs(many, None), max(results["plain"], 1))
    results["ran"] = runs(batch, results["budget"])
    # More memory than the device has: planning succeeds, and the allocator refuses.
    many = int(TOO_MANY * batch)
    runs(many, int(TOO_MANY * results["budget"]), TF_ENABLE_ONEDNN_OPTS="0")
    return results


def found(memory: int) -> dict[str, Any]:
    """Return the batch that the library names for a memory, and proves by a step."""
    import memsaving_gradients as ms

    clock = time.perf_counter()
    largest = ms.largest_batch(make, device_memory=memory * MIB, start=START, prove=True)
    return {
        "memory": memory,
        "batch": largest.batch,
        "budget": largest.budget,
        "plain": largest.plain,
        "seconds": time.perf_counter() - clock,
        "text": str(largest),
    }


def make(batch: int, settings: dict[str, Any] | None = None) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of ResNet-50 with momentum, and its arguments."""
    from benchmarks.steps import make_step

    options = {"name": NETWORK, "batch": batch, "optimizer": "sgd"}
    step = make_step("application", options, ours=settings is not None, settings=settings)
    return step.function, step.batch


def train(batch: int, budget: int | None) -> str:
    """Run some steps in this process; return ``"ran"``, or the start of TensorFlow's error."""
    import tensorflow as tf

    step, args = make(batch, None if budget is None else {"budget": budget})
    try:
        for _ in range(STEPS):
            step(*args)
    except tf.errors.ResourceExhaustedError as error:
        return f"ResourceExhaustedError: {error.message.splitlines()[0][:80]}"
    return "ran"


def _outcome(memory: int, batch: int, budget: int | None, settings: dict[str, str]) -> str:
    environment = {**ENVIRONMENT, **settings, "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(memory)}
    try:
        outcome: str = fresh("claims.largest:train", environment, batch=batch, budget=budget)
    except EndedBySignalError:
        return "ended by a signal"
    return outcome


def _most(runs: Callable[[int], bool], named: int) -> int:
    """Return the largest batch that runs, searched in steps of one example from ``named``."""
    batch = named
    if runs(batch):
        while runs(batch + 1):
            batch += 1
        return batch
    while batch > 1 and not runs(batch - 1):
        batch -= 1
    return batch - 1


def bars(results: Results) -> list[Figure]:
    """Return the bars."""
    figures = []
    for result in results.values():
        times = result["batch"] / max(result["plain_ran"], 1)
        refused = "ResourceExhausted" in result["outcomes"][-1][-1]
        figures += [
            Figure("the named batch fails", float(not result["ran"]), 0),
            Figure("plain training, as a share of the named batch", 1 / times, 1 / TIMES),
            Figure(
                f"{TOO_MANY:g} times as many do not end in TensorFlow's error",
                float(not refused),
                0,
            ),
        ]
    return figures


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each process."""
    for name, result in results.items():
        for batch, budget, outcome in result["outcomes"]:
            limit = "plain" if budget is None else f"{budget / MIB:,.0f} MiB"
            yield name, str(batch), limit, outcome


COLUMNS = Columns(
    "batches in a process that has the memory and no more",
    "network | batch | budget | outcome",
    lines,
    text=("outcome",),
)
EXPERIMENT = Experiment(
    "largest",
    rows=lambda settings: (NETWORK,),
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    settings={"memory": Setting(MEMORY, partial(count, 1), "MiB of a process")},
)
