"""The content of a report, read with the parser of the standard library."""

import re
from html.parser import HTMLParser

import numpy as np


class PageReader(HTMLParser):
    """Collects elements, texts and tables of a page.

    Attributes:
        elements: Each start tag with its attributes.
        tables: Caption to rows, each a list of the texts of its cells.
        terms: Term to its description.
        text: All visible text.
    """

    def __init__(self, page):
        super().__init__()
        self.elements, self.tables, self.terms, self.text = [], {}, {}, ""
        self.page = page
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

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        opened, _ = self._open.pop()
        assert opened == tag
        if tag == "table":
            self.tables[self._caption] = self._rows
            self._rows = None

    def handle_data(self, data):
        tag, _ = self._open[-1] if self._open else ("", {})
        if tag != "style":
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
    def lines(self):
        """Chart and name of each line to its points: head of a column to its numbers."""
        return {
            tuple(caption.rsplit(": ", 1)): {
                head.partition(",")[0]: [float(cell) if cell else None for cell in column]
                for head, *column in zip(*rows, strict=True)
            }
            for caption, rows in self.tables.items()
            if ": " in caption
        }

    def drawn(self, title, number=0):
        """Pixels of the first line of a chart, as drawn against steps."""
        drawing = self.page.partition(f'aria-label="{title}">')[2].partition("</svg>")[0]
        path = re.findall(rf'd="([^"]*)" class="(?:line|faint) s{number}"', drawing)[0]
        return np.array([[float(x) for x in pair.split()] for pair in re.split("[ML]", path)[1:]])
