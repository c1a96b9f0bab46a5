"""``python -m benchmarks.claims.largest``: the largest batch of ResNet-50 in a memory that the allocator holds every process to.

`memsaving_gradients.largest_batch` names a batch for the memory, and proves it. Then processes are started in which TensorFlow's
allocator has that much and no more (``TF_CPU_BFC_MEM_LIMIT_IN_MB``; variables and inputs lie in it as well), and each trains for some steps
or ends in TensorFlow's own error. The named batch has to run; one and a half times as many examples must not, planned for as much more
memory; and what plain training reaches is found by trying, from what was named for it. What must not run does so without oneDNN, whose
convolutions end the process where they get no memory (TensorFlow 2.21).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bars import Figure, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import EndedBySignalError, in_fresh_process

RESULTS = Path(__file__).parents[1] / "results" / "largest.json"

MIB = 2**20
NETWORK = "ResNet50"
#: The memory of a process, MiB; examples to begin with; steps in each process.
MEMORY, START, STEPS = 700, 12, 3
#: Examples more than plain training, at the least; more of them than the largest batch, that must not run.
TIMES, TOO_MANY = 2.0, 1.5


def main(arguments: list[str] | None = None) -> int:
    """Find the batch, run what should run and what should not, print the figures; 1 if a bar is missed."""
    options = _parse(arguments)
    console = Console(stderr=True)
    memory = options.memory
    results = in_fresh_process("benchmarks.claims.largest:found", {"memory": memory}, ENVIRONMENT)
    console.print(results["text"], highlight=False)
    batch = results["batch"]

    def runs(batch: int, budget: int | None, **settings: str) -> bool:
        outcome = _outcome(memory, batch, budget, settings)
        console.print(f"{batch} {'plain' if budget is None else 'ours'}: {outcome}")
        results.setdefault("outcomes", []).append([batch, budget, outcome])
        write(options.json, {NETWORK: results})
        return outcome == "ran"

    results["plain_ran"] = _most(lambda many: runs(many, None), max(results["plain"], 1))
    results["ran"] = runs(batch, results["budget"])
    many = int(TOO_MANY * batch)
    # More than the device has: the plan is made, and the allocator refuses.
    runs(many, int(TOO_MANY * results["budget"]), TF_ENABLE_ONEDNN_OPTS="0")
    figures = judge(results)
    write(options.json, {NETWORK: results}, figures)
    print_figures(figures, Console())
    return int(not all(figure.passed for figure in figures))


def found(memory: int) -> dict[str, Any]:
    """What is named, and proven by a step."""
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
    """A step of ResNet-50 with momentum, and its arguments."""
    from benchmarks.steps import make_step

    options = {"name": NETWORK, "batch": batch, "optimizer": "sgd"}
    step = make_step("application", options, ours=settings is not None, settings=settings)
    return step.function, step.batch


def train(batch: int, budget: int | None) -> str:
    """Some steps in this process: ``"ran"``, or the first words of TensorFlow's error."""
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
    request = {"batch": batch, "budget": budget}
    try:
        outcome: str = in_fresh_process("benchmarks.claims.largest:train", request, environment)
    except EndedBySignalError:
        return "ended by a signal"
    return outcome


def _most(runs: Callable[[int], bool], named: int) -> int:
    """The largest batch that runs, one example after the other from the one that was named."""
    batch = named
    if runs(batch):
        while runs(batch + 1):
            batch += 1
        return batch
    while batch > 1 and not runs(batch - 1):
        batch -= 1
    return batch - 1


def judge(results: dict[str, Any]) -> list[Figure]:
    """The bars."""
    times = results["batch"] / max(results["plain_ran"], 1)
    return [
        Figure("the named batch fails", float(not results["ran"]), 0),
        Figure("plain training, as a share of the named batch", 1 / times, 1 / TIMES),
        Figure(
            f"{TOO_MANY:g} times as many do not end in TensorFlow's error",
            float("ResourceExhausted" not in results["outcomes"][-1][-1]),
            0,
        ),
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.claims.largest", description=__doc__)
    parser.add_argument("--memory", type=int, default=MEMORY, metavar="MIB", help="of a process")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="results file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
