"""Training in several processes on this machine: the same weights, less memory in each process, and
no process waits forever for another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.workers import Cluster, cluster


def said_by_two(kind: str) -> list[dict[str, Any]]:
    """Return the messages of each of two workers, by name."""
    names = "worker 0", "worker 1"
    with cluster(kind, worker=2) as found:
        found.wait(*names)
        return [{entry["name"]: entry for entry in found.said(name)} for name in names]


def test_few_layers_on_workers_that_mirror_variables() -> None:
    said = said_by_two("mirrored_small")
    for worker in said:
        assert len({entry["digest"] for entry in worker.values()}) == 1
        assert worker["memory"]["plans"][0]["clones"]
        assert worker["memory"]["peak"] < worker["plain"]["peak"]
    assert said[0]["memory"]["plans"] == said[1]["memory"]["plans"]


@pytest.mark.slow
def test_workers_that_mirror_variables() -> None:
    said = said_by_two("mirrored")
    for worker in said:
        # Each worker has its own moving averages until they are saved.
        assert len({entry["digest"] for entry in worker.values()}) == 1
        assert worker["memory"]["peak"] < 0.5 * worker["plain"]["peak"]
        full = worker["budget"]["plans"][0]
        assert full["clones"]
        assert worker["budget"]["peak"] <= full["budget"]
    # Each worker has the same plan; none asks the others over the network.
    assert said[0]["budget"]["plans"] == said[1]["budget"]["plans"]


@pytest.mark.slow
def test_a_worker_that_is_killed_goes_on_from_the_last_checkpoint() -> None:
    names = "worker 0", "worker 1"
    with cluster("restarted", worker=2) as found:
        found.wait(*names)
        undisturbed = [found.said(name)[-1] for name in names]
    assert undisturbed[0] == undisturbed[1]
    assert undisturbed[0]["clones"]
    with cluster("stopped", restarts=6, worker=2) as found:
        found.wait(*names, meanwhile=_killing(found, "worker 1", at=3))
        assert "worker 1" in found.ended
        begun = [entry["begins"] for entry in found.said("worker 1") if "begins" in entry]
        assert begun[0] == 0 and begun[-1] > 0
        assert [found.said(name)[-1] for name in names] == undisturbed


def _killing(found: Cluster, name: str, at: int):
    killed = []

    def kill() -> None:
        if not killed and {"done": at} in found.said(name):
            found.kill(name)
            killed.append(name)

    return kill


def test_parameter_servers() -> None:
    with cluster("parameters", chief=1, worker=1, ps=2) as found:
        found.wait("chief 0")
        said = {entry["name"]: entry for entry in found.said("chief 0")}
    assert said["memory"]["digest"] == said["plain"]["digest"]
    assert said["budget"]["digest"] == said["plain"]["digest"]
    (plan,) = said["memory"]["plans"]
    assert plan["clones"]
    (plan,) = said["budget"]["plans"]
    assert plan["clones"] and plan["whole"] <= plan["budget"]
