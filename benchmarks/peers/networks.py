"""Networks to train side by side, and the way in which each peer saves memory in them.

A network has one or two ways of ``tf.recompute_grad``: around each block, and around several
blocks. The blocks end at the layers where a user would cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.networks import SMALL, Model, build
from benchmarks.peers import variants


@dataclass(frozen=True)
class Peer:
    """A way to save memory that is not ours.

    Attributes
    ----------
    title
        Title for the table.
    function
        Function of `benchmarks.peers.variants`.
    settings
        Arguments of the function, the same for all networks.
    others
        Other functions that a user has to write for it, for the count of lines.
    """

    title: str
    function: variants.Variant
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Callable[..., Any], ...] = ()


PEERS: dict[str, Peer] = {
    "remat_full": Peer('RematScope("full")', variants.remat, {"mode": "full"}),
    "remat_activations": Peer('RematScope("activations")', variants.remat, {"mode": "activations"}),
    "remat_larger_than": Peer('RematScope("larger_than")', variants.remat, {"mode": "larger_than"}),
    "remat_list": Peer('RematScope("list_of_layers")', variants.remat_list),
    "grappler_recomputation": Peer(
        "grappler, RECOMPUTATION_HEURISTICS",
        variants.grappler,
        {"mode": "RECOMPUTATION_HEURISTICS"},
        (variants.grappler_config,),
    ),
    "grappler_heuristics": Peer(
        "grappler, HEURISTICS",
        variants.grappler,
        {"mode": "HEURISTICS"},
        (variants.grappler_config,),
    ),
}


@dataclass(frozen=True)
class Network:
    """A network of the zoo.

    Attributes
    ----------
    title
        Title for the page.
    model, options
        Arguments of `benchmarks.networks.build`.
    recompute
        The function of `benchmarks.peers.variants` that wraps its blocks in ``tf.recompute_grad``.
    ways
        Arguments of that function, by name of a block.
    training
        Argument ``training`` of layers; ``None`` if no layer depends on it.
    """

    title: str
    model: str
    options: dict[str, Any]
    recompute: variants.Variant
    ways: dict[str, dict[str, Any]]
    training: bool | None = True

    def make(self) -> Model:
        """Build the network."""
        return build(self.model, **self.options)


NETWORKS: dict[str, Network] = {
    "dense_chain": Network(
        "64 dense layers with tanh, width 512, batch 1024",
        "dense_chain",
        {},
        variants.recompute_chain,
        {"8 layers": {"ends": "dense(" + "|".join(map(str, range(7, 64, 8))) + ")"}},
        None,
    ),
    "encoder": Network(
        "Transformer encoder, 12 layers, width 256, length 128, batch 8, dropout 0.1, mask",
        "encoder",
        {},
        variants.recompute_encoder,
        {"layer": {"ends": r"layer\d+_out"}, "3 layers": {"ends": r"layer(2|5|8|11)_out"}},
    ),
    "lstm": Network(
        "LSTM, 64 unrolled steps, 256 units, batch 64",
        "lstm",
        {},
        variants.recompute_lstm,
        {"8 steps": {"steps": 8}},
        None,
    ),
    "unet": Network(
        "U-Net, 16 to 256 filters, 128 x 128, batch 8",
        "unet",
        {"filters": 16},
        variants.recompute_unet,
        {"level": {}},
    ),
    "resnet50": Network(
        "ResNet-50, 128 x 128, batch 8",
        "application",
        {"name": "ResNet50", "batch": 8, "image": 128},
        variants.recompute_chain,
        {
            "block": {"ends": r"pool1_pool|conv\d_block\d_out"},
            "stage": {"ends": r"conv2_block3_out|conv3_block4_out|conv4_block6_out"},
        },
    ),
    "densenet121": Network(
        "DenseNet-121, 128 x 128, batch 8",
        "application",
        {"name": "DenseNet121", "batch": 8, "image": 128},
        variants.recompute_chain,
        {
            "dense layer": {"ends": r"pool1|conv\d_block\d+_concat|pool\d_pool"},
            "dense block": {"ends": r"pool\d_pool"},
        },
    ),
    # For tests: seconds instead of minutes.
    "tiny": Network(
        "12 dense layers with tanh, width 16, batch 32",
        *SMALL["dense_chain"],
        variants.recompute_chain,
        {"4 layers": {"ends": r"dense(3|7)"}},
        None,
    ),
}


def peers_of(network: Network) -> dict[str, Peer]:
    """Return all peers for a network, by their names."""
    blocks = {
        f"recompute_grad, {way}": Peer(f"recompute_grad, each {way}", network.recompute, settings)
        for way, settings in network.ways.items()
    }
    given = {"training": network.training}
    return blocks | {
        name: replace(peer, settings={**peer.settings, **given}) if "remat" in name else peer
        for name, peer in PEERS.items()
    }


def settings_of(name: str, variant: str) -> tuple[variants.Variant, dict[str, Any]]:
    """Return function and arguments of a variant of a network: a peer, or ``"plain"``."""
    if variant == "plain":
        return variants.plain, {}
    peer = peers_of(NETWORKS[name])[variant]
    return peer.function, dict(peer.settings)
