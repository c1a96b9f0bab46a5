"""``docs/side-by-side.md``, made of the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rich.markup import escape

from benchmarks.experiment import Columns, Figure, Results
from benchmarks.peers.cells import MEMORY, TIME, Beside, at_its_time, exact, verdict

INTRODUCTION = """\
# Side by side

The same networks, trained on the same machine in the same run by plain TensorFlow, by what TensorFlow and Keras themselves offer against
memory, and by `memsaving_gradients`. This page is written by `make bench-peers` (`python -m benchmarks --only peers`), numbers and verdicts
included; the raw figures are in `benchmarks/results/peers.json`.

TensorFlow {tensorflow}, Keras {keras}, Python {python}, {machine}, no GPU. {when}.

## How to read it

Each row is a peer, and ours beside it, twice: at the peer's own memory, and at the peer's own time.

- **memory** is the transient peak of a step: what TensorFlow's allocator has given out at most, less what was there before the step. A fresh
  process each, two steps to warm up, the worst of the next five. MB is 10⁶ bytes.
- **time** is the time of a step over that of a plain step: medians of {pairs} rounds, in which plain, the peer, ours and plain again take turns in one
  process. **±** is how far plain is from itself there; a difference of less than twice that says nothing.
- **lines** is how many lines the peer's user adds to (or changes in) the plain step, counted in the source of
  `benchmarks/peers/variants.py`, where statements count and their layout does not. Ours are the same {lines} in every network.
- **numbers** is what one step computes, beside plain training's, under op determinism and without grappler's arithmetic rewriting: all gradients, and the moving
  averages of batch normalization after the step. *Wrong* is what is farther off than a thousandth of the largest number. *As plain steps* is what is no farther off
  than twice what steps of plain training are from each other, which do not repeat their bits in every network.
- **ours: time at its memory** is `ms.gradients(loss, variables, budget=<the peer's peak in bytes>, profile=True)`: the fastest plan within the memory that the peer took.
- **ours: memory at its time** is `ms.gradients(loss, variables, max_slowdown=<the peer's time>, profile=True)`: the least memory at which a step is estimated to take no
  more time than the peer's; in brackets what it did take, beside the peer in the same process. Estimates are seldom exact. Where what was asked for within the
  peer's memory takes less memory and no more time, as measured, that stands here, with a †.
- ✓ is better or equal, ✗ is worse: more than {memory:.0%} more memory, or more than {time:.0%} and twice the noise more time.

Costs of ops are measured (`profile=True`), once for each kind of op and shape. A peer that takes at least 98 % of the plain peak saves nothing; ours is
measured once for all of these, at the least memory and the least time among them, and its time there stands beside the fastest one's. Ours computes the same bits as one of eight plain steps in every row, unless a note says otherwise.

Steps compute the loss and all gradients, and take the sum of squares of each. There is no optimizer.

## How peers were asked

As a competent user would, with their known traps avoided where that can be done (see the module above):

- `tf.recompute_grad` is wrapped around blocks: Keras models between two layers of the network, all but the last one, whose gradient comes at once. Where
  two sizes of blocks make sense, both are shown. What it recomputes is Python run again: batch normalization moves its averages twice in a step, and
  Keras' dropout draws another mask for the gradient than it drew for the loss. Neither is said anywhere when it happens.
- `keras.RematScope` is around the building of the layers. In a graph TensorFlow refuses the keyword arguments that it passes on, `training` first of all, so
  that `"full"` and `"larger_than"` fail for networks with layers that need it; `"list_of_layers"` is given all layers that do not. It works layer by
  layer: the input of each layer stays, which is most of what there is.
- Grappler's memory optimizer has no public key in TensorFlow 2; a `ConfigProto` reaches it if eager execution is switched off and on again before anything
  else. It puts copies of cheap ops in front of the gradients that read them.

## GPUs

`make bench-gpu` (`python -m benchmarks --only gpu`) runs plain training, the default mode, `budget=0.45` and Keras' own choice of XLA on a GPU, where there is one, and says so
where there is none. It has been run on no GPU so far; its code runs on a CPU in the tests.
"""


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each network and peer."""
    for name, case in results.items():
        for peer, title in case["titles"].items():
            yield name, *map(escape, _row(case, peer, title, case["peers"].get(peer, {})))


COLUMNS = Columns(
    "side by side",
    "network | peer | memory | time | ± | lines | numbers | time at its memory | memory at its"
    " time",
    lines,
    text=("peer", "numbers"),
)


def text(results: Results, figures: Sequence[Figure], networks: Iterable[str] = ()) -> str:
    """Return the page; those of ``networks`` that have no results are named."""
    cases = {name: case for name, case in results.items() if name != "tiny" or len(results) == 1}
    stamps = [case for case in cases.values() if "when" in case]
    newest: Mapping[str, Any] = max(stamps, key=lambda case: case["when"], default={})
    pairs = {
        time["pairs"]
        for case in cases.values()
        for found in case["peers"].values()
        for time in found.get("times", {}).values()
    }
    head = INTRODUCTION.format(
        tensorflow=newest.get("tensorflow", version("tensorflow")),
        keras=version("keras"),
        python=newest.get("python", "?"),
        machine=newest.get("machine", "?"),
        when=str(newest.get("when", ""))[:10],
        pairs=min(pairs, default=0),
        lines=next((case["lines"]["ours"] for case in cases.values()), "?"),
        memory=MEMORY - 1,
        time=TIME - 1,
    )
    absent = [name for name in networks if name not in results and name != "tiny"]
    gap_lines = [*gaps(cases), *(f"{name}: everything" for name in absent)]
    parts = [head, *(_section(case) for case in cases.values()), _misses(figures, gap_lines)]
    return "\n".join(parts)


def _section(case: Mapping[str, Any]) -> str:
    plain = case["plain"]["peak"]
    lines = [
        f"## {case['title']}",
        "",
        f"Plain training: {plain / 1e6:,.1f} MB.",
        "",
        (
            "| peer | memory | time | ± | lines | numbers | ours: time at its memory | ours: memory"
            " at its time |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for peer, title in case["titles"].items():
        found = case["peers"].get(peer, {})
        lines.append("| " + " | ".join(_row(case, peer, title, found)) + " |")
    inexact = [
        f"Ours with `{key}`: {verdict(found['exact'])}."
        for key, found in case["ours"].items()
        if not exact(found.get("exact", {"equal": True}))
    ]
    return "\n".join([*lines, "", *inexact, ""] if inexact else [*lines, ""])


def _row(case: Mapping[str, Any], peer: str, title: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield title
    count = str(case["lines"][peer])
    if "peak" not in found:
        yield from ("", "", "", count, f"fails: {_clean(found.get('failed', 'not run'))}", "", "")
        return
    times = found.get("times", {}).get("memory")
    yield f"{found['peak'] / 1e6:,.1f} ({found['peak'] / case['plain']['peak']:.0%})"
    yield f"{times['ratio']:.3f}" if times else ""
    yield f"{abs(times['control'] - 1):.3f}" if times else ""
    yield count
    yield _clean(verdict(found["exact"])) if "exact" in found else ""
    yield _at_memory(case["ours"].get(found.get("at_memory")), found)
    yield _at_time(case, found)


def _at_memory(ours: Mapping[str, Any] | None, peer: Mapping[str, Any]) -> str:
    """Our time with the peer's memory, and what memory that took."""
    if ours is None:
        return ""
    if "refused" in ours:
        return f"✗ refused: at least {ours['refused']['least'] / 1e6:,.1f} MB"
    if "peak" not in ours:
        return f"✗ fails: {_clean(ours['failed'])}"
    memory = f"({ours['peak'] / 1e6:,.1f} MB)"
    beside = Beside(peer, ours, "memory")
    if beside.times is None:
        return memory
    good = ours["peak"] <= MEMORY * peer["peak"] and beside.as_fast
    return f"{_mark(good)} {beside.times[0]['ratio']:.3f} {memory}"


def _at_time(case: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    """Our memory with the peer's time, and what time that took."""
    beside = at_its_time(case, peer)
    if beside is None:
        ours = case["ours"].get(peer.get("at_time"))
        return "" if ours is None else f"✗ fails: {_clean(ours.get('failed', 'refused'))}"
    good = beside.ours["peak"] <= MEMORY * peer["peak"] and beside.as_fast
    took = ""
    if beside.times is not None:
        mine, theirs = beside.times
        took = (
            f" ({mine['ratio']:.3f} against {theirs['ratio']:.3f} ± {abs(mine['control'] - 1):.3f})"
        )
    asked = " †" if beside.run == "memory" else ""
    return f"{_mark(good)} {beside.ours['peak'] / 1e6:,.1f} MB{took}{asked}"


def _mark(good: bool) -> str:
    return "✓" if good else "✗"


def _clean(text: str) -> str:
    """Without what would end a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")[:160]


def gaps(cases: Results) -> Iterator[str]:
    """Yield what is not measured yet, by network."""
    for name, case in cases.items():
        made = [found for found in case["peers"].values() if "peak" in found]
        parts = {
            "peers": len(case["peers"]) < len(case["titles"]),
            "our memory": any("at_memory" not in found for found in made),
            "numbers": any("exact" not in found for found in made),
            "times": any("times" not in found for found in made),
            "ours at their times": any("at_time" not in found for found in made),
        }
        if any(parts.values()):
            yield f"{name}: {', '.join(what for what, missing in parts.items() if missing)}"


def _misses(figures: Sequence[Figure], gaps: Sequence[str]) -> str:
    """How many comparisons are met, which ones are not, and what was not compared."""
    missed = [figure for figure in figures if not figure.passed]
    lines = ["## Bars", "", f"{len(figures) - len(missed)} of {len(figures)} comparisons are met."]
    lines += [""] if missed else []
    lines += [
        f"- {figure.what}: {figure.value:.3f}, where {figure.limit:.3f} would be equal"
        for figure in missed
    ]
    if gaps:
        lines += ["", "Not measured yet (the command goes on where it stopped):", ""]
        lines += [f"- {gap}" for gap in gaps]
    return "\n".join([*lines, ""])
