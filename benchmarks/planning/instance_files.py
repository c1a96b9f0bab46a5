"""Reads instances: node-link JSON as in the repository ``haoming-codes/moccasin``.

Nodes are listed in the order in which they run, or ``graph["order"]`` is this order. Nodes have
``cost_ram`` (bytes) and ``cost_cpu``, or ``out_cost`` and ``duration``. Optionally, ``backward``
marks backward nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.planning.layered import Instance

_BYTES, _COSTS = {"cost_ram", "out_cost"}, {"cost_cpu", "duration"}


def read_folder(folder: Path) -> list[Instance]:
    """Return the instances in the JSON files of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> Instance:
    """Return the instance in one file.

    Raises
    ------
    ValueError
        The file is no graph, or a node has no costs, or the nodes are not listed in an order in
        which they can run.
    """
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or "nodes" not in document:
        raise ValueError(f"{path} is no graph in node-link JSON")
    nodes = {_name(node): node for node in document["nodes"]}
    order = [name for name in document.get("graph", {}).get("order", nodes) if name in nodes]
    position = {name: k for k, name in enumerate(order)}
    reads: list[dict[int, None]] = [{} for _ in order]
    for link in document["links" if "links" in document else "edges"]:
        tail, head = (
            (link["source"], link["target"]) if "source" in link else (link["0"], link["1"])
        )
        reads[position[head]][position[tail]] = None
    if any(maker >= reader for reader, read in enumerate(reads) for maker in read):
        raise ValueError(f"{path}: nodes are not listed in an order in which they can run")
    if not all(nodes[name].keys() & keys for name in order for keys in (_BYTES, _COSTS)):
        raise ValueError(f"{path}: nodes need cost_ram and cost_cpu, or out_cost and duration")
    size, seconds = (
        tuple(nodes[name][next(iter(nodes[name].keys() & keys))] for name in order)
        for keys in (_BYTES, _COSTS)
    )
    late = [bool(nodes[name].get("backward")) for name in order]
    first = late.index(True) if True in late else 0
    if not all(late[first:]):
        first = 0
    return Instance(path.stem, tuple(tuple(sorted(read)) for read in reads), size, seconds, first)


def _name(node: Mapping[str, Any]) -> Any:
    return node["id"] if "id" in node else node["name"]
