"""The page of approximations is the table in the code."""

from scripts.list_approximations import PAGE, page


def test_page_equals_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.list_approximations"
