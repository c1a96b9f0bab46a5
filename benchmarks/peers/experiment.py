"""Ours against the ways of TensorFlow and Keras, at each peer's memory and at each peer's time.

Each network has five measurements: the transient peaks of plain training and of every peer; ours
within the peer's peak as a budget in bytes; numbers of one step against plain training's; times of
all of them in one process; and ours with the peer's time as ``max_slowdown``, timed with the peer.
Each peak has its own process (worst of five steps after two). Each figure is written at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from benchmarks.experiment import Experiment, Job, Page, Setting, Settings
from benchmarks.measuring import fresh
from benchmarks.peers import page, variants
from benchmarks.peers.cells import idle, judge
from benchmarks.peers.lines import added_lines
from benchmarks.peers.networks import NETWORKS, peers_of
from benchmarks.settings import pairs, planner, some_of
from graph_tools.errors import GraphToolsError

PARTS = ("memory", "exact", "time")
#: The folder that keeps plans between a measurement of memory and one of time.
PLANS = Path(platformdirs.user_cache_dir("memsaving_gradients"), "side-by-side")
#: The least ``max_slowdown``: a step takes at least as long as a plain one.
LEAST_SLOWDOWN = 1.0


def run(job: Job) -> dict[str, Any]:
    """Measure the missing figures of a network."""
    bench, parts = Bench(job), job.settings["parts"]
    if "memory" in parts:
        bench.memory()
    if "exact" in parts:
        bench.exact()
    if "time" in parts and job.settings["pairs"]:
        bench.time()
        if "exact" in parts:
            bench.exact()
    return bench.case


def due(result: Mapping[str, Any], settings: Settings, again: bool) -> bool:
    """Return whether figures of a network are missing."""
    return again or bool(list(page.gaps({"": result})))


class Bench:
    """The measurements of one network, which add figures to ``case``."""

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, job.row
        self.case = {} if job.again else dict(job.known)
        self.case.setdefault("peers", {})
        self.case.setdefault("ours", {})
        network = NETWORKS[self.name]
        peers = peers_of(network)
        self.case["title"] = network.title
        self.case["titles"] = {name: peer.title for name, peer in peers.items()}
        self.case["lines"] = {"ours": added_lines(variants.ours, to=variants.plain)} | {
            name: added_lines(peer.function, *peer.others, to=variants.plain)
            for name, peer in peers.items()
        }

    def memory(self) -> None:
        """Measure peaks: plain, each peer, and ours within each peer's peak."""
        if "plain" not in self.case:
            self.case["plain"] = self._told("plain", self._peak({"peer": "plain"}))
            self._write()
        for peer in self.case["titles"]:
            found = self.case["peers"].setdefault(peer, {})
            if "failed" not in found and "peak" not in found:
                found |= self._told(f"{peer}: peak", self._peak({"peer": peer}))
                self._write()
        for peers in self._groups():
            budget = min(self._peer(peer)["peak"] for peer in peers)
            key = self._ours({"budget": budget})
            for peer in peers:
                self._peer(peer)["at_memory"] = key
        self._write()

    def exact(self) -> None:
        """Compare numbers of one step, each peer's and ours, with plain training's."""
        missing: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            peer: (found, {"peer": peer})
            for peer, found in self.case["peers"].items()
            if "peak" in found and "exact" not in found
        }
        missing |= {
            key: (found, {"ours": found["settings"]})
            for key, found in self.case["ours"].items()
            if "peak" in found and "exact" not in found
        }
        if not missing:
            return
        ways = {what: way for what, (_, way) in missing.items()}
        for what, different in self._fresh("numbers", ways=ways).items():
            missing[what][0]["exact"] = self._told(f"{what}: numbers", different)
        self._write()

    def time(self) -> None:
        """Time peers with ours at their memory; then measure and time ours at the peers' times."""
        groups = self._groups()
        self._timed("memory", "at_memory", groups)
        for peers in groups:
            slowdown = round(max(LEAST_SLOWDOWN, min(map(self._ratio, peers))), 3)
            if "at_time" not in self._peer(peers[0]):
                key = self._ours({"max_slowdown": slowdown})
                for peer in peers:
                    self._peer(peer)["at_time"] = key
                self._write()
        # Of the peers that save nothing, only the fastest: ours was limited to its time.
        fastest = [min(peers, key=self._ratio) for peers in groups]
        self._timed("time", "at_time", [[peer] for peer in fastest])

    def _groups(self) -> list[list[str]]:
        """Return peers that save memory, each alone, and peers that save nothing, together."""
        plain = self.case["plain"]["peak"]
        made = {peer: found for peer, found in self.case["peers"].items() if "peak" in found}
        saving = [[peer] for peer, found in made.items() if not idle(found["peak"], plain)]
        rest = [peer for peer, found in made.items() if idle(found["peak"], plain)]
        return [*saving, rest] if rest else saving

    def _timed(self, run: str, which: str, groups: list[list[str]]) -> None:
        """Time all groups in one process, unless they have times of this run."""
        if all(run in self._peer(peer).get("times", {}) for peers in groups for peer in peers):
            return
        named: list[list[tuple[str, dict[str, Any]]]] = []
        for peers in groups:
            key = self._peer(peers[0])[which]
            ways: list[tuple[str, dict[str, Any]]] = [(peer, {"peer": peer}) for peer in peers]
            if "peak" in self.case["ours"][key]:
                ways.append((key, self._planned(key)))
            named.append(ways)
        times = self._fresh("times", groups=named, pairs=self.job.settings["pairs"])
        for name, found in times.items():
            holder = self.case["peers"].get(name) or self.case["ours"][name]
            holder.setdefault("times", {})[run] = {**found, "pairs": self.job.settings["pairs"]}
            self._told(f"{name}: time", found)
        self._write()

    def _ours(self, settings: dict[str, Any]) -> str:
        """Measure ours with ``settings`` and measured costs, and return its key."""
        settings = {**settings, "profile": True}
        if (name := self.job.settings["planner"]) != "auto":
            settings["planner"] = name
        key = ", ".join(f"{name}={value}" for name, value in settings.items())
        found = self.case["ours"].setdefault(key, {"settings": settings})
        if not {"peak", "failed", "refused"} & set(found):
            PLANS.mkdir(parents=True, exist_ok=True)
            saved = str(self._plan_file(key))
            found |= self._told(f"{key}: peak", self._peak({"ours": settings}, save=saved))
            self._write()
        return key

    def _planned(self, key: str) -> dict[str, Any]:
        """Return our way with the measured plan, or with the settings if its file is gone."""
        file = self._plan_file(key)
        if self.case["ours"][key]["plan"] is not None and file.exists():
            return {"ours": {"plan": str(file)}}
        return {"ours": self.case["ours"][key]["settings"]}

    def _plan_file(self, key: str) -> Path:
        return PLANS / f"{self.name} {key}.json"

    def _peer(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.case["peers"][name]
        return found

    def _ratio(self, peer: str) -> float:
        return float(self._peer(peer)["times"]["memory"]["ratio"])

    def _peak(self, way: dict[str, Any], save: str | None = None) -> dict[str, Any]:
        return self._fresh("peak", way=way, save=save)

    def _fresh(self, function: str, **kwargs: Any) -> dict[str, Any]:
        """Call a probe in a process of its own; for a peak, return an error as ``"failed"``."""
        try:
            found: dict[str, Any] = fresh(f"peers.probes:{function}", network=self.name, **kwargs)
        except GraphToolsError as error:
            if function != "peak":
                raise
            return {"failed": str(error).splitlines()[0]}
        return found

    def _told(self, what: str, found: dict[str, Any]) -> dict[str, Any]:
        """Print the result and the time of day on standard error, and return the result."""
        shown = {k: v for k, v in found.items() if k in ("peak", "ratio", "control", "refused")}
        shown |= {k: v for k, v in found.items() if k in ("failed", "gradient", "state", "equal")}
        clock = time.strftime("%H:%M:%S")
        self.job.say(f"{clock} {self.name}, {what}: {shown}")
        return found

    def _write(self) -> None:
        self.job.save(self.case)


EXPERIMENT = Experiment(
    "peers",
    rows=lambda settings: NETWORKS,
    run=run,
    columns=(page.COLUMNS,),
    bars=judge,
    due=due,
    apart=("tiny",),
    page=Page("side-by-side.md", lambda results: page.text(results, judge(results), NETWORKS)),
    settings={
        "pairs": pairs(15),
        "parts": Setting(
            list(PARTS),
            some_of(PARTS),
            f"parts to measure, of {', '.join(PARTS)}; each needs results of the parts before it",
        ),
        "planner": planner(),
    },
)
