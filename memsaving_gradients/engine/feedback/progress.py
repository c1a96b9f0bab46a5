"""Reports on the progress of planning: a bar in a terminal after a second, or calls of the user's
function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from memsaving_gradients.planners.proposal import Interrupted

__all__ = ["showing"]

#: Layout: planning that takes less is not worth a bar.
PATIENCE_SECONDS = 1.0

Hook = Callable[[float, str], None]


@contextmanager
def showing(progress: Any) -> Iterator[Hook | None]:
    """Yield the hook for `Limits.progress` that ``progress`` asks for, and report the end to it
    unless there was an error.

    Parameters
    ----------
    progress
        ``None``: a bar on standard error, if that is a terminal. ``False``: nothing. A function:
        that one.

    Examples
    --------
    >>> with showing(lambda share, what: print(f"{share:.0%} {what}")) as hook:
    ...     hook(0.5, "cutting")
    50% cutting
    100% done
    """
    if callable(progress):
        yield progress
        # The function may stop planning at any call; now nothing is left to stop.
        with suppress(Interrupted):
            progress(1.0, "done")
    elif progress is False or not sys.stderr.isatty():
        yield None
    else:
        with ExitStack() as at_end:
            hook = _bar(at_end)
            yield hook
            hook(1.0, "done")


def _bar(at_end: ExitStack) -> Hook:
    """Return a hook that shows a bar from its first call after a second on; ``rich`` draws the bar
    if it is installed."""
    began = time.monotonic()
    draw: Hook | None = None

    def hook(share: float, what: str) -> None:
        nonlocal draw
        if draw is None:
            if share >= 1 or time.monotonic() - began < PATIENCE_SECONDS:
                return
            draw = _drawn(at_end)
        draw(share, what)

    return hook


def _drawn(at_end: ExitStack) -> Hook:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return _plain_bar(at_end)
    bar = at_end.enter_context(Progress(console=Console(stderr=True), transient=True))
    task = bar.add_task("planning", total=1.0)
    return lambda share, what: bar.update(task, completed=share, description=f"planning: {what}")


def _plain_bar(at_end: ExitStack, width: int = 40) -> Hook:
    def draw(share: float, what: str) -> None:
        filled = int(width * min(max(share, 0.0), 1.0))
        line = f"planning [{'#' * filled}{'.' * (width - filled)}] {share:4.0%} {what}"
        sys.stderr.write(f"\r{line[:79]:<79}")
        sys.stderr.flush()

    def wipe() -> None:
        sys.stderr.write("\r" + " " * 79 + "\r")
        sys.stderr.flush()

    at_end.callback(wipe)
    return draw
