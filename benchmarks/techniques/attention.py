"""``python -m benchmarks.techniques.attention``: attention in blocks, against that of Keras.

Two tables. *Multi-head attention* (8 heads of 64, model width 512, one example, self-attention) over 2048 and 8192 positions, by our layer, and by that
of Keras with ``attention="blocks"``: the transient peak of a step, forward and gradients for weights and input, each in a fresh process, worst of five after two; the ratio of
times; how far outputs are apart.

*Additive attention* in an encoder-decoder as in Meng et al. 2017 ("Training deeper models by GPU memory optimization on TensorFlow"): the largest
batch within a limit on the transient peak. Embeddings, an LSTM that encodes, an LSTM that decodes, a dense layer on the states of each,
attention of all decoder states over all encoder states, and a loss over `VOCABULARY` words; all widths are `WIDTH`. Ours is `AdditiveAttention` in
blocks and ``memsaving_gradients.gradients``. The vocabulary is small: its logits are the same for both, and with 30,000 words they would be most of what
is left. A peak is affine in the batch, but for what the order of execution does to it: it is measured at two batches, and then at those that follow
from what was measured, up to the largest that is found to fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Figure, print_figures, write
from benchmarks.claims.runner import ENVIRONMENT
from graph_tools.memory.measure import in_fresh_process, measure_peak, time_ratio

RESULTS = Path(__file__).parents[1] / "results" / "attention.json"

#: Positions, with the part of the plain peak and of the plain time that is allowed.
LENGTHS = {2048: (1 / 8, 1.3), 8192: (1 / 30, 1.3)}
HEADS, KEY, MODEL, BATCH = 8, 64, 512, 1
#: How attention is computed, by name: as in Keras, by our layer, by the one of Keras with ``attention="blocks"``.
KINDS = ("plain", "ours", "found")
#: How far outputs may be apart.
DIFFERENCE = 1e-5
#: A step of more seconds is timed in so many pairs, others in 15.
LONG, FEW, PAIRS = 5.0, 5, 15

#: Words of a sentence, with the number of times as many examples that have to fit. Published: 3.1, 6.1, 11.5, 30.
SENTENCES = {50: 3.2, 100: 6.0, 200: 12.0, 400: 30.0}
WIDTH, VOCABULARY = 256, 1000
#: The limit, bytes.
LIMIT = 1_000_000_000
#: Batches tried after the first two.
TRIES = 6
#: Roughly what a word takes beside attention, bytes: from this the batches follow at which peaks are measured first.
WORD = 23_000


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, print it beside the bars, with what was measured before; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.techniques.attention", description=__doc__
    )
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH", help="results file")
    parser.add_argument("--only", choices=("heads", "additive"), help="one of the tables")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    if options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
    if options.only != "additive":
        for length in LENGTHS:
            results[f"heads-{length}"] = of_heads(length)
            write(options.json, {f"heads-{length}": results[f"heads-{length}"]})
    if options.only != "heads":
        for length in SENTENCES:
            results[f"additive-{length}"] = of_sentences(length)
            write(options.json, {f"additive-{length}": results[f"additive-{length}"]})
    figures = judge(results)
    write(options.json, {}, figures)
    _print(results)
    print_figures(figures, Console())
    return int(not all(figure.passed for figure in figures))


# --- multi-head attention


def of_heads(length: int) -> dict[str, Any]:
    """Peaks, times and difference of one length."""
    probe = "benchmarks.techniques.attention:heads_peak"
    peaks = {
        kind: in_fresh_process(probe, {"length": length, "kind": kind}, ENVIRONMENT)
        for kind in KINDS
    }
    times = {
        kind: in_fresh_process(
            "benchmarks.techniques.attention:heads_time",
            {"length": length, "kind": kind},
            ENVIRONMENT,
        )
        for kind in KINDS[1:]
    }
    return {**peaks, "time": times}


def heads_peak(length: int, kind: str) -> dict[str, Any]:
    """In a process of its own: the worst of five steps."""
    step, _ = _heads(length, kind)
    return dataclasses.asdict(measure_peak(step, warmup=2, steps=5))


def heads_time(length: int, kind: str) -> dict[str, Any]:
    """In a process of its own: the ratio of times, and how far outputs are apart."""
    import tensorflow as tf

    (plain, expected), (ours, found) = _heads(length, "plain"), _heads(length, kind)
    difference = float(tf.reduce_max(tf.abs(expected() - found())))
    once = time_ratio(ours, plain, pairs=1)
    pairs = PAIRS if max(once.seconds_a, once.seconds_b) < LONG else FEW
    ratio = time_ratio(ours, plain, pairs=pairs)
    return {**dataclasses.asdict(ratio), "pairs": pairs, "difference": difference}


def _heads(length: int, kind: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step, and the output; the same weights each time."""
    import keras
    import tensorflow as tf

    import memsaving_gradients as ms

    layers = ms.keras if kind == "ours" else keras.layers
    keras.utils.set_random_seed(1)
    layer = layers.MultiHeadAttention(HEADS, KEY)
    x = tf.random.stateless_normal([BATCH, length, MODEL], [1, 2])
    layer.build(x.shape, x.shape)
    weights = [v.value for v in layer.trainable_variables]

    @tf.function
    def step(x: Any) -> Any:
        loss = tf.reduce_sum(tf.square(layer(x, x)))
        if kind == "found":
            return _consumed(ms.gradients(loss, [x, *weights], attention="blocks"))
        return _consumed(tf.gradients(loss, [x, *weights]))

    @tf.function
    def output(x: Any) -> Any:
        y = layer(x, x)
        if kind == "found":
            ms.gradients(y, x, attention="blocks")
        return y

    return lambda: _fetched(step(x)), lambda: output(x)


# --- additive attention


def of_sentences(length: int) -> dict[str, Any]:
    """The largest batches of one length, plain and ours."""
    plain, ours = largest_batch(length, False), largest_batch(length, True)
    return {
        "plain": plain,
        "ours": ours,
        "limit": LIMIT,
        "ratio": ours["batch"] / max(1, plain["batch"]),
    }


def largest_batch(length: int, ours: bool) -> dict[str, Any]:
    """The largest batch of which steps were measured within the limit, to a twentieth."""
    # At a third and two thirds of the limit: below, what loops hold while they run hides the batch.
    example = WORD * length + (0 if ours else 16 * WIDTH * length**2)
    first = max(1, LIMIT // (3 * example))
    return largest_within(LIMIT, first, lambda batch: _sentences(length, batch, ours))


def largest_within(
    limit: int, first: int, measure: Callable[[int], int], tries: int = TRIES
) -> dict[str, Any]:
    """The largest batch of which ``measure`` says a peak within the limit, to a twentieth; begun at two batches, of which the first should take a third of it."""
    peaks = {n: measure(n) for n in (first, 2 * first)}
    for _ in range(tries):
        fits = max((n for n, peak in peaks.items() if peak <= limit), default=0)
        fails = min((n for n, peak in peaks.items() if peak > limit), default=0)
        if fails and fails - fits <= max(1, fits // 20):
            break
        # The slope from the smallest batch on: between two that are near, chance is larger than it.
        least = min(peaks)
        batch = 2 * fits
        if fits > least and peaks[fits] > peaks[least]:
            each = (peaks[fits] - peaks[least]) / (fits - least)
            batch = int(fits + (limit - peaks[fits]) / each)
        if fails:
            batch = min(batch, (fits + fails) // 2)
        if batch <= fits + fits // 20:
            break
        peaks[batch] = measure(batch)
    fits = max((n for n, peak in peaks.items() if peak <= limit), default=0)
    return {"batch": fits, "peaks": {str(n): peak for n, peak in sorted(peaks.items())}}


def _sentences(length: int, batch: int, ours: bool) -> int:
    request = {"length": length, "batch": batch, "ours": ours}
    peak: int = in_fresh_process(
        "benchmarks.techniques.attention:sentences_peak", request, ENVIRONMENT
    )
    name = "ours" if ours else "plain"
    Console(stderr=True).print(f"{length} words, {batch} sentences, {name}: {peak / 1e6:,.0f} MB")
    return peak


def sentences_peak(length: int, batch: int, ours: bool) -> int:
    """In a process of its own: the worst of five steps after two."""
    import numpy as np
    import tensorflow as tf

    model = translator(length, ours)
    words = np.random.default_rng(0).integers(0, VOCABULARY, [3, batch, length])
    source, target, labels = (tf.constant(w, tf.int32) for w in words)
    weights = [v.value for v in model.trainable_variables]

    @tf.function
    def step(source: Any, target: Any, labels: Any) -> Any:
        logits = model([source, target], training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return _consumed(gradients_of(tf.reduce_mean(losses), weights, ours))

    return measure_peak(lambda: _fetched(step(source, target, labels)), warmup=2, steps=5).peak


def gradients_of(loss: Any, xs: Any, ours: bool) -> Any:
    """Gradients of an encoder-decoder; ours replay the LSTMs, too, and recompute."""
    import tensorflow as tf

    import memsaving_gradients as ms

    return ms.gradients(loss, xs) if ours else tf.gradients(loss, xs)


def translator(length: int, ours: bool) -> Any:
    """An encoder-decoder with additive attention over sentences of a length."""
    import keras

    import memsaving_gradients as ms

    layers = keras.layers
    attention = (ms.keras if ours else layers).AdditiveAttention()
    keras.utils.set_random_seed(1)
    source, target = (keras.Input([length], dtype="int32") for _ in range(2))
    states = [
        layers.LSTM(WIDTH, return_sequences=True)(layers.Embedding(VOCABULARY, WIDTH)(words))
        for words in (source, target)
    ]
    key, query = (layers.Dense(WIDTH, use_bias=False)(s) for s in states)
    context = attention([query, states[0], key])
    joined = layers.Concatenate()([states[1], context])
    return keras.Model([source, target], layers.Dense(VOCABULARY)(joined))


# --- both


def _consumed(gradients: Any) -> list[Any]:
    """The sum of squares of each gradient."""
    import tensorflow as tf

    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return [tf.reduce_sum(tf.square(g)) for g in values]


def _fetched(sums: list[Any]) -> list[float]:
    return [float(s) for s in sums]


def judge(results: dict[str, Any]) -> list[Figure]:
    """The bars of what was measured."""
    figures = []
    for length, (memory, time) in LENGTHS.items():
        result = results.get(f"heads-{length}")
        if not result:
            continue
        for kind in KINDS[1:]:
            share, clock = result[kind]["peak"] / result["plain"]["peak"], result["time"][kind]
            what = f"heads, {length}, {kind}"
            figures += [
                Figure(f"{what}: memory", share, memory, percent=True),
                Figure(f"{what}: time (control {clock['control']:.3f})", clock["ratio"], time),
                Figure(f"{what}: difference", clock["difference"], DIFFERENCE),
            ]
    for length, times in SENTENCES.items():
        result = results.get(f"additive-{length}")
        if result:
            share = 1 / result["ratio"]
            what = f"additive, {length}: plain batch, as a share of ours"
            figures.append(Figure(what, share, 1 / times, percent=True))
    return figures


def _print(results: dict[str, Any]) -> None:
    heads = Table(title=f"multi-head attention, {HEADS} heads of {KEY}", header_style="bold")
    for heading in ("positions", "", "plain MB", "MB", "times less", "time", "control", "pairs"):
        heads.add_column(heading, justify="right")
    batches = Table(
        title=f"encoder-decoder, largest batch in {LIMIT / 1e9:g} GB", header_style="bold"
    )
    for heading in ("words", "plain", "ours", "ratio", "bar"):
        batches.add_column(heading, justify="right")
    for length in LENGTHS:
        result = results.get(f"heads-{length}")
        if not result:
            continue
        for kind in KINDS[1:]:
            plain, ours, time = result["plain"], result[kind], result["time"][kind]
            heads.add_row(
                str(length),
                kind,
                f"{plain['peak'] / 1e6:,.1f}",
                f"{ours['peak'] / 1e6:,.1f}",
                f"{plain['peak'] / ours['peak']:.1f}",
                f"{time['ratio']:.3f}",
                f"{time['control']:.3f}",
                str(time["pairs"]),
            )
    for length, times in SENTENCES.items():
        if result := results.get(f"additive-{length}"):
            row = (length, result["plain"]["batch"], result["ours"]["batch"])
            batches.add_row(*map(str, row), f"{result['ratio']:.1f}", f"{times:g}")
    for table in (heads, batches):
        if table.row_count:
            Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
