"""What MkDocs does besides: pages that are files beside ``docs``, and links from names to the
reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

#: Pages, and the files that they are: nothing is written twice.
TOP_LEVEL = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}

#: Inside of these, code is no link.
OPAQUE = {"a", "autoref", "h1", "h2", "h3", "h4", "h5", "h6", "pre"}
#: What a piece of code may name, and where the reference has it.
NAMES = (
    (re.compile(r"(?:ms|memsaving_gradients)\.([\w.]+)(?:\(\))?"), "memsaving_gradients.{}"),
    (re.compile(r"(graph_tools\.[\w.]+)(?:\(\))?"), "{}"),
    (re.compile(r"plan\.(\w+)"), "memsaving_gradients.Plan.{}"),
    (re.compile(r"(Plan(?:\.\w+)?)"), "memsaving_gradients.{}"),
    (re.compile(r"((?:[A-Z]\w+(?:Error|Warning))|PlanNote)"), "memsaving_gradients.errors.{}"),
    (re.compile(r"(MemorySavingGradients|Reparameterize)"), "memsaving_gradients.keras.{}"),
    (re.compile(r"(Limits|Proposal|Interrupted)"), "memsaving_gradients.planners.{}"),
    (re.compile(r"(TrainingGraph)"), "memsaving_gradients.schedules.training_graph.{}"),
)
#: Functions with the name of their module, which is found in their place.
OWN_MODULES = {
    "memsaving_gradients.gradient_error": (
        "memsaving_gradients.analysis.gradient_error.gradient_error"
    ),
}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a file of the top level, with links as they are from here."""
    name = TOP_LEVEL.get(page.file.src_uri)
    if name is None:
        return markdown
    text = (Path(config.config_file_path).parent / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Make code that is a public name a link to it; what the reference does not have stays as it
    is."""
    parts, inside = re.split(r"(<[^>]+>)", html), 0
    for i, part in enumerate(parts):
        tag = re.match(r"<(/?)(\w+)", part)
        if tag and tag[2] in OPAQUE:
            inside += -1 if tag[1] else 1
        elif part == "<code>" and not inside and (target := _target(parts[i + 1])):
            parts[i] = f'<autoref identifier="{target}" optional>{part}'
            parts[i + 2] += "</autoref>"
    return "".join(parts)


def _target(code: str) -> str | None:
    for pattern, where in NAMES:
        if found := pattern.fullmatch(code):
            name = where.format(found[1])
            return OWN_MODULES.get(name, name)
    return None
