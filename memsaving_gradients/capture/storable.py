"""Which residuals may be stored instead of kept, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import tensorflow as tf

from graph_tools.costs import estimates
from graph_tools.memory.bfc_allocator import GRAIN
from memsaving_gradients.capture.encodings import ENCODINGS, Encoding
from memsaving_gradients.capture.offload import Offload
from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.planners.chains.frontiers import small_storages
from memsaving_gradients.schedules.storage import OFFLOAD, Stored

__all__ = ["with_storable"]


#: Types that cannot be copied to another device: handles, lists of tensors, strings.
_NO_NUMBERS = (tf.resource, tf.variant, tf.string)


def with_storable(
    step: CapturedStep,
    *,
    lossy: str | None = None,
    encode: Mapping[object, str] = MappingProxyType({}),
    offload: Offload | None = None,
) -> CapturedStep:
    """Return ``step`` with the ways in which its residuals may be stored.

    Parameters
    ----------
    step
        The captured step.
    lossy
        The encoding of all residuals that it fits, if any.
    encode
        Encodings of single tensors, by reference; they override ``lossy``.
    offload
        The device that residuals may be offloaded to, if any.
    """
    if lossy is None and not encode and offload is None:
        return step
    found: dict[int, tuple[Stored, ...]] = {}
    offload = None if offload is None else offload.measured()
    for op, value in _candidates(step):
        tensor = step.source.tensor(value)
        ways = []
        name = encode.get(tensor.ref(), lossy)
        if (
            name is not None
            and ENCODINGS[name].fits(tensor.dtype)
            and not _shares_workspace(tensor)
        ):
            ways.append(_encoded(step, value, tensor, ENCODINGS[name]))
        if offload is not None and tensor.dtype not in _NO_NUMBERS:
            ways.append(_offloaded(step, value, offload))
        if ways:
            found[op] = tuple(ways)
    return replace(step, graph=replace(step.graph, storable=found)) if found else step


def _candidates(step: CapturedStep) -> Iterator[tuple[int, int]]:
    """Yield the residuals worth storing, each after its op, which has no other output."""
    graph = step.graph
    small = small_storages(graph)
    for value in sorted(graph.residuals):
        op = int(graph.producer[value])
        if not step.source.here[op] or op in step.source.conditional:
            continue
        if graph.size[value] >= GRAIN and value not in small and len(graph.writes[op]) == 1:
            yield op, value


def _shares_workspace(tensor: tf.Tensor) -> bool:
    """Return whether a gradient kernel reuses the workspace of the kernel that made ``tensor``. It
    cannot if it reads another tensor.

    On a CPU, the gradient of pooling does so, and is nine times faster (``MaxpoolGradRewrite`` in
    ``mkl_layout_pass.cc``, TensorFlow 2.21).
    """
    return any(op.type == "MaxPoolGrad" and op.inputs[1] is tensor for op in tensor.consumers())


def _encoded(step: CapturedStep, value: int, tensor: tf.Tensor, encoding: Encoding) -> Stored:
    size = int(step.graph.size[value])
    kept = encoding.bytes(size, tensor.dtype.size)
    seconds = estimates.START_SECONDS + encoding.passes * (size + kept) / estimates.BYTES_PER_SECOND
    return Stored(value, encoding.name, kept, seconds, seconds)


def _offloaded(step: CapturedStep, value: int, offload: Offload) -> Stored:
    seconds = offload.seconds(int(step.graph.size[value]))
    return Stored(value, OFFLOAD, 0, estimates.START_SECONDS, estimates.START_SECONDS, seconds)
