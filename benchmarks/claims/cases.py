"""The table of claims: each case with the bars for its figures.

The bars are the figures of a published heuristic (Bulatov and Salimans 2018, "memory" mode), better
figures where it saves nothing, and figures of checkpoints chosen by hand.  MB is 10^6 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: The only figure with a lower bar; the bars of all others are upper ones.
CLONES = "clones"


@dataclass(frozen=True)
class Case:
    """One network, one way to choose checkpoints, and the bars it has to clear.

    Attributes
    ----------
    name
        Name for ``--only`` and the results.
    model, options
        Arguments of `benchmarks.networks.build`.
    checkpoints
        Argument of ``memsaving_gradients.gradients``.
    how
        Argument of `benchmarks.steps.make_step`.
    bars
        Bars by figure. ``"MB"`` and ``"units"``: peak in 10^6 bytes, in tensors of the chain.
        ``"peak"``, ``"time"`` and ``"XLA's largest"``: ours over plain. ``"planning"``: our added
        time over the time of TensorFlow's own gradients. ``"clones"``: instructions of one kind
        that XLA runs in addition to the plain step's.
    instruction
        The HLO opcode of the counted clones, for XLA.
    pairs
        Pairs of steps for the ratio of times; 0 for none.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = "memory"
    how: str = "function"
    bars: dict[str, float] = field(default_factory=dict)
    instruction: str | None = None
    pairs: int = 0


def _chains() -> list[Case]:
    limits = {
        ("tanh_chain", 100): 16,
        ("residual_chain", 100): 16,
        ("tanh_chain", 6): 4,
        ("residual_chain", 6): 5,
    }
    return [
        Case(f"{model}-{n}", model, {"length": n}, how="session", bars={"units": limit})
        for (model, n), limit in limits.items()
    ]


def _transformers() -> list[Case]:
    variants: dict[str, tuple[dict[str, Any], float]] = {
        "plain": ({}, 3.0),
        "mask": ({"mask": True}, 2.8),
        "tied": ({"tied": True}, 3.1),
        "dropout": ({"dropout": 0.1}, 3.9),
        "decay": ({"decay": 1e-4}, 5.0),
        "no-scope": ({"loss_scope": None}, 3.1),
    }
    return [
        Case(f"transformer-{name}", "transformer", options, "auto", bars={"MB": limit})
        for name, (options, limit) in variants.items()
    ]


CASES: tuple[Case, ...] = (
    *_chains(),
    *_transformers(),
    Case("lstm", "lstm", bars={"peak": 0.45}, pairs=15),
    Case("unet", "unet", bars={"peak": 0.45}, pairs=7),
    Case(
        "densenet121",
        "application",
        {"name": "DenseNet121", "batch": 4},
        bars={"peak": 0.45},
        pairs=7,
    ),
    Case(
        "resnet50",
        "application",
        {"name": "ResNet50", "batch": 8},
        "speed",
        bars={"peak": 0.57, "time": 1.08},
        pairs=15,
    ),
    Case(
        "mobilenetv2",
        "application",
        {"name": "MobileNetV2", "batch": 8},
        "speed",
        bars={"peak": 0.46, "time": 1.10},
        pairs=15,
    ),
    Case("xla-mlp", "mlp", how="xla", bars={"peak": 0.30, "clones": 1}, instruction="tanh"),
    Case(
        "xla-resnet83",
        "cifar_resnet",
        {"blocks": 9, "batch": 16},
        how="xla",
        bars={"XLA's largest": 0.48, "clones": 1},
        instruction="convolution",
    ),
    Case(
        "resnet1001",
        "cifar_resnet",
        {"blocks": 111, "batch": 8},
        bars={"peak": 1 / 13, "time": 1.22, "planning": 0.5},
        pairs=15,
    ),
)
