"""The page ``docs/side-by-side.md``, made from the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rich.markup import escape

from benchmarks.experiment import Columns, Figure, Results
from benchmarks.peers.cells import MEMORY, TIME, Beside, at_its_time, exact, verdict

INTRODUCTION = """\
# Side by side

This page compares `memsaving_gradients` (*ours*) with plain TensorFlow, and with *peers*: the ways
of TensorFlow and Keras to save memory. All of them train the same networks on the same machine in
the same run. `make bench-peers` (`python -m benchmarks --only peers`) writes this page, with its
numbers and verdicts. The raw figures are in `benchmarks/results/peers.json`.

TensorFlow {tensorflow}, Keras {keras}, Python {python}, {machine}, no GPU. {when}.

## How to read it

Each row compares ours with a peer twice: at the peer's own memory, and at the peer's own time.

- **memory** is the transient peak of a step: the most bytes that TensorFlow's allocator gave out,
  less the bytes before the step. Each figure has a fresh process. Two steps warm up; the worst of
  the next five counts. MB is 10⁶ bytes.
- **time** is the time of a step over the time of a plain step, by medians of {pairs} rounds. In
  each round, plain, the peer, ours and plain again take turns in one process. **±** is the
  deviation of plain from itself. A difference of less than twice this deviation means nothing.
- **lines** is the number of lines that the peer's user adds to (or changes in) the plain step. The
  source of `benchmarks/peers/variants.py` is counted: its statements, whatever their layout. Ours
  takes the same {lines} lines in every network.
- **numbers** compares the results of one step with plain training's: all gradients, and the moving
  averages of batch normalization after the step. Op determinism is on, and grappler's arithmetic
  rewriting is off. *Wrong*: a number is off by more than a thousandth of the largest number. *As
  plain steps*: numbers are off by at most twice the spread of plain steps, which do not repeat
  their bits in every network.
- **ours: time at its memory** is the fastest plan within the peer's memory:
  `ms.gradients(loss, variables, budget=<the peer's peak in bytes>, profile=True)`.
- **ours: memory at its time** is the least memory at which a step is estimated to take no more time
  than the peer's: `ms.gradients(loss, variables, max_slowdown=<the peer's time>, profile=True)`.
  Estimates are seldom exact, so brackets contain the measured time against the peer's, both in the
  same process. A † marks the plan within the peer's memory. It is in this column if it took less
  memory and no more time, as measured.
- ✓ means that ours is better or equal. ✗ means that ours is worse: by more than {memory:.0%} of
  memory, or by more time than {time:.0%} and twice the noise.

Costs of ops are measured (`profile=True`), once for each kind of op and shape. A peer that takes at
least 98 % of the plain peak saves nothing. For all of these peers, ours is measured once, at the
least memory and the least time among them. The plan for the least time is timed together with the
fastest of these peers. In every row, ours computes the same bits as one of eight plain steps,
unless a note says otherwise.

Steps compute the loss and all gradients, and take the sum of squares of each gradient. There is no
optimizer.

## How peers are used

Each peer is used as a competent user would, and its known traps are avoided where possible (see
`benchmarks/peers/variants.py`):

- `tf.recompute_grad` wraps blocks: Keras models between two layers of the network. The last block
  is not wrapped, because its gradient comes at once. If two sizes of blocks make sense, both have
  rows. Recomputation runs the Python of a block again. So batch normalization moves its averages
  twice in a step, and Keras' dropout draws another mask for the gradient than for the loss. No
  message reports either effect.
- `keras.RematScope` surrounds the building of the layers. In a graph, TensorFlow refuses the
  keyword arguments that the scope passes on, `training` first of all. So `"full"` and
  `"larger_than"` fail for networks with layers that need `training`; `"list_of_layers"` gets all
  other layers. The scope works layer by layer: the input of each layer stays, and these inputs are
  most of the memory.
- Grappler's memory optimizer has no public key in TensorFlow 2. A `ConfigProto` reaches it if eager
  execution is switched off and on again before anything else. The optimizer puts copies of cheap
  ops in front of the gradients that read them.

## GPUs

`make bench-gpu` (`python -m benchmarks --only gpu`) measures plain training, the default mode,
`budget=0.45` and Keras' own choice of XLA on a GPU. Without a GPU, it says so and measures nothing.
It has run on no GPU so far; the tests run its code on a CPU.
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
    """Return the page, with the names of ``networks`` that have no results."""
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
    gap_lines = [*gaps(cases), *(f"{name}: all figures" for name in absent)]
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
    """Return our time within the peer's memory, and the memory taken."""
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
    """Return our memory within the peer's time, and the time taken."""
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
    """Return the text without characters that end a cell of a table."""
    return text.replace("|", "/").replace("\n", " ")[:160]


def gaps(cases: Results) -> Iterator[str]:
    """Yield the figures that are not measured yet, by network."""
    for name, case in cases.items():
        made = [found for found in case["peers"].values() if "peak" in found]
        parts = {
            "peers": len(case["peers"]) < len(case["titles"]),
            "our memory": any("at_memory" not in found for found in made),
            "numbers": any("exact" not in found for found in made),
            "times": any("times" not in found for found in made),
            "ours at the peers' times": any("at_time" not in found for found in made),
        }
        if any(parts.values()):
            yield f"{name}: {', '.join(what for what, missing in parts.items() if missing)}"


def _misses(figures: Sequence[Figure], gaps: Sequence[str]) -> str:
    """Return the number of bars that are met, the missed bars, and the missing figures."""
    missed = [figure for figure in figures if not figure.passed]
    met = len(figures) - len(missed)
    lines = ["## Bars", "", f"{met} of {len(figures)} figures meet their bars."]
    lines += [""] if missed else []
    lines += [
        f"- {figure.what}: {figure.value:.3f}, above the bar of {figure.limit:.3f}"
        for figure in missed
    ]
    if gaps:
        lines += ["", "Not measured yet; the next run of the command measures these figures:", ""]
        lines += [f"- {gap}" for gap in gaps]
    return "\n".join([*lines, ""])
