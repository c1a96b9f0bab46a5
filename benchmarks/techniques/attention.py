"""Attention in blocks, against Keras' attention.

*Multi-head attention* (8 heads of 64, model width 512, one example, self-attention) over 2048 and
8192 positions, by our layer, and by Keras' layer with ``attention="blocks"``. The figures are the
transient peak of a step (forward, gradients for weights and input; worst of five after two in a
fresh process), the ratio of times, and the largest difference of outputs.

*Additive attention* in an encoder-decoder as in Meng et al. 2017 ("Training deeper models by GPU
memory optimization on TensorFlow"): the largest batch within a limit on the transient peak. Two
LSTMs, which encode and decode, read embeddings, and a dense layer reads the states of each. All
decoder states attend to all encoder states, and the loss is over `VOCABULARY` words. All widths
are `WIDTH`. Ours is `AdditiveAttention` in blocks and ``memsaving_gradients.gradients``.
The vocabulary is small: both have the same logits, and with 30,000 words these would be most of
our bytes. A peak is affine in the batch, except for effects of the order of execution. It is
measured at two batches, then at batches extrapolated from the measured ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import memsaving_gradients as ms
from benchmarks.experiment import Columns, Experiment, Figure, Job, Results
from benchmarks.measuring import fresh
from graph_tools.memory.measure import measure_peak, time_ratio

#: Positions, with bars for the shares of the plain peak and of the plain time.
LENGTHS = {2048: (1 / 8, 1.3), 8192: (1 / 30, 1.3)}
HEADS, KEY, MODEL, BATCH = 8, 64, 512, 1
#: Kinds of attention: Keras' layer, our layer, and Keras' layer with ``attention="blocks"``.
KINDS = ("plain", "ours", "found")
#: Bar for the largest difference of outputs.
DIFFERENCE = 1e-5
#: A step of more than `LONG` seconds is timed in `FEW` pairs, others in `PAIRS`.
LONG, FEW, PAIRS = 5.0, 5, 15

#: Words of a sentence, with the bar for our largest batch over the plain one. Published: 3.1, 6.1,
#: 11.5, 30.
SENTENCES = {50: 3.2, 100: 6.0, 200: 12.0, 400: 30.0}
WIDTH, VOCABULARY = 256, 1000
#: The limit on the transient peak, bytes.
LIMIT = 1_000_000_000
#: The most batches to try after the first two.
TRIES = 6
#: Approximate bytes of a word without attention, from which the first batches are computed.
WORD = 23_000
ROWS = [f"heads-{length}" for length in LENGTHS] + [f"additive-{length}" for length in SENTENCES]


def run(job: Job) -> dict[str, Any]:
    """Measure a length of one of the two kinds."""
    kind, _, length = job.row.partition("-")
    if kind == "heads":
        return of_heads(int(length))
    return of_sentences(int(length), job.say)


# --- multi-head attention


def of_heads(length: int) -> dict[str, Any]:
    """Measure peaks, times and difference of one length."""
    of = "techniques.attention:heads_"
    peaks = {kind: fresh(f"{of}peak", length=length, kind=kind) for kind in KINDS}
    times = {kind: fresh(f"{of}time", length=length, kind=kind) for kind in KINDS[1:]}
    return {**peaks, "time": times}


def heads_peak(length: int, kind: str) -> dict[str, Any]:
    """Return the worst peak of five steps (in a process of its own)."""
    step, _ = _heads(length, kind)
    return dataclasses.asdict(measure_peak(step, warmup=2, steps=5))


def heads_time(length: int, kind: str) -> dict[str, Any]:
    """Return the ratio of times, and the largest difference of outputs (in its own process)."""
    (plain, expected), (ours, found) = _heads(length, "plain"), _heads(length, kind)
    difference = float(tf.reduce_max(tf.abs(expected() - found())))
    once = time_ratio(ours, plain, pairs=1)
    pairs = PAIRS if max(once.seconds_a, once.seconds_b) < LONG else FEW
    ratio = time_ratio(ours, plain, pairs=pairs)
    return {**dataclasses.asdict(ratio), "pairs": pairs, "difference": difference}


def _heads(length: int, kind: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two functions, a step and the output, with the same weights in each call."""
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


def of_sentences(length: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Find the largest batches of one length, plain and ours."""
    plain, ours = (largest_batch(length, side, say) for side in (False, True))
    return {
        "plain": plain,
        "ours": ours,
        "limit": LIMIT,
        "ratio": ours["batch"] / max(1, plain["batch"]),
    }


def largest_batch(length: int, ours: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Find the largest batch whose measured steps are within the limit, to a twentieth."""
    # At a third and two thirds of the limit: below, bytes that loops hold hide the batch's.
    example = WORD * length + (0 if ours else 16 * WIDTH * length**2)
    first = max(1, LIMIT // (3 * example))
    name = "ours" if ours else "plain"

    def measure(batch: int) -> int:
        what = {"length": length, "batch": batch, "ours": ours}
        peak: int = fresh("techniques.attention:sentences_peak", **what)
        say(f"{length} words, {batch} sentences, {name}: {peak / 1e6:,.0f} MB")
        return peak

    return largest_within(LIMIT, first, measure)


def largest_within(
    limit: int, first: int, measure: Callable[[int], int], tries: int = TRIES
) -> dict[str, Any]:
    """Return the largest batch whose peak by ``measure`` is within the limit, to a twentieth.

    The search begins at ``first`` and twice ``first``. ``first`` should take a third of the limit.
    """
    peaks = {n: measure(n) for n in (first, 2 * first)}
    for _ in range(tries):
        fits = max((n for n, peak in peaks.items() if peak <= limit), default=0)
        fails = min((n for n, peak in peaks.items() if peak > limit), default=0)
        if fails and fails - fits <= max(1, fits // 20):
            break
        # The slope is from the smallest batch on: between close batches, noise would exceed it.
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


def sentences_peak(length: int, batch: int, ours: bool) -> int:
    """Return the worst peak of five steps after two (in a process of its own)."""
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
    """Return gradients of an encoder-decoder; ours also replay the LSTMs, and recompute."""
    return ms.gradients(loss, xs) if ours else tf.gradients(loss, xs)


def translator(length: int, ours: bool) -> Any:
    """Return an encoder-decoder with additive attention over sentences of a length."""
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
    """Return the sum of squares of each gradient."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return [tf.reduce_sum(tf.square(g)) for g in values]


def _fetched(sums: list[Any]) -> list[float]:
    return [float(s) for s in sums]


def bars(results: Results) -> list[Figure]:
    """Return the bars of the rows that have results."""
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


def lines_of_heads(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each length and kind."""
    for length in LENGTHS:
        if not (result := results.get(f"heads-{length}")):
            continue
        plain = result["plain"]["peak"]
        for kind in KINDS[1:]:
            ours, time = result[kind]["peak"], result["time"][kind]
            sizes = (f"{plain / 1e6:,.1f}", f"{ours / 1e6:,.1f}", f"{plain / ours:.1f}")
            ratios = (f"{time['ratio']:.3f}", f"{time['control']:.3f}", str(time["pairs"]))
            yield (str(length), kind, *sizes, *ratios)


def lines_of_sentences(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a line for each length."""
    for length, times in SENTENCES.items():
        if result := results.get(f"additive-{length}"):
            batches = (str(result[side]["batch"]) for side in ("plain", "ours"))
            yield str(length), *batches, f"{result['ratio']:.1f}", f"{times:g}"


COLUMNS = (
    Columns(
        f"multi-head attention, {HEADS} heads of {KEY}",
        "positions |  | plain MB | MB | times less | time | control | pairs",
        lines_of_heads,
    ),
    Columns(
        f"encoder-decoder, largest batch in {LIMIT / 1e9:g} GB",
        "words | plain | ours | ratio | bar",
        lines_of_sentences,
    ),
)
EXPERIMENT = Experiment(
    "attention", rows=lambda settings: ROWS, run=run, columns=COLUMNS, bars=bars
)
