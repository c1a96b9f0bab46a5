"""``python -m benchmarks.peers``: ours beside what TensorFlow and Keras offer, at each peer's memory and at each peer's time.

For each network: the transient peak of plain training and of every peer; ours within that peak as a budget in bytes; numbers of one step beside
those of plain training; times of all of them in one process; and ours with the peer's time as ``max_slowdown``, measured and timed
beside it. Peaks have a process each (worst of five steps after two). What is in the results file is not measured again, but with ``--again``.
Writes ``docs/side-by-side.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console

from benchmarks.arguments import count, new_file, some_of
from benchmarks.bars import chosen, options_for, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from benchmarks.peers import page, variants
from benchmarks.peers.cells import idle, judge
from benchmarks.peers.lines import added_lines
from benchmarks.peers.networks import NETWORKS, peers_of
from graph_tools.errors import GraphToolsError
from graph_tools.memory.measure import in_fresh_process
from memsaving_gradients.planners import PLANNERS

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
PAGE = Path(__file__).parents[2] / "docs" / "side-by-side.md"
PARTS = ("memory", "exact", "time")
#: Where plans lie between a measurement of memory and one of time.
PLANS = Path(platformdirs.user_cache_dir("memsaving_gradients"), "side-by-side")
#: A step may take no less than a plain one.
LEAST_SLOWDOWN = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, print the bars, write the page; 1 if a bar is missed."""
    options = _parse(arguments)
    names = chosen(NETWORKS, options.only, apart="tiny")
    if not names:
        return 2
    known: dict[str, Any] = {}
    if options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    console = Console(stderr=True)
    for name in names:
        case = {} if options.again else known.get(name, {})
        known[name] = case
        bench = Bench(name, case, options, console)
        if "memory" in options.parts:
            bench.memory()
        if "exact" in options.parts:
            bench.exact()
        if "time" in options.parts and options.pairs:
            bench.time()
            if "exact" in options.parts:
                bench.exact()
    figures = judge(known)
    write(options.json, {name: known[name] for name in names}, figures)
    if options.page:
        absent = [name for name in NETWORKS if name not in known and name != "tiny"]
        options.page.write_text(page.text(known, figures, absent), encoding="utf-8")
    print_figures(figures, Console(width=140))
    return int(not all(figure.passed for figure in figures))


@dataclass
class Bench:
    """The measurements of one network; ``case`` is what is known, and grows."""

    name: str
    case: dict[str, Any]
    options: argparse.Namespace
    console: Console

    def __post_init__(self) -> None:
        self.case.setdefault("peers", {})
        self.case.setdefault("ours", {})
        network = NETWORKS[self.name]
        self.case["title"] = network.title
        self.case["titles"] = {name: peer.title for name, peer in peers_of(network).items()}
        self.case["lines"] = {"ours": added_lines(variants.ours, to=variants.plain)} | {
            name: added_lines(peer.function, *peer.others, to=variants.plain)
            for name, peer in peers_of(network).items()
        }

    def memory(self) -> None:
        """Peaks: plain, each peer, and ours within each of these."""
        self._once(self.case, "plain", lambda: self._peak({"peer": "plain"}))
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
        """Numbers of one step: each peer's and ours, beside those of plain training."""
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
        """Times of peers with ours at their memory; then ours at their times, and times of that."""
        groups = self._groups()
        self._timed("memory", "at_memory", groups)
        for peers in groups:
            slowdown = round(max(LEAST_SLOWDOWN, min(map(self._ratio, peers))), 3)
            if "at_time" not in self._peer(peers[0]):
                key = self._ours({"max_slowdown": slowdown})
                for peer in peers:
                    self._peer(peer)["at_time"] = key
                self._write()
        # Of those that save nothing the fastest, whose time ours was asked for.
        fastest = [min(peers, key=self._ratio) for peers in groups]
        self._timed("time", "at_time", [[peer] for peer in fastest])

    def _groups(self) -> list[list[str]]:
        """Peers that save memory, each alone, and those that save nothing together: ours is measured for each group."""
        plain = self.case["plain"]["peak"]
        made = {peer: found for peer, found in self.case["peers"].items() if "peak" in found}
        saving = [[peer] for peer, found in made.items() if not idle(found["peak"], plain)]
        rest = [peer for peer, found in made.items() if idle(found["peak"], plain)]
        return [*saving, rest] if rest else saving

    def _timed(self, run: str, which: str, groups: list[list[str]]) -> None:
        """Time all groups in one process, unless the run is known."""
        if all(run in self._peer(peer).get("times", {}) for peers in groups for peer in peers):
            return
        named: list[list[tuple[str, dict[str, Any]]]] = []
        for peers in groups:
            key = self._peer(peers[0])[which]
            ways: list[tuple[str, dict[str, Any]]] = [(peer, {"peer": peer}) for peer in peers]
            if "peak" in self.case["ours"][key]:
                ways.append((key, self._planned(key)))
            named.append(ways)
        times = self._fresh("times", groups=named, pairs=self.options.pairs)
        for name, found in times.items():
            holder = self.case["peers"].get(name) or self.case["ours"][name]
            holder.setdefault("times", {})[run] = {**found, "pairs": self.options.pairs}
            self._told(f"{name}: time", found)
        self._write()

    def _ours(self, settings: dict[str, Any]) -> str:
        """Measure ours with ``settings``, and measured costs; its key."""
        settings = {**settings, "profile": True}
        if self.options.planner != "auto":
            settings["planner"] = self.options.planner
        key = ", ".join(f"{name}={value}" for name, value in settings.items())
        found = self.case["ours"].setdefault(key, {"settings": settings})
        if not {"peak", "failed", "refused"} & set(found):
            PLANS.mkdir(parents=True, exist_ok=True)
            saved = str(self._plan_file(key))
            found |= self._told(f"{key}: peak", self._peak({"ours": settings}, save=saved))
            self._write()
        return key

    def _planned(self, key: str) -> dict[str, Any]:
        """Ours by the plan that was measured; made again if its file is gone. Plain gradients have none."""
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
        """Call a probe in a process of its own; one that ends badly has failed."""
        try:
            found: dict[str, Any] = in_fresh_process(
                f"benchmarks.peers.probes:{function}",
                {"network": self.name, **kwargs},
                ENVIRONMENT,
            )
        except GraphToolsError as error:
            if function != "peak":
                raise
            return {"failed": str(error).splitlines()[0]}
        return found

    def _once(self, where: dict[str, Any], what: str, measure: Callable[[], Any]) -> None:
        if what not in where:
            where[what] = self._told(what, measure())
            self._write()

    def _told(self, what: str, found: dict[str, Any]) -> dict[str, Any]:
        """Say on standard error what came out, and when."""
        shown = {k: v for k, v in found.items() if k in ("peak", "ratio", "control", "refused")}
        shown |= {k: v for k, v in found.items() if k in ("failed", "gradient", "state", "equal")}
        clock = time.strftime("%H:%M:%S")
        self.console.print(f"{clock} {self.name}, {what}: {shown}", highlight=False, markup=False)
        return found

    def _write(self) -> None:
        write(self.options.json, {self.name: self.case})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_for("peers", __doc__, RESULTS, "names of networks")
    parser.add_argument("--again", action="store_true", help="measure what has results, too")
    parser.add_argument(
        "--pairs", type=count, default=15, help="rounds of steps for times; 0: none"
    )
    parser.add_argument(
        "--parts",
        type=some_of(PARTS),
        default=list(PARTS),
        metavar="PARTS",
        help="of memory, exact, time; the later ones need the earlier ones' results",
    )
    parser.add_argument("--planner", choices=list(PLANNERS), default="auto", help="who plans ours")
    parser.add_argument("--page", type=new_file, default=PAGE, metavar="PATH", help="of the tables")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
