"""The content of a report, read with the parser of the standard library."""

import json
from html.parser import HTMLParser


class PageReader(HTMLParser):
    """Collects elements, texts, scripts and tables of a page.

    Attributes:
        elements: Each start tag with its attributes.
        tables: Caption to rows, each a list of the texts of its cells.
        terms: Term to its description.
        scripts: Contents of the elements ``script`` by type; the script itself has no type.
        text: All visible text.
    """

    def __init__(self, page):
        super().__init__()
        self.elements, self.tables, self.terms, self.scripts, self.text = [], {}, {}, {}, ""
        self._open, self._rows, self._caption, self._term = [], None, "", ""
        self.feed(page)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in {"meta", "link", "input"}:
            return
        self._open.append((tag, dict(attributes)))
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"td", "th"}:
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag
        if tag == "table":
            self.tables[self._caption] = self._rows
            self._rows = None

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            kind = attributes.get("type", "")
            self.scripts[kind] = self.scripts.get(kind, "") + data
        elif tag != "style":
            self.text += data
        if tag == "caption":
            self._caption += data
        elif tag in {"td", "th"}:
            self._rows[-1][-1] += data
        elif tag == "dt":
            self._term = data
        elif tag == "dd":
            self.terms[self._term] = data

    @property
    def data(self):
        return json.loads(self.scripts["application/json"])
