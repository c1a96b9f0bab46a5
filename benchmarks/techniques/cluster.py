"""Two processes on one machine, accelerator and host, each with an allocator of its own.

`host` starts the second process and makes this one the accelerator. Call it before TensorFlow
computes anything, in a process that does nothing else: the process cannot be disconnected.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: The device of the other process.
HOST = "/job:host/replica:0/task:0/device:CPU:0"


@contextmanager
def host(*, threads: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Connect to a host process in this context; ``threads``: inter-op threads of this process."""
    import tensorflow as tf

    jobs = {"accelerator": [f"localhost:{_port()}"], "host": [f"localhost:{_port()}"]}
    command = [sys.executable, "-m", __name__, jobs["accelerator"][0], jobs["host"][0]]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the process of the host did not start")
        if threads is not None:
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name="accelerator", task_index=0
        )
        yield process
    finally:
        process.kill()
        process.wait()


def _port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


def _serve(accelerator: str, host: str) -> None:
    import tensorflow as tf

    spec = tf.train.ClusterSpec({"accelerator": [accelerator], "host": [host]})
    server = tf.distribute.Server(spec, job_name="host", task_index=0)
    print("ready", flush=True)
    server.join()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
