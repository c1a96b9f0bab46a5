"""Functions for fresh processes of `test_offload`: an accelerator, connected to a host."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.networks import build, small
from benchmarks.techniques import cluster
from benchmarks.techniques.cluster import HOST
from graph_tools.memory.measure import measure_peak
from memsaving_gradients.engine.driver.attempts import Attempts
from tests.helpers.optimized import optimized_nodes
from tests.helpers.support import arithmetic_rewriting, numbers


@contextmanager
def host() -> Iterator[int]:
    """Connect to a host, like `benchmarks.techniques.cluster.host`, and yield its process id. The
    process is forked, so it need not import TensorFlow."""
    ports = {job: f"localhost:{cluster._port()}" for job in ("accelerator", "host")}
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.dup2(writer, 1)
        # The test waits until no process holds the pipe of its answer.
        os.closerange(3, 256)
        try:
            cluster._serve(*ports.values())
        finally:
            os._exit(1)
    try:
        os.close(writer)
        with open(reader) as said:
            assert said.readline() == "ready\n", "the process of the host did not start"
        jobs = {job: [port] for job, port in ports.items()}
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name="accelerator", task_index=0
        )
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def gradients_of(network: Any, settings: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return a function that returns the loss and all gradients, and its arguments."""

    @tf.function
    def step(*batch: tf.Tensor) -> Any:
        loss, variables = network.loss(*batch), list(network.variables)
        if settings is None:
            found = tf.gradients(loss, variables)
        else:
            found = ms.gradients(loss, variables, **settings)
        return [loss, *map(tf.convert_to_tensor, found)]

    return step, [tf.constant(a) for a in network.batch]


def same(model: str, options: dict[str, Any], settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare gradients to the last bit with each of ``settings`` (``link``: arguments of
    `ms.Offload`), and return figures of the plans."""
    # Plans are followed even if they save nothing: only results are compared.
    followed = mock.patch.object(Attempts, "if_it_saves", lambda _, found: found)
    with host(), arithmetic_rewriting(False), followed:
        tf.config.experimental.enable_op_determinism()
        tf.random.set_seed(1)
        network = build(model, **options) if options else small(model)
        expected = _run(*gradients_of(network, None))
        found = []
        for wanted in settings:
            offload = ms.Offload(HOST, **wanted.pop("link", {}))
            step, batch = gradients_of(network, {"offload": offload, **wanted})
            results = _run(step, batch)
            equal = [a.tobytes() == b.tobytes() for a, b in zip(results, expected, strict=True)]
            if "max_slowdown" in wanted and not ms.plans(step):
                # A small network, in which nothing can be saved in so little time.
                found.append({"equal": all(equal)})
                continue
            plan = ms.plans(step)[-1]
            found.append(
                {
                    "equal": all(equal),
                    "offloaded": sum(d.fate == "offload" for d in plan.decisions),
                    "encoded": sum(d.fate == "encode" for d in plan.decisions),
                    "clones": plan.clones,
                    "within": plan.budget is None or plan.allocated <= plan.budget,
                    "text": str(plan),
                    "lag": plan.schedule.lag,
                    "moving": sum(how.moving_seconds for how in plan.schedule.stored.values()),
                    "extra": plan.extra_time,
                }
            )
    return {"found": found}


def _run(step: Any, batch: Any) -> list[Any]:
    return [t.numpy() for t in step(*batch)]


def chain(layers: int = 24, rows: int = 2048, width: int = 128) -> Any:
    """Return a function from settings to a step: sines and products, each of ``rows`` times
    ``width`` numbers."""
    x = tf.constant(numbers("x", rows, width))
    w = [tf.Variable(numbers(f"w{k}", width, width, scale=width**-0.5)) for k in range(layers)]

    def make(settings: dict[str, Any] | None) -> Any:
        @tf.function
        def step() -> Any:
            h = x
            for weight in w:
                h = tf.sin(tf.matmul(h, weight))
            loss = tf.reduce_sum(h)
            found = tf.gradients(loss, w) if settings is None else ms.gradients(loss, w, **settings)
            return [tf.reduce_sum(tf.square(g)) for g in found]

        return step

    return make


def peaks(large: bool) -> dict[str, Any]:
    """Measure transient peaks of the accelerator: plain, nothing recomputed, everything offloaded.
    Of the last: the least of several steps, and the simulated peak."""
    with cluster.host() if large else host():
        make = chain(rows=4096, width=256) if large else chain()
        found = {}
        for name, settings in {
            "plain": None,
            "kept": {"planner": "keep"},
            "offloaded": {"planner": "keep", "offload": HOST},
        }.items():
            step = make(settings)
            measured = measure_peak(step, warmup=2, steps=5)
            found[name] = measured.peak
        plan = ms.plans(step)[-1]
    least = min(measured.peaks)
    return {**found, "least": least, "simulated": plan.allocated, "moved": len(plan.stored)}


def killed() -> dict[str, Any]:
    """Return the error of a step whose host is killed meanwhile, and the seconds until then."""
    with host() as process:
        step = chain()({"planner": "keep", "offload": HOST})
        step()

        def kill() -> None:
            time.sleep(0.3)
            os.kill(process, signal.SIGKILL)

        threading.Thread(target=kill).start()
        start = time.perf_counter()
        try:
            for _ in range(1000):
                step()
        except tf.errors.OpError as error:
            return {"error": type(error).__name__, "seconds": time.perf_counter() - start}
    return {"error": "", "seconds": time.perf_counter() - start}


def errors() -> dict[str, Any]:
    """Return the errors for devices, plans and budgets that cannot be used."""
    said = {}
    with host():
        make = chain(8, 512, 64)
        for device in (
            "/job:host/device:CPU:7",
            "/device:TPU:0",
            "/device:CPU:0",
            "/job:host",
            "",
            7,
            True,
        ):
            try:
                make({"planner": "keep", "offload": device})()
                said[str(device)] = ""
            except ms.errors.ArgumentError as error:
                said[str(device)] = str(error)
        with tempfile.TemporaryDirectory() as folder:
            step = make({"planner": "keep", "offload": HOST})
            step()
            ms.plans(step)[-1].save(folder + "/plan.json")
            for name, more in (
                ("plan", {}),
                ("plan in little room", {"offload": ms.Offload(HOST, memory=1000)}),
            ):
                try:
                    make({"plan": folder + "/plan.json", **more})()
                except ms.errors.PlanError as error:
                    said[name] = str(error)
            again = make({"plan": folder + "/plan.json", "offload": HOST})
            again()
            said["plan again"] = str(ms.plans(again)[-1].schedule == ms.plans(step)[-1].schedule)
        try:
            make({"budget": 0.3, "planner": "keep", "offload": ms.Offload(HOST, memory=1024)})()
        except ms.errors.BudgetError as error:
            said["no room"] = str(error)
        try:
            tf.function(make({"offload": HOST, "xla": True}).python_function)()
        except ms.errors.ArgumentError as error:
            said["xla"] = str(error)
    return said


def _two_devices() -> None:
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)


def placed() -> dict[str, Any]:
    """Offload from each device to each, and return the numbers of offloaded tensors, or errors."""
    _two_devices()
    found: dict[str, Any] = {}
    for home in ("/CPU:0", "/CPU:1"):
        for away in ("/CPU:0", "/CPU:1", "/job:localhost/replica:0/task:0/device:CPU:0"):
            with tf.Graph().as_default() as graph, tf.device(home):
                x = y = tf.compat.v1.placeholder(tf.float32, [256, 64])
                for _ in range(8):
                    y = tf.sin(tf.tanh(y))
                try:
                    ms.gradients(tf.reduce_sum(y), x, planner="keep", offload=away)
                    found[f"{home} {away}"] = len(ms.plans(graph)[-1].stored)
                except ms.errors.ArgumentError as error:
                    found[f"{home} {away}"] = str(error)
    return found


def in_the_optimized_graph() -> dict[str, Any]:
    """Count copies by device, and waiting copies, in grappler's output on two logical devices."""
    _two_devices()
    step = chain(8, 512, 64)({"planner": "keep", "offload": "/device:CPU:1"})
    nodes = [node for node in optimized_nodes(step) if node.op == "Identity"]

    def some(end: str) -> list[Any]:
        return [
            node for node in nodes if node.name.split("/")[-1].startswith(end) or end in node.name
        ]

    out, held, back = some("_offloaded"), some("_held"), some("_loaded")
    return {
        "moved": len(ms.plans(step)[-1].stored),
        "out": sum("CPU:1" in node.device for node in out if "_held" not in node.name),
        "waiting": sum(
            "CPU:1" in node.device and any(i.startswith("^") for i in node.input) for node in held
        ),
        "back": sum("CPU:0" in node.device for node in back),
    }
