"""Memory that XLA assigns to compiled steps, with the time to compile and to run them.

Each step is a ``tf.function`` with ``jit_compile=True`` that returns sums of squares of its
gradients. Memory is the bytes of temporaries in XLA's own buffer assignment, which are a single
allocation of TensorFlow's allocator. *Compile* is the time of the first step, *step* the least time
of three later ones. Each row has a process of its own, so ratios of times need a quiet machine.

The modes are plain; ``tf.recompute_grad`` around blocks, where the side-by-side comparison has it;
the default; and budgets of 0.8 and 0.6 of the bytes that XLA assigns to plain training. *Trace* is
the time until a step is ready to be called; with a budget it includes compilations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.experiment import Columns, Experiment, Figure, Job, Results, Settings
from benchmarks.measuring import fresh
from benchmarks.networks import SMALL
from graph_tools.xla.program import compiled

_APPLICATION = "application"
_BLOCKS = {"ends": r"pool1_pool|conv\d_block\d_out"}
#: Builders and options for `benchmarks.networks.build`, and how blocks are wrapped in
#: ``tf.recompute_grad``: a function of `benchmarks.peers.variants` and its arguments.
NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[str, dict[str, Any]] | None]] = {
    "resnet50": (
        _APPLICATION,
        {"name": "ResNet50", "batch": 8, "image": 160},
        ("recompute_chain", _BLOCKS),
    ),
    "resnet50_64": (
        _APPLICATION,
        {"name": "ResNet50", "batch": 8, "image": 64},
        ("recompute_chain", _BLOCKS),
    ),
    "mobilenetv2": (_APPLICATION, {"name": "MobileNetV2", "batch": 8, "image": 128}, None),
    "densenet121": (
        _APPLICATION,
        {"name": "DenseNet121", "batch": 4, "image": 128},
        ("recompute_chain", {"ends": r"pool1|conv\d_block\d+_concat|pool\d_pool"}),
    ),
    "efficientnetb0": (_APPLICATION, {"name": "EfficientNetB0", "batch": 8, "image": 128}, None),
    "unet": ("unet", {"filters": 16}, ("recompute_unet", {})),
    "encoder": ("encoder", {}, ("recompute_encoder", {"ends": r"layer\d+_out"})),
    "lstm": ("lstm", {}, ("recompute_lstm", {"steps": 8})),
    "resnet83": ("cifar_resnet", {"blocks": 9, "batch": 16}, None),
    "mlp": ("mlp", {}, None),
    # For tests: seconds instead of minutes.
    "tiny": (*SMALL["dense_chain"], ("recompute_chain", {"ends": r"dense(3|7)"})),
}
PLAIN, PEER = "plain", "recompute_grad"
#: Our modes, and their arguments of `memsaving_gradients.gradients`.
OURS: dict[str, dict[str, Any]] = {
    "default": {},
    "0.8": {"budget": 0.8},
    "0.6": {"budget": 0.6},
}
#: Bars for the default mode's memory, time and time to compile, as shares of plain.
MEMORY = {"resnet50": 0.40, "resnet83": 0.25, "mlp": 0.25}
MEMORY_OF_OTHERS, TIME, COMPILE = 0.5, 1.3, 1.5
#: The number of later steps to time.
STEPS = 3


def rows(settings: Settings) -> list[str]:
    """Return the modes of each network."""
    return [
        f"{name}-{mode}"
        for name, (_, _, peer) in NETWORKS.items()
        for mode in (PLAIN, PEER, *OURS)
        if mode != PEER or peer is not None
    ]


def run(job: Job) -> dict[str, Any]:
    """Compile a network in one mode, run it, and read XLA's buffer assignment."""
    network, _, mode = job.row.partition("-")
    result: dict[str, Any] = fresh("claims.compiled:measured", network=network, mode=mode)
    return result


def measured(network: str, mode: str) -> dict[str, Any]:
    """Measure one mode in this process."""
    from memsaving_gradients.errors import BudgetError

    start = time.perf_counter()
    try:
        step, graph, plan = _step(network, mode)
    except BudgetError as error:
        return {"refused": error.least}
    traced = time.perf_counter()
    sums = step()
    first = time.perf_counter()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    assignment = compiled(graph, batch=1).assignment
    peak = assignment.peak
    return {
        "temporaries": assignment.temporaries,
        "alive": peak.bytes,
        "largest": [[live.bytes, live.instruction, *live.op_names[:1]] for live in peak.values[:8]],
        "trace": traced - start,
        "compile": first - traced,
        "step": min(times),
        "squares": sums,
        "simulated": plan,
    }


def _step(network: str, mode: str) -> tuple[Callable[[], float], Any, list[float] | None]:
    """Return a step, its graph, and three figures of its plan: the simulated plain peak, the
    simulated peak, and the estimated extra time."""
    from benchmarks.steps import make_step

    model, options, peer = NETWORKS[network]
    if mode == PEER:
        assert peer is not None
        return *_peer_step(model, options, *peer), None
    ours = OURS.get(mode)
    made = make_step(model, options, ours=ours is not None, how="xla", settings=ours)
    if ours is None:
        return lambda: float(sum(made.run())), made.graph, None
    import memsaving_gradients as ms

    plans = ms.plans(made.graph)
    peaks = [plans[-1].peak_plain, plans[-1].peak, plans[-1].extra_time] if plans else None
    return lambda: float(sum(made.run())), made.graph, peaks


def _peer_step(
    model: str, options: dict[str, Any], name: str, arguments: dict[str, Any]
) -> tuple[Callable[[], float], Any]:
    import tensorflow as tf

    from benchmarks.networks import build
    from benchmarks.peers import variants

    network, gradients = getattr(variants, name)(lambda: build(model, **options), **arguments)
    batch = [tf.constant(b) for b in network.batch]

    @tf.function(jit_compile=True, autograph=False)
    def step(*batch: Any) -> Any:
        x = batch[0] if len(batch) == 2 else batch[:-1]
        _, grads = gradients(x, batch[-1])
        made = [tf.convert_to_tensor(g) for g in grads if g is not None]
        return tf.stack([tf.reduce_sum(tf.square(g)) for g in made])

    graph = step.get_concrete_function(*batch).graph
    return lambda: float(sum(step(*batch).numpy())), graph


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each mode of each network."""
    for network in NETWORKS:
        plain = results.get(f"{network}-{PLAIN}")
        for mode in (PLAIN, PEER, *OURS):
            found = results.get(f"{network}-{mode}")
            if found is None:
                continue
            if "temporaries" not in found:
                yield network, mode, "refused", *[""] * 7
                continue
            simulated = found["simulated"]
            yield (
                network,
                mode,
                f"{found['temporaries'] / 1e6:.1f}",
                _ratio(found, plain, "temporaries"),
                f"{simulated[1] / 1e6:.1f}" if simulated else "",
                f"{found['trace']:.0f}",
                f"{found['step']:.2f}",
                _ratio(found, plain, "step"),
                f"{found['compile']:.0f}",
                _ratio(found, plain, "compile"),
            )


def _ratio(found: Any, plain: Any, figure: str) -> str:
    return f"{found[figure] / plain[figure]:.2f}" if plain else ""


def bars(results: Results) -> list[Figure]:
    """Return the figures of the default mode and of budgets with their bars."""
    figures = []
    for network in NETWORKS:
        figures += [
            Figure(f"{network}: budget {mode}", found["temporaries"] / plain["temporaries"], limit)
            for mode, asked in OURS.items()
            if (limit := asked.get("budget"))
            and (plain := results.get(f"{network}-{PLAIN}"))
            and "temporaries" in (found := results.get(f"{network}-{mode}") or {})
        ]
        plain, ours = (results.get(f"{network}-{mode}") for mode in (PLAIN, "default"))
        if not plain or not ours or "temporaries" not in ours:
            continue
        limits = {
            "temporaries": MEMORY.get(network, MEMORY_OF_OTHERS),
            "step": TIME,
            "compile": COMPILE,
        }
        for figure, limit in limits.items():
            figures.append(Figure(f"{network}: {figure}", ours[figure] / plain[figure], limit))
    return figures


COLUMNS = Columns(
    "temporaries that XLA assigns on a CPU",
    "network | mode | MB | of plain | simulated MB | trace s | step s | of plain | compile s"
    " | of plain",
    lines,
    text=("mode",),
)
EXPERIMENT = Experiment(
    "xla",
    rows=rows,
    run=run,
    columns=(COLUMNS,),
    bars=bars,
    apart=tuple(f"tiny-{mode}" for mode in (PLAIN, PEER, *OURS)),
)
