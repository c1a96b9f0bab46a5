"""Tools of all figures: colors, byte units on axes, shortened names, drawing and writing without a
display.

Figures use matplotlib's classes, never pyplot: no window opens, and no state reaches the program's
own figures. Names of tensors are drawn as plain text, never as formulas.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsaving_gradients.budget import format_bytes
from memsaving_gradients.errors import ArgumentError
from memsaving_gradients.reports.extras import needed
from memsaving_gradients.reports.plan_text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "DPI",
    "FORMATS",
    "INK",
    "Bar",
    "blank",
    "bytes_axis",
    "check_folder",
    "check_path",
    "halves",
    "horizontal_bars",
    "legend_above",
    "percent_of",
    "sized",
    "styled",
    "svg",
    "unit_for",
    "write",
]

#: Formats of figures, by the ending of the file's name.
FORMATS = (".png", ".svg", ".pdf")
#: Middle tones, readable on white and on black, and distinguishable without color vision (Okabe &
#: Ito 2008, some darker).
COLORS = {
    "plain": "#d55e00",
    "planned": "#0072b2",
    "budget": "#b3527f",
    "keep": "#0072b2",
    "recompute": "#e69f00",
    "offload": "#009e73",
    "encode": "#b3527f",
    "forward": "#0072b2",
    "recomputed": "#e69f00",
    "backward": "#009e73",
    "scratch": "#8c8c8c",
    "bound": "#8c8c8c",
    "activations": "#0072b2",
    "gradients": "#009e73",
    "temporaries": "#e69f00",
    "parameters": "#b3527f",
    "slots": "#8c8c8c",
}
#: A placeholder for the text color in figures on a page; `svg` replaces it by the page's own.
INK = "#010203"
#: Layout: pixels per inch in PNG files.
DPI = 150
#: Layout: letters of a bar's name.
NAME_WIDTH = 34

#: Layout: matplotlib's settings for all figures.
_STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "grid.color": "#808080",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "memsaving_gradients",
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
_INKED = (
    "text.color",
    "axes.edgecolor",
    "axes.labelcolor",
    "axes.titlecolor",
    "xtick.color",
    "ytick.color",
)

#: A bar: its name, the bytes of each of its pieces by kind, and the text to the right of it.
Bar = tuple[str, dict[str, int], str]


@contextmanager
def styled(purpose: str, ink: str = "#1a1a1a") -> Iterator[None]:
    """Use this module's style instead of the user's inside; raise an error that says what to
    install if matplotlib is missing."""
    matplotlib = needed("matplotlib", purpose)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box, without a warning.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, **dict.fromkeys(_INKED, ink)})
        yield


def blank(width: float, height: float) -> Figure:
    """Return an empty figure, sized in inches, that needs no display; call within `styled`."""
    figure: Figure = needed("matplotlib.figure", "a figure").Figure(
        figsize=(width, height), layout="constrained", dpi=100
    )
    needed("matplotlib.backends.backend_agg", "a figure").FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    return figure


def halves(figure: Figure, above: float, below: float) -> tuple[Any, Any]:
    """Return the upper and the lower part of a figure, of heights ``above`` and ``below``."""
    parts: Any = figure.subfigures(2, 1, height_ratios=(above, below))
    for part in parts:
        # A figure on a page has the page's background.
        part.set_facecolor("none")
    return tuple(parts)


def percent_of(whole: int) -> tuple[Any, Any]:
    """Return functions from bytes to percent of ``whole`` and back, for a second axis."""

    def percent(size: Any) -> Any:
        return size * (100 / whole)

    def size(percent: Any) -> Any:
        return percent * (whole / 100)

    return percent, size


def check_path(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """Return the path of a file that a figure can be written to.

    Raises
    ------
    ArgumentError
        If its name has no ending of `FORMATS`, its folder does not exist, or it is a folder itself.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ArgumentError(
            argument, os.fspath(path), f"give a file name that ends with {', '.join(FORMATS)}"
        )
    return check_folder(target, argument)


def check_folder(target: Path, argument: str) -> Path:
    """Return ``target`` if its folder exists and it is no folder itself; else raise."""
    if not target.parent.is_dir():
        raise ArgumentError(
            argument, os.fspath(target), f"there is no folder {os.fspath(target.parent)!r}"
        )
    if target.is_dir():
        raise ArgumentError(argument, os.fspath(target), "is a folder; give the name of a file")
    return target


def write(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending; call within `styled`."""
    # No date: the same figure gives the same file.
    metadata = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=DPI, metadata=metadata[path.suffix.lower()])


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element in the page's text color; call within `styled` with
    `INK`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    _, _, element = text.getvalue().partition("<svg ")
    return "<svg " + element.replace(INK, "currentColor")


def unit_for(largest: float) -> tuple[int, str]:
    """Return the most readable unit for an axis up to ``largest`` bytes: its size and its name.

    Examples
    --------
    >>> unit_for(3 * 2**30), unit_for(300 * 2**20), unit_for(20)
    ((1073741824, 'GiB'), (1048576, 'MiB'), (1, 'bytes'))
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1.5 * 1024**power:
            return 1024**power, unit
    return 1, "bytes"


def bytes_axis(axis: Any, largest: float) -> None:
    """Set an axis of bytes to show round numbers in the unit for ``largest``."""
    size, _ = unit_for(largest)
    ticker = needed("matplotlib.ticker", "a figure")
    # Round in the unit, not in bytes.
    step = _round_step(largest / size / 6)
    axis.set_major_locator(ticker.MultipleLocator(step * size))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / size:,.4g}"))


def _round_step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten: the first that is not below ``about``.

    Examples
    --------
    >>> _round_step(0.3), _round_step(7), _round_step(120)
    (0.5, 10.0, 200.0)
    """
    power = 10.0 ** len(str(int(about))) / 10 if about >= 1 else 0.001
    while True:
        for digit in (1, 2, 5):
            if digit * power >= about:
                return round(digit * power, 3)
        power *= 10


def legend_above(axes: Axes) -> None:
    """Put the legend between the title and the axes, where it hides nothing."""
    count = len(axes.get_legend_handles_labels()[1])
    if not count:
        return
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=count,
        handlelength=1.2,
        columnspacing=1.2,
        borderpad=0,
        borderaxespad=0.4,
    )
    axes.set_title(axes.get_title("left"), pad=26)


def horizontal_bars(axes: Axes, bars: Sequence[Bar], kinds: Sequence[str], rest: str = "") -> None:
    """Draw stacked bars from top to bottom, with their names on the left and texts on the right.

    ``rest``: a text about items without a bar, for the label of the axis.
    """
    largest = max((sum(pieces.values()) for _, pieces, _ in bars), default=0)
    for kind in kinds:
        lengths = [pieces.get(kind, 0) for _, pieces, _ in bars]
        if not any(lengths):
            continue
        left = [
            sum(size for other, size in pieces.items() if kinds.index(other) < kinds.index(kind))
            for _, pieces, _ in bars
        ]
        axes.barh(range(len(bars)), lengths, 0.72, left, color=COLORS[kind], label=kind)
    for row, (_, pieces, said) in enumerate(bars):
        behind = sum(pieces.values()) + largest * 0.012
        axes.text(behind, row, said, va="center", ha="left", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [shorten(name, NAME_WIDTH) for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params("y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")
    # Room for the text to the right of the longest bar.
    axes.set_xlim(0, max(largest, 1) * 1.22)
    bytes_axis(axes.xaxis, largest * 1.1)
    _, name = unit_for(largest * 1.1)
    axes.set_xlabel(f"{name}, {rest}" if rest else name)


def sized(size: int, whole: int) -> str:
    """Return bytes and their share of ``whole`` as text.

    Examples
    --------
    >>> sized(2**20, 2**22)
    '1.00 MiB · 25 %'
    """
    return f"{format_bytes(size)} · {100 * size / max(whole, 1):.0f} %"
