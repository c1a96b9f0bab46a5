"""What MkDocs does besides: pages that are files beside ``docs``, so that nothing is written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Pages, and the files that they are.
TOP_LEVEL = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a file of the top level, with links as they are from here."""
    name = TOP_LEVEL.get(page.file.src_uri)
    if name is None:
        return markdown
    text = (Path(config.config_file_path).parent / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def on_serve(server: Any, config: Any, builder: Any) -> Any:
    """Build again when one of those files changes."""
    for name in TOP_LEVEL.values():
        server.watch(str(Path(config.config_file_path).parent / name))
    return server
