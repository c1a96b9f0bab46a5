"""Measured costs of kernels, kept on disk between processes.

Each TensorFlow version and device has one JSON file, in the user's cache folder or in the folder
that the environment variable ``MEMSAVING_GRADIENTS_CACHE`` names. A write merges in the entries
that other processes wrote meanwhile, and replaces the whole file: a reader never sees half a file.
If two processes write at the same instant, one of them measures again later. An unreadable file
causes a warning, not an error, and its kernels are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from graph_tools.costs.kernels import Measured, threads
from graph_tools.errors import CacheWarning
from graph_tools.warn import warn

__all__ = ["CostCache", "describe", "folder"]

ENVIRONMENT = "MEMSAVING_GRADIENTS_CACHE"
#: Fact: the version of the file format; files of another version are not used.
FORMAT = 1

Entries = dict[str, Measured | None]


def folder() -> Path:
    """Return the folder of the cache files."""
    if given := os.environ.get(ENVIRONMENT):
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("memsaving_gradients"))


def describe(device: str) -> str:
    """Return the properties that decide the speed of ``device`` (``"CPU:0"``): the model and
    compute capability of a GPU, or the model, threads and oneDNN setting of a CPU."""
    if "GPU" in device.upper():
        index = int(device.rpartition(":")[2])
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[index]
        )
        name, capability = details.get("device_name"), details.get("compute_capability")
        return f"GPU {name} {capability}"
    kernels = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "default")
    return f"CPU {_processor()}, {threads()} threads, oneDNN {kernels}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


class CostCache:
    """The known costs of kernels on one device; ``None`` marks a kernel that cannot be measured.

    Examples
    --------
    >>> import os, tempfile
    >>> from unittest.mock import patch
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     patch.dict(os.environ, MEMSAVING_GRADIENTS_CACHE=folder),
    ... ):
    ...     cache = CostCache("CPU of an example")
    ...     cache.entries["MatMul …"] = Measured(0.001, 64)
    ...     cache.write()
    ...     CostCache("CPU of an example").entries
    {'MatMul …': Measured(seconds=0.001, workspace=64)}
    """

    def __init__(self, device: str) -> None:
        self.header = {"format": FORMAT, "tensorflow": tf.__version__, "device": device}
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"costs-{tf.__version__}-{device}")[:80]
        digest = hashlib.sha256(json.dumps(self.header, sort_keys=True).encode()).hexdigest()
        self.path = folder() / f"{stem}-{digest[:12]}.json"
        self.entries: Entries = self._read()

    def write(self) -> None:
        """Write the entries to disk, merged with other processes' entries; warn if that fails."""
        merged = {**self._read(), **self.entries}
        content = {
            **self.header,
            "kernels": {key: merged[key] for key in sorted(merged)},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=0, ensure_ascii=False)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            warn(
                f"measured costs cannot be saved in {self.path} ({error}), so each process measures"
                f" them again; set {ENVIRONMENT} to a writable folder",
                CacheWarning,
            )

    def _read(self) -> Entries:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return _entries(content, self.header)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            warn(
                f"measured costs cannot be read from {self.path} ({error!r}); they are measured"
                " again, and the file is overwritten",
                CacheWarning,
            )
            return {}


def _entries(content: Any, header: Mapping[str, Any]) -> Entries:
    for name, expected in header.items():
        if content[name] != expected:
            raise ValueError(f"{name} is {content[name]!r} instead of {expected!r}")
    found: Entries = {}
    for key, cost in content["kernels"].items():
        if cost is None:
            found[key] = None
            continue
        seconds, workspace = float(cost[0]), int(cost[1])
        if not 0 <= seconds < float("inf") or workspace < 0:
            raise ValueError(f"{key!r} costs {cost}")
        found[key] = Measured(seconds, workspace)
    return found
