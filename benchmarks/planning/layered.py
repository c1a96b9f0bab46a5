"""Training steps with a node for each layer, from shapes alone, without TensorFlow.

Checkmate (Jain et al. 2020, arXiv 1910.02653) and Moccasin (Bartan et al. 2023, arXiv 2304.14463)
publish steps of this form. The loss follows the layers of the network, and then, last layer first,
a backward node for each layer: the gradient of its output. The backward node reads the output, the
outputs of the layers that read it, and their gradients. The cost of a layer is its multiplications
(one for each element where there are none); a backward node costs twice as much. Sizes are the
bytes of outputs, four for each number, without parameters.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memsaving_gradients.schedules.training_graph import TrainingGraph


@dataclass(frozen=True)
class Instance:
    """A graph of nodes with one output each, listed in the order in which they run.

    Attributes
    ----------
    name
        Name for tables.
    reads
        For each node, the nodes that it reads.
    size
        For each node, the bytes of its output.
    seconds
        For each node, its cost, in any unit.
    first_backward
        The loss, the first of the backward nodes, which run once. 0: there are no backward nodes,
        and a plan may recompute every node.
    """

    name: str
    reads: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    seconds: tuple[float, ...]
    first_backward: int = 0

    @property
    def edges(self) -> int:
        """The number of inputs of all nodes together."""
        return sum(map(len, self.reads))

    @cached_property
    def peak(self) -> int:
        """The most bytes alive in this order: outputs that are read later, and the node's own."""
        last = list(range(len(self.reads)))
        for node, read in enumerate(self.reads):
            for maker in read:
                last[maker] = node
        alive = most = 0
        for node, read in enumerate(self.reads):
            alive += self.size[node]
            most = max(most, alive)
            alive -= sum(self.size[v] for v in {*read, node} if last[v] == node)
        return most

    @property
    def least(self) -> int:
        """A lower bound on the bytes of any plan: the most that one node reads and writes."""
        return max(sum(self.size[v] for v in {node, *read}) for node, read in enumerate(self.reads))

    def graph(self) -> TrainingGraph:
        """Return the training graph: nodes are ops, outputs are values.

        Without backward nodes every op is a forward op that joins: planners then decide on each of
        its inputs, even on one with a single reader.
        """
        n = len(self.reads)
        no = np.zeros(n, np.bool_)
        forward = self.first_backward or n
        return TrainingGraph(
            first_backward=forward,
            reads=self.reads,
            writes=[(k,) for k in range(n)],
            producer=np.arange(n),
            storage=np.arange(n),
            size=np.array(self.size, np.int64),
            source=no,
            clonable=np.arange(n) < forward,
            joins=~no if forward == n else no,
            forwards=no,
            fuses=no,
            seconds=np.array(self.seconds, np.float64),
            expensive=no,
            ends=(min(forward, n - 1),),
        )


@dataclass
class _Layers:
    """A network under construction: layers of images, batch × height × width × channels."""

    batch: int
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    cost: list[int] = field(default_factory=list)
    image: tuple[int, int, int] = (224, 224, 3)

    def add(
        self, reads: Sequence[int], shape: tuple[int, int, int], cost: int | None = None
    ) -> int:
        """Add a layer and return its number; ``cost``: for one example."""
        self.shapes.append(shape)
        self.reads.append(tuple(v for v in reads if v >= 0))
        self.cost.append(int(np.prod(shape)) if cost is None else cost)
        return len(self.shapes) - 1

    def shape(self, layer: int) -> tuple[int, int, int]:
        """Return the shape of a layer, or of the image for -1."""
        return self.shapes[layer] if layer >= 0 else self.image

    def conv(
        self, x: int, channels: int, kernel: int = 3, stride: int = 1, pad: int | None = None
    ) -> int:
        """Add a convolution; ``pad``: pixels of padding to remove from both height and width."""
        h, w, c = self.shape(x)
        if pad is not None:
            h, w = h - pad, w - pad
        h, w = -(-h // stride), -(-w // stride)
        return self.add([x], (h, w, channels), h * w * channels * c * kernel**2)

    def depthwise(self, x: int, stride: int = 1) -> int:
        """Add a 3 × 3 convolution of each channel by itself."""
        h, w, c = self.shape(x)
        h, w = -(-h // stride), -(-w // stride)
        return self.add([x], (h, w, c), h * w * c * 9)

    def pool(self, x: int, size: int = 2) -> int:
        """Add a max pooling of ``size`` × ``size``."""
        h, w, c = self.shape(x)
        return self.add([x], (h // size, w // size, c), 0)

    def same(self, *x: int) -> int:
        """Add an elementwise layer."""
        return self.add(x, self.shape(x[0]))

    def copy(self, x: int) -> int:
        """Add a layer that costs nothing: a reshaping, or dropout in the published graphs."""
        return self.add([x], self.shape(x), 0)

    def instance(self, name: str) -> Instance:
        """Return the network with its loss and its backward nodes."""
        n = len(self.shapes)
        size = [4 * self.batch * int(np.prod(shape)) for shape in self.shapes]
        readers: list[list[int]] = [[] for _ in range(n)]
        for layer, read in enumerate(self.reads):
            for maker in read:
                readers[maker].append(layer)
        reads = [*self.reads, (n - 1,)]
        seconds = [float(self.batch * cost) for cost in (*self.cost, 0)]
        for layer in reversed(range(n)):
            behind = readers[layer]
            gradients = [2 * n - reader for reader in behind] or [n]
            reads.append((layer, *behind, *gradients))
            seconds.append(2.0 * self.batch * self.cost[layer])
        return Instance(
            name, tuple(reads), (*size, 4 * self.batch, *reversed(size)), tuple(seconds), n
        )


def _vgg_blocks(net: _Layers, convolutions: Sequence[int]) -> list[int]:
    """Add the convolutional blocks of VGG and return the pooled output of each."""
    x, pooled = -1, []
    for many, channels in zip(convolutions, (64, 128, 256, 512, 512), strict=False):
        for _ in range(many):
            x = net.conv(x, channels)
        x = net.pool(x)
        pooled.append(x)
    return pooled


def vgg(layers: int = 16, batch: int = 256, image: int = 224) -> Instance:
    """Return VGG of 16 or 19 layers (Simonyan and Zisserman 2015, arXiv 1409.1556)."""
    net = _Layers(batch, image=(image, image, 3))
    x = _vgg_blocks(net, (2, 2, 3, 3, 3) if layers == 16 else (2, 2, 4, 4, 4))[-1]
    wide = int(np.prod(net.shape(x)))
    x = net.add([x], (1, 1, wide), 0)
    for units in (4096, 4096, 1000):
        x = net.conv(x, units, 1)
    return net.instance(f"VGG{layers}")


def fcn8(batch: int = 32, height: int = 416, width: int = 608, classes: int = 19) -> Instance:
    """Return FCN8 on VGG16 (Long et al. 2015, arXiv 1411.4038), as Checkmate publishes it."""
    net = _Layers(batch, image=(height, width, 3))
    pooled = _vgg_blocks(net, (2, 2, 3, 3, 3))
    x = net.copy(net.conv(pooled[4], 4096, 7))
    x = net.copy(net.conv(x, 4096, 1))
    x = net.conv(x, classes, 1)
    for number, skip in enumerate((pooled[3], pooled[2])):
        x = _grown(net, x, 2, 2)
        h, w, c = net.shape(skip)
        x = net.add([x], (h + 2, w, c := classes), 0)
        if number:
            scored = net.conv(skip, classes, 1)
            x = net.add([x], (h, w, c), 0)
        else:
            x = net.add([x], (h, w, c), 0)
            scored = net.conv(skip, classes, 1)
        x = net.add([scored, x], (h, w, c), 2 * h * w * c)
    net.same(net.copy(_grown(net, x, 8, 8)))
    return net.instance("FCN8")


def _grown(net: _Layers, x: int, factor: int, more: int) -> int:
    """Add a transposed convolution, of the published cost: one multiplication an input channel."""
    h, w, c = net.shape(x)
    h, w = factor * h + more, factor * w + more
    return net.add([x], (h, w, c), h * w * c * c)


def unet_vgg(batch: int = 32, height: int = 416, width: int = 608, classes: int = 19) -> Instance:
    """Return a U-Net (Ronneberger et al. 2015, arXiv 1505.04597) with VGG16's blocks going down."""
    net = _Layers(batch, image=(height, width, 3))
    pooled = _vgg_blocks(net, (2, 2, 3, 3))
    x = net.same(net.conv(_padded(net, pooled[3]), 512, pad=2))
    for skip, channels in zip(reversed(pooled[:3]), (256, 128, 64), strict=True):
        h, w, c = net.shape(x)
        grown = net.add([x], (2 * h, 2 * w, c))
        joined = net.add([skip, grown], (2 * h, 2 * w, c + net.shape(skip)[2]))
        x = net.same(net.conv(_padded(net, joined), channels, pad=2))
    net.same(net.conv(x, classes))
    return net.instance("U-Net on VGG")


def _padded(net: _Layers, x: int) -> int:
    h, w, c = net.shape(x)
    return net.add([x], (h + 2, w + 2, c))


def resnet50(batch: int = 64, image: int = 224) -> Instance:
    """Return ResNet-50 (He et al. 2016, arXiv 1512.03385): each op of a block is a layer."""
    net = _Layers(batch, image=(image, image, 3))

    def active(x: int) -> int:
        return net.same(net.same(x))

    x = net.pool(active(net.conv(-1, 64, 7, 2)))
    for stage, units in enumerate((3, 4, 6, 3)):
        channels = 64 * 2**stage
        for unit in range(units):
            stride = 2 if stage and not unit else 1
            y = active(net.conv(x, channels, 1, stride))
            y = active(net.conv(y, channels, 3))
            y = net.same(net.conv(y, 4 * channels, 1))
            shortcut = x if unit else net.same(net.conv(x, 4 * channels, 1, stride))
            x = net.same(net.same(y, shortcut))
    _classified(net, x)
    return net.instance("ResNet-50")


def mobilenet(batch: int = 64, image: int = 224) -> Instance:
    """Return MobileNet (Howard et al. 2017, arXiv 1704.04861)."""
    net = _Layers(batch, image=(image, image, 3))
    x = net.same(net.same(net.conv(-1, 32, 3, 2)))
    sizes = (64, (128, 2), 128, (256, 2), 256, (512, 2), 512, 512, 512, 512, 512, (1024, 2), 1024)
    for size in sizes:
        channels, stride = size if isinstance(size, tuple) else (size, 1)
        x = net.same(net.same(net.depthwise(x, stride)))
        x = net.same(net.same(net.conv(x, channels, 1)))
    _classified(net, x)
    return net.instance("MobileNet")


def _classified(net: _Layers, x: int) -> None:
    _, _, c = net.shape(x)
    net.same(net.conv(net.add([x], (1, 1, c)), 1000, 1))


def random_layered(nodes: int, seed: int = 0) -> Instance:
    """Return a graph without blocks: layers of random width, edges between and across them.

    Moccasin is compared on such graphs of Gagrani et al. 2022 (arXiv 2207.05899, appendix A).
    The edge density is 0.2 between neighboring layers, and a seventh as many edges cross layers.
    Durations are uniform, bytes exponential. A plan may recompute every node. The order is a random
    topological order.
    """
    draw = random.Random(f"{nodes} {seed}")
    layers: list[list[int]] = [[0]]
    made = 1
    while made < nodes - 1:
        width = math.ceil(0.65 * math.sqrt(nodes) * draw.uniform(0.25, 1.75))
        layers.append(list(range(made, min(made + width, nodes - 1))))
        made += len(layers[-1])
    layers.append([nodes - 1])
    reads: list[set[int]] = [set() for _ in range(nodes)]
    for before, behind in itertools.pairwise(layers):
        for node in behind:
            reads[node] = {u for u in before if draw.random() < 0.2} or {draw.choice(before)}
        for node in before:
            if not any(node in reads[w] for w in behind):
                reads[draw.choice(behind)].add(node)
    for _ in range(sum(map(len, reads)) // 7):
        early, late = sorted(draw.sample(range(len(layers)), 2))
        reads[draw.choice(layers[late])].add(draw.choice(layers[early]))
    readers: list[list[int]] = [[] for _ in range(nodes)]
    missing = [len(read) for read in reads]
    for node, read in enumerate(reads):
        for maker in read:
            readers[maker].append(node)
    order, ready = [], [0]
    while ready:
        # One of the last few that became ready: neither layer by layer nor depth first.
        node = ready.pop(max(0, len(ready) - draw.randint(1, 6)))
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    place = {node: k for k, node in enumerate(order)}
    return Instance(
        f"random layered {nodes}",
        tuple(tuple(sorted(place[u] for u in reads[node])) for node in order),
        tuple(10 * math.ceil(draw.expovariate(1 / 200)) for _ in order),
        tuple(float(draw.randint(0, 1000)) for _ in order),
    )


#: The default instances.
NETWORKS: tuple[Callable[[], Instance], ...] = (
    vgg,
    lambda: vgg(19),
    fcn8,
    unet_vgg,
    mobilenet,
    resnet50,
)
