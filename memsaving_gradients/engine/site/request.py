"""A user's request for gradients, comparable between graphs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from memsaving_gradients.capture.training_step import CapturedStep
from memsaving_gradients.engine.options import Options
from memsaving_gradients.engine.site.site import Site

__all__ = ["Request", "request_of"]


@dataclass(frozen=True)
class Request:
    """The options of a gradient computation, without the tensors that they name.

    ``marks``: the mode, and the positions of named tensors in the step.
    """

    options: Options
    marks: Hashable


def request_of(site: Site, step: CapturedStep) -> Request:
    """Return the request at a site, whose step is ``step``."""
    position = step.source.position
    kept = tuple(position.get(tensor.op.name, -1) for tensor in site.call.kept)
    named: list[tuple[Any, str]] = list(site.encode.items())
    encode = tuple((position.get(key.deref().op.name, -1), how) for key, how in named)
    options = replace(
        site.options, checkpoints="auto", encode=None if encode else site.options.encode
    )
    return Request(options, (site.call.mode, kept, encode))
