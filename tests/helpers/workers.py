"""Clusters on this machine for `test_distribution_processes`: processes that find each other by
``TF_CONFIG``, and the functions that they run.

`cluster` starts the processes and always ends all of them. They are forked like the processes of
`tests.helpers.fresh`. A process reports in lines of JSON. A process that fails is started again, at
most ``restarts`` times, as by the manager of a cluster.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers import fresh

__all__ = ["Cluster", "cluster"]

#: Seconds before a cluster that hangs is ended: ten times the longest on a quiet machine.
SECONDS = fresh.SECONDS

_context = multiprocessing.get_context("forkserver")


class Cluster:
    """A cluster: processes by name (``"worker 0"``); they write to ``folder``."""

    def __init__(self, scenario: str, folder: Path, roles: dict[str, int], restarts: int) -> None:
        self.scenario, self.folder, self.restarts = scenario, folder, restarts
        ports = iter(_free_ports(sum(roles.values())))
        self.addresses = {
            role: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for role, count in roles.items()
        }
        self.processes: dict[str, BaseProcess] = {}
        self.ended: list[str] = []
        for role, count in roles.items():
            for index in range(count):
                self._start(role, index)

    def _start(self, role: str, index: int) -> None:
        task = {"cluster": self.addresses, "task": {"type": role, "index": index}}
        name = f"{role} {index}"
        what = (self.scenario, self.folder, name, json.dumps(task))
        self.processes[name] = _context.Process(target=_run, args=what, daemon=True)
        self.processes[name].start()

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def said(self, name: str) -> list[Any]:
        """Return the reports of a process so far, whole lines only."""
        file = self.folder / f"{name}.out"
        *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def wait(self, *names: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until these processes have ended without an error; start them again if they fail."""
        end = time.monotonic() + SECONDS
        while any(self.processes[name].exitcode != 0 for name in names):
            if time.monotonic() > end:
                raise TimeoutError(self._errors())
            for name in names:
                if self.processes[name].exitcode not in (None, 0):
                    self.ended.append(name)
                    if len(self.ended) > self.restarts:
                        raise RuntimeError(f"{name} failed: {self._errors()}")
                    role, index = name.split()
                    self._start(role, int(index))
            meanwhile()
            time.sleep(0.1)

    def _errors(self) -> str:
        return "\n".join(
            f"{file.stem}: {file.read_text(errors='replace')[-2000:]}"
            for file in sorted(self.folder.glob("*.err"))
        )


@contextmanager
def cluster(scenario: str, *, restarts: int = 0, **roles: int) -> Iterator[Cluster]:
    """Yield a cluster that runs a function of this module; ``roles``: numbers of processes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Cluster(scenario, Path(folder), roles, restarts)
        try:
            yield found
        finally:
            for process in found.processes.values():
                process.kill()
            for process in found.processes.values():
                process.join()


def _free_ports(count: int) -> list[int]:
    found = [socket.socket() for _ in range(count)]
    try:
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
    finally:
        for one in found:
            one.close()


def _run(scenario: str, folder: Path, name: str, task: str) -> None:
    """Run a scenario in a forked process, which writes to files of its name."""
    fresh.end_with_parent()
    for number, end in enumerate(("out", "err"), 1):
        with (folder / f"{name}.{end}").open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ["TF_CONFIG"] = task
    globals()[scenario](folder)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _digest(arrays: list[Any]) -> str:
    import hashlib

    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def _exact() -> None:
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


# --- functions that the processes run


def mirrored_small(folder: Path) -> None:
    """Run `mirrored` with a network of four layers, and without a budget."""
    mirrored(folder, rows=512, layers=4, names=("plain", "memory"))


def mirrored(
    folder: Path,
    rows: int = 8192,
    layers: int = 8,
    names: Sequence[str] = ("plain", "memory", "budget"),
) -> None:
    """Train plainly and with less memory on several workers; the last batch leaves a worker without
    examples."""
    import tensorflow as tf

    import memsaving_gradients as ms
    from tests.helpers.distributing import Net, _plan, examples, train

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    _exact()
    data = examples(rows + 1)
    full = next(iter(strategy.experimental_distribute_dataset(_dataset(data, rows))))
    ways = {
        "plain": None,
        "memory": {},
        "budget": {"budget": "24 MB", "batch_size": rows // 2, "planner": "chain"},
    }
    for name in names:
        options, net = ways[name], Net(strategy, rows, layers)
        step = net.step()
        if options is None:
            states = train(net, step, data)
        else:
            with ms.patched(**options):
                states = train(net, step, data)
        peak = _peak(lambda step=step: step(full, tf.constant(0)).numpy())
        plans = [_plan(plan) for plan in ms.plans(step)]
        say(name=name, digest=_digest(states), peak=peak, plans=plans)


def _peak(run: Callable[[], Any]) -> int:
    """Return the most bytes of a step in this process. (`graph_tools.memory.measure` would wait for
    remote devices, which are not connected here.)"""
    import tensorflow as tf

    found = []
    for _ in range(3):
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        run()
        found.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    return max(found)


def _dataset(data: Any, rows: int) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data).batch(rows)


def stopped(folder: Path) -> None:
    """Run `restarted`, with one worker that waits after its third step to be killed."""
    restarted(folder, stops_at=3)


def restarted(folder: Path, stops_at: int = 0) -> None:
    """Train with saved checkpoints, from the last one on. Any number of restarts must lead to the
    same weights."""
    import tensorflow as tf

    import memsaving_gradients as ms
    from tests.helpers.distributing import Net, examples

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    _exact()
    rows, steps = 256, 8
    net = Net(strategy, rows)
    task = strategy.cluster_resolver.task_id
    with strategy.scope():
        done = tf.Variable(0, dtype=tf.int64, trainable=False)
    saved = tf.train.Checkpoint(done=done, **{f"v{k}": v for k, v in enumerate(net.state)})
    # All workers save together, but only the chief's checkpoints are used.
    place = folder / "checkpoints" if task == 0 else folder / f"temporary {task}"
    manager = tf.train.CheckpointManager(saved, str(place), max_to_keep=2)
    chief = tf.train.latest_checkpoint(str(folder / "checkpoints"))
    if chief:
        saved.restore(chief)
    first = int(done.numpy())
    say(begins=first)
    data = tf.data.Dataset.from_tensor_slices(examples(rows * steps)).batch(rows).skip(first)
    step = net.step()
    with ms.patched(checkpoints="memory"):
        for count, x in enumerate(strategy.experimental_distribute_dataset(data), first):
            step(x, tf.constant(count))
            done.assign(count + 1)
            manager.save()
            say(done=count + 1)
            while task == 1 and first == 0 and count + 1 == stops_at:
                time.sleep(1)
    say(digest=_digest([v.numpy() for v in net.weights]), clones=ms.plans(step)[-1].clones)


def parameters(folder: Path) -> None:
    """Train with parameter servers: a coordinator, workers, and servers that hold the
    variables."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
        )
        server.join()
    import memsaving_gradients as ms
    from tests.helpers.distributing import _plan
    from tests.helpers.support import numbers

    strategy = tf.distribute.ParameterServerStrategy(resolver)
    _exact()
    width, layers, rows, examples = 64, 8, 1024, 1024 + 100
    with strategy.scope():
        weights = [
            tf.Variable(numbers(f"w{k}", width, width, scale=width**-0.5)) for k in range(layers)
        ]
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def replica(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for k, weight in enumerate(weights):
                h = tf.tanh(tf.matmul(h, weight))
                h = tf.nn.experimental.stateless_dropout(h, 0.1, [k, 1])
            loss = tf.reduce_sum(tf.square(h)) / rows
        for weight, grad in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.05 * grad)
        return loss

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices(numbers("x", examples, width)).batch(rows)

    for name, options in {
        "plain": None,
        "memory": {},
        "budget": {"budget": 0.6, "planner": "chain"},
    }.items():
        for k, weight in enumerate(weights):
            weight.assign(numbers(f"w{k}", width, width, scale=width**-0.5))

        @tf.function(autograph=False)
        def step(iterator: Any) -> tf.Tensor:
            return strategy.run(replica, args=(next(iterator),))

        iterator = iter(coordinator.create_per_worker_dataset(lambda: dataset().repeat()))
        losses = []

        def train(iterator: Any = iterator, losses: list[Any] = losses, step: Any = step) -> None:
            for _ in range(4):
                found = coordinator.schedule(step, args=(iterator,))
                # One step after the other: steps of several workers at once have no fixed order.
                coordinator.join()
                losses.append(found.fetch())

        if options is None:
            train()
        else:
            with ms.patched(batch_size=rows, **options):
                train()
        plans = [_plan(plan) for plan in ms.plans(step)]
        say(name=name, digest=_digest([*losses, *(w.numpy() for w in weights)]), plans=plans)
