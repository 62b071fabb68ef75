"""Summaries are aligned, escaped and of bounded length, and read no row that they do not show."""

from html.parser import HTMLParser

import pytest

from kfac_engine.summary import Summary, Table, counted, dimensions

HOSTILE = "<script>alert('x')</script>\x1b[31m\n\"&"
PRINTED = r"<script>alert('x')</script>\x1b[31m\n" + '"&'


class Reader(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def rows(count):
    return Table(("name", "size"), ((f"w{i}", i) for i in range(count)), count, "rows")


def test_lines_align_the_values_of_facts():
    text = Summary("Engine", {"loss": 1, "parameters": "two"}).lines()
    assert text == "Engine\n  loss        1\n  parameters  two"


def test_a_summary_without_facts_is_its_title():
    assert Summary("Engine", {}).page() == Summary("Engine", {}).lines() == "Engine"


def test_page_aligns_the_columns_of_the_table():
    text = Summary("Engine", {}, rows(2)).page()
    assert text == "Engine\n  name  size\n  w0    0\n  w1    1"


def test_html_has_facts_and_rows_in_order():
    reader = Reader(Summary("Engine", {"loss": 1}, rows(2)).html())
    assert reader.texts == ["Engine", "loss", "1", "name", "size", "w0", "0", "w1", "1"]


def test_html_escapes_every_text():
    table = Table((HOSTILE,), [(HOSTILE,)], 1, "rows")
    page = Summary(HOSTILE, {HOSTILE: HOSTILE}, table).html()
    reader = Reader(page)
    assert set(reader.tags) == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert reader.texts == [PRINTED] * 5
    assert reader.attributes == []


def test_lines_have_no_control_characters():
    text = Summary(HOSTILE, {"name": HOSTILE}, Table(("a",), [(HOSTILE,)], 1, "rows")).page()
    assert text.count(PRINTED) == 3
    assert len(text.splitlines()) == 4
    assert all(line.isprintable() for line in text.splitlines())


def test_long_tables_end_after_twenty_rows_with_the_number_of_the_others():
    read = []
    endless = Table(("a",), (read.append(i) or (i,) for i in range(10_000)), 10_000, "layers")
    text = Summary("Engine", {}, endless).page()
    assert text.splitlines()[-2:] == ["  19", "  … 9,980 more layers"]
    assert read == list(range(20))


def test_html_of_a_long_table_names_the_number_of_the_others():
    reader = Reader(Summary("Engine", {}, rows(10_000)).html())
    assert reader.texts[-1] == "… 9,980 more rows"
    assert reader.tags.count("tr") == 1 + 20 + 1
    assert reader.attributes == [("colspan", "2")]


@pytest.mark.parametrize("count", [19, 20])
def test_tables_of_twenty_rows_are_complete(count):
    assert "more" not in Summary("Engine", {}, rows(count)).page()


@pytest.mark.parametrize("text", ["n" * 1_000_000, "a b " * 250_000, "<" * 1_000_000])
def test_long_names_are_shortened(text):
    summary = Summary(text, {text: text}, Table((text,), [(text,)], 1, "rows"))
    assert len(summary.page()) < 1_000
    assert len(summary.html()) < 3_000


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 array"), (0, "0 arrays"), (1200, "1,200 arrays")]
)
def test_counted_agrees_in_number(count, text):
    assert counted(count, "array") == text


def test_dimensions_are_joined():
    assert dimensions((32, 16, 3)) == "32×16×3"
    assert dimensions(()) == "scalar"
