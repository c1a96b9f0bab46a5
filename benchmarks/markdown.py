"""Wraps the prose of Markdown pages."""

from __future__ import annotations

import re
import textwrap

WIDTH = 100

#: Lines that stay as they are: tables, headings, comments, empty lines.
_KEPT = re.compile(r"\s*(\||#+ |<!--|$)")
#: The mark of a list item, with its indentation.
_ITEM = re.compile(r" *([-*+]|\d+[.)]) ")
#: Text without a line break inside: code spans and links.
_WHOLE = re.compile(r"`[^`]+`|\[[^\]]*\]\([^)]*\)")
#: A space before a word that would begin a list item, heading, quote or table in a line of its own.
_GLUE = re.compile(r" (?=([-*+>|]|#+|\d+[.)])( |$))")
#: Stands for a space at which lines do not break.
_SPACE = "\0"


def wrapped(text: str) -> str:
    """Return the text with its paragraphs and list items wrapped at `WIDTH` columns.

    Tables, headings, comments and fenced code stay as they are. Code spans and links stay in one
    line, whatever their length.

    Examples
    --------
    >>> print(wrapped("- **a**: " + 12 * "a word, " + "`one piece of code`."))
    - **a**: a word, a word, a word, a word, a word, a word, a word, a word, a word, a word, a word,
      a word, `one piece of code`.
    """
    done: list[str] = []
    open_: list[str] = []
    fenced = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        kept = fenced or fence or _KEPT.match(line) is not None
        fenced ^= fence
        if open_ and (kept or _ITEM.match(line)):
            done.append(_filled(open_))
            open_ = []
        (done if kept else open_).append(line)
    return "\n".join([*done, _filled(open_)] if open_ else done)


def _filled(lines: list[str]) -> str:
    """Return a paragraph or a list item, wrapped."""
    item = _ITEM.match(lines[0])
    mark = item[0] if item else ""
    text = " ".join(line.strip() for line in lines).removeprefix(mark.lstrip())
    text = _WHOLE.sub(lambda found: found[0].replace(" ", _SPACE), text)
    filled = textwrap.fill(
        _GLUE.sub(_SPACE, text),
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_SPACE, " ")
