"""The page of a plan or an explanation: its contents, that it is one file, that names are
escaped."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memsaving_gradients.errors import ArgumentError, MissingExtraError
from memsaving_gradients.reports.explanation import Layer
from memsaving_gradients.reports.web import page
from tests.helpers.reported import MIB, decision, explanation, plan

#: Elements without an end tag.
VOID = {"meta"}
EVIL = "<script>alert('x')</script>&\"/a:0"


class Page(HTMLParser):
    """A parsed page: its tables, its links, and a check that elements end where they should."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.numbers: list[str] = []
        self.scripts = 0
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)
        known = dict(attrs)
        outside = {"src", "href", "xlink:href", "srcset", "data", "action"}
        self.links += [value for name, value in attrs if name in outside]
        self.scripts += tag == "script"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if "data-value" in known:
            self.numbers.append(known["data-value"])

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


def test_a_plan_has_headline_numbers_a_figure_and_a_table_of_decisions(tmp_path: Path) -> None:
    made = plan(decisions=(decision("net/a:0", 64), decision("net/b:0", MIB, fate="recompute")))
    made.save_html(tmp_path / "plan.html")
    found = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))
    (table,) = found.tables
    assert table[0] == ["bytes", "fate", "tensor", "reason", "op", "source"]
    assert [row[:3] for row in table[1:]] == [
        ["1,048,576", "recompute", "net/b:0"],
        ["64", "keep", "net/a:0"],
    ]
    assert found.numbers == ["1048576", "64"]
    shown = " ".join(found.texts)
    for number in ("4.00 MiB", "8.00 MiB", "50 %", "12.5 %", "5.00 MiB", "1.00 MiB left"):
        assert number in shown


def test_an_explanation_has_tables_of_budgets_and_layers() -> None:
    found = Page(page.html(explanation(assumed_batch=32, assumed_steps=256)))
    budgets, layers = found.tables
    assert [row[0] for row in budgets[1:]] == ["8,388,608", "6,291,456", "3,145,728"]
    assert budgets[2][1:] == ["0.750", "10.0 %", "5.0 %", "4"]
    assert layers[1] == ["3,145,728", "net/block_0", "model.py:1"]
    shown = " ".join(found.texts)
    assert "batch of 32, assumed" in shown and "loops of 256 steps, assumed" in shown
    assert "budget=3145728" in shown
    assert "assumed" not in page.html(explanation())


def test_a_page_is_one_file_for_light_and_dark() -> None:
    text = page.html(explanation(), plan(decisions=(decision("a:0"),)), title="both")
    found = Page(text)
    # Links lead only to places in the page itself, such as the letters of the figures.
    assert all(link.startswith("#") for link in found.links)
    assert "url(http" not in text and "@import" not in text
    assert found.scripts == 1
    assert "prefers-color-scheme: dark" in text
    # Text in figures has the color of the page.
    assert "currentColor" in text and "#010203" not in text
    assert len(found.tables) == 3 and text.count("<svg ") == 2


def test_figures_in_a_page_are_whole() -> None:
    text = page.html(plan(decisions=(decision("a:0"),)))
    svg = text[text.index("<svg ") : text.index("</svg>") + len("</svg>")]
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label")


def test_names_are_escaped() -> None:
    made = plan(decisions=(decision(EVIL, MIB, reason="<b>", source="<i>.py:1"),))
    for text in (
        page.html(made, title="<title>"),
        page.html(explanation(layers=(Layer(EVIL, MIB, "</td>"),))),
    ):
        found = Page(text)
        assert found.scripts == 1
        assert any(EVIL in cell for table in found.tables for row in table for cell in row)


def test_the_same_report_gives_the_same_page() -> None:
    def text() -> str:
        return page.html(explanation(), plan(decisions=(decision("net/a:0", MIB),)))

    assert text() == text()


def test_a_plan_of_a_file_says_what_is_missing() -> None:
    known = {"decisions": (decision("net/a:0", MIB),), "chunks": (8 * MIB, 4 * MIB)}
    text = page.html(plan(simulation=None, simulation_plain=None, **known))
    assert "Read from a file" in text and Page(text)


def test_where_a_page_cannot_be_written() -> None:
    with pytest.raises(ArgumentError, match="there is no folder 'nowhere'"):
        explanation().save_html("nowhere/page.html")
    with pytest.raises(ArgumentError, match="is a folder"):
        explanation().save_html(".")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"Plan\.save_html needs matplotlib, .*\[plot\]"):
        plan().save_html(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
